"""Stand-ins for parts of PyTorch that transformers imports, and that nothing here uses: they cost a third of all imports.

transformers asks them for a few names while it is imported: decorators that matter when something is compiled, types of
tensors that are spread over devices. A stand-in gives those decorators as ones that do nothing, and any other name as a class
that nothing is an instance of, and that calls the real thing when it is called. So whoever uses one after all is served, later.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PARTS = ("torch._dynamo", "torch.distributed._composable", "torch.distributed.fsdp", "torch.distributed.tensor")
# Of torch._dynamo: for functions that will be compiled. What transformers 5.6 to 5.14 ask for, also through PyTorch 2.13.
DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")


@contextlib.contextmanager
def standing_in(parts: Sequence[str] = PARTS) -> Iterator[None]:
    """While it lasts, importing one of the parts gives its stand-in, unless it is there already."""
    finder = _Finder(parts)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.leave()


class _Finder(MetaPathFinder, Loader):
    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = tuple(part for part in parts if part not in sys.modules)
        self._made: list[ModuleType] = []

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A stand-in for the parts and what is inside them."""
        inside = any(fullname == part or fullname.startswith(f"{part}.") for part in self._parts)
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The stand-in."""
        self._made.append(_StandIn(spec.name, self.leave))
        return self._made[-1]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""

    def leave(self) -> None:
        """From now on, importing a part gives the part."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for module in self._made:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
            package, _, name = module.__name__.rpartition(".")
            if vars(sys.modules.get(package, sys)).get(name) is module:
                delattr(sys.modules[package], name)


class _StandIn(ModuleType):
    def __init__(self, name: str, leave: Callable[[], None]) -> None:
        super().__init__(name)
        self._leave = leave

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__} stands in for another, and has no {name}")
        module, leave = self.__name__, self._leave

        def call(_: type, *args: Any, **kwargs: Any) -> Any:
            leave()
            return getattr(importlib.import_module(module), name)(*args, **kwargs)

        value = _as_it_is if name in DECORATORS else type(name, (), {"__new__": call, "__module__": module})
        setattr(self, name, value)
        return value


def _as_it_is(function: Callable[..., Any] | None = None, *_args: object, **_kwargs: object) -> Callable[..., Any]:
    """A decorator that changes nothing, with arguments or without."""
    return _as_it_is if function is None else function

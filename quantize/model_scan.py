"""Lets transformers find the names in its models' files quickly: it reads all 1,500 of them while it is imported.

It looks through each file line by line for `__all__`, which stands at its end, and `transformers.models` does all of it again.
What it finds is the same. Source: transformers 5.14 utils/import_utils.py `fetch__all__`, `create_import_structure_from_path`.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "transformers.utils.import_utils"


@contextlib.contextmanager
def scanning_quickly() -> Iterator[None]:
    """For who imports transformers meanwhile."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.leave()


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module as it is, changed as soon as it is there."""
        if fullname != MODULE:
            return None
        self.leave()
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec else None
        if loader:
            execute = loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _quicken(module)

            loader.exec_module = execute_and_change
        return spec

    def leave(self) -> None:
        """Looks at no further import."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _quicken(import_utils: Any) -> None:
    fetch, scan = (getattr(import_utils, name, None) for name in ("fetch__all__", "create_import_structure_from_path"))
    if fetch:  # from the last line on that begins with it, which is the one that counts
        import_utils.fetch__all__ = lambda content: fetch(content[max(0, content.rfind("\n__all__")) :])
    if scan:  # keeps its last answers, by path
        models = Path(import_utils.__file__).parent.parent / "models"
        again = str(models / "__init__.py")
        import_utils.create_import_structure_from_path = lambda path: scan(models if path == again else path)

"""Records what a model's `load_weights` writes into which parameter, and how much of which checkpoint tensor it uses.

Every write ends in one of a few torch operations (`copy_`, `fill_`, `zero_`) on a view of a parameter, and a view shares
its parameter's storage. So the writes are seen below vLLM's many weight loaders, whichever of them a layer brings.
"""

import dataclasses
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = {torch.bfloat16, torch.float16, torch.float32, torch.float64}
COPY = torch.ops.aten.copy_.default
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How a parameter was covered by what was written into it.

    Attributes:
        once: Elements written at least once.
        again: Elements written once more, each time counted.
        gap: The first element that was not written; None when all were, or when the regions are scattered.
    """

    once: int
    again: int
    gap: int | None


@dataclasses.dataclass
class Written:
    """What was written into one parameter.

    Attributes:
        regions: Parts of its storage, as (first element, number of elements), in the order they were written.
        scattered: Whether a region was not one piece, as the columns of a row-major matrix.
        casts: A sentence for each tensor that went from a quantized dtype to a plain one, or the other way.
    """

    regions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    scattered: bool = False
    casts: set[str] = dataclasses.field(default_factory=set)

    def note(self, target: torch.Tensor, source: torch.Tensor | None, name: str | None) -> None:
        """Records one write into `target`, a view of the parameter; `name` is the checkpoint tensor it came from."""
        self.regions.append((target.storage_offset(), target.numel()))
        self.scattered |= not target.is_contiguous()
        if source is not None and source.dtype != target.dtype and not {source.dtype, target.dtype} <= PLAIN:
            self.casts.add(f"{name or 'a tensor'} is {word(source.dtype)}, the parameter is {word(target.dtype)}")

    def coverage(self, numel: int) -> Coverage:
        """Adds the regions up. Of scattered ones, only the very same region given again counts as written again."""
        total = sum(length for _, length in self.regions)
        if self.scattered:
            once = sum(length for _, length in set(self.regions))
            return Coverage(once, total - once, None)
        once, end, gap = 0, 0, None
        for start, length in sorted(self.regions):
            if start > end and gap is None:
                gap = end
            once += max(0, start + length - max(start, end))
            end = max(end, start + length)
        if gap is None and end < numel:
            gap = end
        return Coverage(once, total - once, gap)


class Recorder(TorchDispatchMode):
    """Sees every tensor operation while it is entered.

    Attributes:
        written: Parameter name to what was written into it.
        used: Checkpoint tensor name to how many of its elements were written into parameters.
        tensors: The checkpoint tensors, in the order they were handed out. They are kept, so that no other tensor gets a
            storage at the same address.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.written = {name: Written() for name, _ in model.named_parameters()}
        self.used: dict[str, int] = defaultdict(int)
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._parameters = {_storage(parameter): name for name, parameter in model.named_parameters()}
        self._sources: dict[int, str] = {}

    @property
    def reading(self) -> str:
        """The checkpoint tensor that was handed out last."""
        return self.tensors[-1][0] if self.tensors else ""

    def handed_out(self, name: str, tensor: torch.Tensor) -> None:
        """Takes note of a checkpoint tensor that is about to be loaded."""
        self.tensors.append((name, tensor))
        self._sources[_storage(tensor)] = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY:
            target, source = args[:2]
            self._note(target, source)
            if source.is_meta and not target.is_meta:
                return target  # a parameter that vLLM keeps on the CPU: there are no bytes to copy
        elif func in FILLS:
            self._note(args[0], None)
        return func(*args, **(kwargs or {}))

    def _note(self, target: torch.Tensor, source: torch.Tensor | None) -> None:
        parameter = self._parameters.get(_storage(target))
        if parameter is None:
            return
        name = None if source is None else self._sources.get(_storage(source))
        self.written[parameter].note(target, source, name)
        if name is not None and source is not None:
            self.used[name] += source.numel()


def word(dtype: torch.dtype) -> str:
    """A dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata

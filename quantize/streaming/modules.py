"""From a group of BF16 tensors to the packed tensors of its modules, under their checkpoint names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assemble.architecture import Architecture, fused_group
from assemble.errors import InputError
from assemble.formats import FP8, W4A16_NVFP4
from assemble.plan import natural
from quantize.streaming.e2m1 import E4M3_MAX
from quantize.streaming.packing import amax, pack_fp8, pack_nvfp4

EXPERTS = "mlp.experts"
EXPERT_WEIGHTS = 64_000_000  # of the routed experts that are packed, and go to the disk, in one go


class WeightError(InputError):
    """A weight of the source that cannot be used."""

    def __init__(self, tensor: str, what: str) -> None:
        super().__init__(
            f"tensor {tensor} {what}. Download or copy the checkpoint again; if it is so at its origin, it cannot be quantized."
        )


@dataclass(frozen=True)
class Measured:
    """Largest magnitudes that scales were made of, where they were made: on a GPU nobody has waited for them yet.

    Attributes:
        names: Of S weights, or of the module whose input it is.
        largest: float32 [S].
        inputs: Whether it is an input's.
    """

    names: Sequence[str]
    largest: Tensor
    inputs: bool = False

    def check(self, largest: Tensor) -> None:
        """Refuses what no scale follows from.

        Args:
            largest: The same on the host.

        Raises:
            WeightError: a weight that is all zeros, or not numbers. Names the first.
            InputError: inputs of an FP8 module that are.
        """
        for name, value in zip(self.names, largest.tolist(), strict=True):
            if 0 < value < float("inf"):
                continue
            if not self.inputs:
                raise WeightError(name, "is all zeros" if value == 0 else "holds NaN or infinity")
            raise InputError(
                f"{name}: the largest magnitude of its input over the calibration data is {value}: no scale follows from "
                "that. Use other calibration data; if it is so with any text, the model is damaged."
            )


@dataclass(frozen=True)
class Made:
    """The packed tensors of some modules by name, and what their scales were made of. Good for nothing before it is checked."""

    tensors: dict[str, Tensor]
    measured: list[Measured]

    def magnitudes(self) -> Tensor:
        """All that was measured, float32, on the device: what `check` is to be given."""
        return torch.cat([m.largest for m in self.measured]) if self.measured else torch.empty(0)

    def check(self, magnitudes: Tensor) -> None:
        """Refuses it when a scale of it follows from nothing; raises as `Measured.check`.

        Args:
            magnitudes: What `magnitudes` gave, on the host.
        """
        for m, largest in zip(self.measured, torch.split(magnitudes, [len(m.names) for m in self.measured]), strict=True):
            m.check(largest)


@dataclass(frozen=True)
class Packer:
    """Packs modules as the plan says.

    Attributes:
        architecture: Of the source.
        schemes: Module -> scheme, routed experts one by one.
        method: `max` or `mse`.
        wants: Whether a tensor is to be made; what nobody wants is not packed.
    """

    architecture: Architecture
    schemes: Mapping[str, str]
    method: str
    wants: Callable[[str], bool]

    def pack(self, prefix: str, tensors: Mapping[str, Tensor], input_amax: Mapping[str, Tensor]) -> Iterator[Made]:
        """Packs a group's modules, some at a time. On a GPU it is only queued: nobody waits for a number here.

        Args:
            prefix: What the checkpoint puts before the tensors' names.
            tensors: Name -> BF16 tensor, routed experts fused.
            input_amax: FP8 module -> the largest magnitude of its input, float32 [].
        """
        largest: dict[str, Tensor] = {}
        for name in sorted(tensors, key=natural):
            if name == f"{EXPERTS}.down_proj":
                yield from self._experts(prefix + EXPERTS, tensors[f"{EXPERTS}.gate_up_proj"], tensors[name])
            module = (prefix + name).removesuffix(".weight")
            scheme = self.schemes.get(module)
            if scheme is None or not self.wants(f"{module}.weight"):
                continue
            if scheme == FP8:
                yield _fp8(module, tensors[name], input_amax[module])
            else:
                yield self._nvfp4(module, prefix, tensors, largest)

    def _nvfp4(self, module: str, prefix: str, tensors: Mapping[str, Tensor], largest: dict[str, Tensor]) -> Made:
        """Modules that vLLM fuses share a tensor scale, so the largest magnitude is that of all of them.

        What was measured is kept in `largest` for the others of the group.
        """
        members = [m for m in fused_group(module) if self.schemes.get(m) == W4A16_NVFP4] or [module]
        measured = []
        for member in members:
            if member not in largest:
                weight = f"{member}.weight"
                largest[member] = amax(tensors[weight.removeprefix(prefix)].unsqueeze(0))
                measured.append(Measured([weight], largest[member]))
        together = torch.stack([largest[m] for m in members]).amax(dim=0)
        packed = pack_nvfp4(tensors[f"{module}.weight".removeprefix(prefix)].unsqueeze(0), together, self.method)
        named = {
            f"{module}.weight": packed.weight[0],
            f"{module}.weight_scale": packed.weight_scale[0],
            f"{module}.weight_scale_2": packed.weight_scale_2[0],
        }
        return Made(named, measured)

    def _experts(self, container: str, gate_up: Tensor, down: Tensor) -> Iterator[Made]:
        """The projections of a layer's routed experts from their fused tensors, many experts at a time.

        No expert needs to have seen a token. Gate and up of one expert share a tensor scale: that of the fused matrix.

        Args:
            container: The experts' module.
            gate_up: BF16 [E, 2I, H].
            down: BF16 [E, H, I].
        """
        step = max(1, EXPERT_WEIGHTS // (gate_up[0].numel() + down[0].numel()))
        for first in range(0, len(down), step):
            experts = [f"{container}.{i}" for i in range(first, min(first + step, len(down)))]
            if not any(self.wants(f"{expert}.{p}.weight") for expert in experts for p in ("down_proj", "gate_proj", "up_proj")):
                continue
            parts = [fused[first : first + step] for fused in (down, gate_up)]
            measured = [Measured(experts, amax(part)) for part in parts]
            packed = [pack_nvfp4(part, m.largest, self.method) for part, m in zip(parts, measured, strict=True)]
            named: dict[str, Tensor] = {}
            for i, expert in enumerate(experts):
                for projections, stack in zip((("down_proj",), ("gate_proj", "up_proj")), packed, strict=True):
                    codes, scales = (t[i].chunk(len(projections)) for t in (stack.weight, stack.weight_scale))
                    for n, projection in enumerate(projections):
                        named[f"{expert}.{projection}.weight"] = codes[n]
                        named[f"{expert}.{projection}.weight_scale"] = scales[n]
                        named[f"{expert}.{projection}.weight_scale_2"] = stack.weight_scale_2[i]
            yield Made({name: tensor for name, tensor in named.items() if self.wants(name)}, measured)


def _fp8(module: str, weight: Tensor, input_amax: Tensor) -> Made:
    largest, seen = amax(weight.unsqueeze(0)), input_amax.to(weight.device)
    packed, scale = pack_fp8(weight, largest[0])
    named = {
        f"{module}.weight": packed,
        f"{module}.weight_scale": scale,
        # On the device, as ModelOpt divides: a GPU divides by a constant by multiplying with its inverse.
        f"{module}.input_scale": seen / E4M3_MAX,
    }
    return Made(named, [Measured([f"{module}.weight"], largest), Measured([module], seen.unsqueeze(0), inputs=True)])

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
from quantize.streaming.packing import Packed, amax, pack_fp8, pack_nvfp4

EXPERTS = "mlp.experts"
EXPERT_WEIGHTS = 64_000_000  # of the routed experts that are packed, and go to the disk, in one go


class WeightError(InputError):
    """A weight of the source that cannot be used."""

    def __init__(self, tensor: str, what: str) -> None:
        super().__init__(
            f"tensor {tensor} {what}. Download or copy the checkpoint again; if it is so at its origin, it cannot be quantized."
        )


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

    def pack(self, prefix: str, tensors: Mapping[str, Tensor], input_amax: Mapping[str, float]) -> Iterator[dict[str, Tensor]]:
        """The packed tensors, some modules at a time.

        Args:
            prefix: What the checkpoint puts before the tensors' names.
            tensors: Name -> BF16 tensor, routed experts fused.
            input_amax: FP8 module -> the largest magnitude of its input.

        Raises:
            WeightError: a weight that has no scale: all zeros, or not numbers.
            InputError: inputs of an FP8 module that no scale follows from.
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
                yield self._nvfp4(module, tensors[name], self._group_amax(prefix, module, tensors, largest))

    def _group_amax(self, prefix: str, module: str, tensors: Mapping[str, Tensor], largest: dict[str, Tensor]) -> Tensor:
        """float32 [1]: modules that vLLM fuses share a tensor scale, so the largest magnitude is that of all of them.

        What was measured is kept in `largest` for the others of the group.
        """
        members = [m for m in fused_group(module) if self.schemes.get(m) == W4A16_NVFP4] or [module]
        for member in members:
            if member not in largest:
                weight = f"{member}.weight"
                largest[member] = _checked([weight], amax(tensors[weight.removeprefix(prefix)].unsqueeze(0)))
        return torch.stack([largest[m] for m in members]).amax(dim=0)

    def _nvfp4(self, module: str, weight: Tensor, tensor_amax: Tensor) -> dict[str, Tensor]:
        packed = pack_nvfp4(weight.unsqueeze(0), tensor_amax, self.method)
        return {
            f"{module}.weight": packed.weight[0],
            f"{module}.weight_scale": packed.weight_scale[0],
            f"{module}.weight_scale_2": packed.weight_scale_2[0],
        }

    def _experts(self, container: str, gate_up: Tensor, down: Tensor) -> Iterator[dict[str, Tensor]]:
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
            packed = [self._stack(experts, fused[first : first + step]) for fused in (down, gate_up)]
            named: dict[str, Tensor] = {}
            for i, expert in enumerate(experts):
                for projections, stack in zip((("down_proj",), ("gate_proj", "up_proj")), packed, strict=True):
                    codes, scales = (t[i].chunk(len(projections)) for t in (stack.weight, stack.weight_scale))
                    for n, projection in enumerate(projections):
                        named[f"{expert}.{projection}.weight"] = codes[n]
                        named[f"{expert}.{projection}.weight_scale"] = scales[n]
                        named[f"{expert}.{projection}.weight_scale_2"] = stack.weight_scale_2[i]
            yield {name: tensor for name, tensor in named.items() if self.wants(name)}

    def _stack(self, experts: Sequence[str], weight: Tensor) -> Packed:
        return pack_nvfp4(weight, _checked(experts, amax(weight)), self.method)


def _fp8(module: str, weight: Tensor, input_amax: float) -> dict[str, Tensor]:
    packed, scale = pack_fp8(weight, _checked([f"{module}.weight"], amax(weight.unsqueeze(0)))[0])
    if not 0 < input_amax < float("inf"):
        raise InputError(
            f"{module}: the largest magnitude of its input over the calibration data is {input_amax}: no scale follows from "
            "that. Use other calibration data; if it is so with any text, the model is damaged."
        )
    return {
        f"{module}.weight": packed,
        f"{module}.weight_scale": scale,
        # On the device, as ModelOpt divides: a GPU divides by a constant by multiplying with its inverse.
        f"{module}.input_scale": torch.tensor(input_amax, device=weight.device) / E4M3_MAX,
    }


def _checked(names: Sequence[str], largest: Tensor) -> Tensor:
    """The largest magnitudes of these tensors, when scales follow from them.

    Raises:
        WeightError: names the first for which none does.
    """
    good = (largest > 0) & largest.isfinite()
    if not bool(good.all()):
        bad = int((~good).nonzero()[0])
        raise WeightError(names[bad], "is all zeros" if largest[bad] == 0 else "holds NaN or infinity")
    return largest

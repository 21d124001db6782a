"""The hidden states on their way through the decoder, and the measurement of what FP8 modules see."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantize.streaming.activations import Activations
from quantize.streaming.decoder import Decoder
from quantize.streaming.faster.delta_rule import name_of
from quantize.streaming.packing import amax
from quantize.streaming.ranks import Ranks


class Calibration:
    """Runs decoder layers on all calibration rows.

    Args:
        decoder: Of the checkpoint.
        states: The hidden states before the first layer that will be run.
        ranks: The processes that share the rows.
    """

    def __init__(self, decoder: Decoder, states: Activations, ranks: Ranks) -> None:
        self._decoder, self.states, self._ranks = decoder, states, ranks
        self.layers_run = 0
        self.delta_rule: str | None = None  # what computed it, for the record

    def run(self, layer: int, tensors: Mapping[str, Tensor], measured: set[str], *, last: bool = False) -> dict[str, Tensor]:
        """Runs a layer on all rows. On a GPU, one process only queues it: nobody waits for a number here.

        Args:
            layer: Its number.
            tensors: Its weights, by their names inside the layer.
            measured: The modules inside the layer whose inputs are measured.
            last: No layer is run after it: what comes behind the measured inputs is left out, and the states stay as they are.

        Returns:
            Module -> the largest magnitude of its input, over all rows of all ranks, float32 []; 0 when it saw nothing.
        """
        module = self._decoder.layer(layer, tensors)
        self.delta_rule = self.delta_rule or name_of(module)
        modules = {name: part for name, part in module.named_modules() if name in measured}
        with _InputAmax(modules, self._decoder.device, stop=last) as seen:
            for hidden, part in self.states.batches():
                with suppress(_AllSeen):
                    self.states.put(part, self._decoder.forward(module, hidden))
        self.layers_run += 1
        if self._ranks.alone:
            return seen.values
        names = sorted(modules)
        return dict(zip(names, torch.tensor(self._ranks.largest([float(seen.values[name]) for name in names])), strict=True))


class _AllSeen(Exception):  # noqa: N818 - no error
    """Ends a forward pass when every module that is measured has its input."""


class _InputAmax:
    """Measures the largest magnitude of the inputs of some modules while it is entered.

    With `stop`, each forward pass ends by `_AllSeen` when all of them have been called.
    """

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device, *, stop: bool = False) -> None:
        self._modules, self._stop = modules, stop
        self._unseen = set(modules)
        self._largest = {name: torch.zeros((), device=device) for name in modules}
        self._last: tuple[Tensor, Tensor] | None = None

    def __enter__(self) -> "_InputAmax":
        self._hooks = [module.register_forward_pre_hook(self._hook(name)) for name, module in self._modules.items()]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._last = None

    @property
    def values(self) -> dict[str, Tensor]:
        """By module, float32 []; 0 for one that saw nothing."""
        return dict(self._largest)

    def _hook(self, name: str) -> Any:
        largest = self._largest[name]

        def measure(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self._last is None or self._last[0] is not inputs[0]:  # q, k and v are given the same tensor
                self._last = inputs[0], amax(inputs[0].unsqueeze(0))[0]
            torch.maximum(largest, self._last[1], out=largest)
            self._unseen.discard(name)
            if self._stop and not self._unseen:
                self._unseen = set(self._modules)
                raise _AllSeen

        return measure


def own_rows(rows: npt.NDArray[np.int32], batch_size: int, ranks: Ranks) -> npt.NDArray[np.int32]:
    """This rank's share of the rows [rows, T]."""
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)][ranks.rank :: ranks.size]
    return np.concatenate(batches) if batches else rows[:0]

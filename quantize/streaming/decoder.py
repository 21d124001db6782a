"""transformers' own decoder, run a layer at a time, with no weight of it resident.

The model's class is built on the meta device, where parameters have shapes and no bytes. A layer is a copy of one of its
layers with tensors put in place of the meta parameters. What a layer is called with (mask, rotary embedding, positions) is
what the model's own `forward` passes it: the forward is run once for each batch shape with the layers replaced by recorders.
So nothing of the architecture is written down here, and a newer transformers brings its own way of doing it. Some of its
functions are replaced by faster ones with the same bits (`quantize.streaming.faster`).
"""

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModel
from transformers.initialization import no_init_weights

from assemble.architecture import Architecture
from quantize.streaming.faster import convolution, delta_rule
from quantize.streaming.faster.experts import register_sorted_experts


class _NoBytes(TorchFunctionMode):
    """Makes parameters on the meta device, and leaves them unfilled.

    As `torch.device("meta")` does, but for what fills them: on that device PyTorch computes with Python code of its own, and
    imports for half a second first.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`; elsewhere, or not, as said above."""
        kwargs = kwargs or {}
        if func in (Tensor.uniform_, Tensor.normal_, torch.log) and args[0].is_meta:
            return args[0]
        if func in (torch.empty, torch.ones, torch.zeros) and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


class Decoder:
    """The decoder of a Qwen3.5 checkpoint, a layer at a time. Runs in BF16, in evaluation mode, without a cache.

    Args:
        architecture: Of the checkpoint.
        device: `cpu`, `cuda` or `cuda:N`.
    """

    def __init__(self, architecture: Architecture, device: str) -> None:
        self.device = torch.device(device)
        text = {key: value for key, value in architecture.text.items() if key != "model_type"}
        config = CONFIG_MAPPING[f"{architecture.model_type}_text"](**text)
        config._attn_implementation = "sdpa"
        config._experts_implementation = register_sorted_experts()
        with no_init_weights(), _NoBytes():
            self._model = AutoModel.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(requires_grad=False)
        self._model.rotary_emb = type(self._model.rotary_emb)(config=config).to(self.device)
        self._model.norm, self._norm = nn.Identity(), self._model.norm
        self._layers = list(self._model.layers)
        self._model.layers = nn.ModuleList(_Recorder() for _ in self._layers)
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._calls: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        self.hidden_size = int(config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    def layer(self, index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A decoder layer with weights, on the device.

        Args:
            index: Which, from 0.
            tensors: Name inside the layer (`mlp.down_proj.weight`; routed experts fused, as transformers holds them) ->
                tensor. One that is BF16 and on the device already is taken as it is, without a copy.

        Raises:
            RuntimeError: a tensor missing, unknown or misshapen.
        """
        module: nn.Module = copy.deepcopy(self._layers[index])
        placed = {name: tensor.to(self.device, torch.bfloat16) for name, tensor in tensors.items()}
        module.load_state_dict(placed, strict=True, assign=True)
        module.requires_grad_(requires_grad=False)
        self._numbers[module] = index
        return convolution.installed(delta_rule.installed(module, self.device), self.device)

    def embed(self, weight: Tensor, ids: Tensor) -> Tensor:
        """The embeddings [B, T, H] of token ids [B, T], BF16, on the device.

        Only the rows that are asked for are taken from `weight` [V, H], which may lie on the host.
        """
        rows = nn.functional.embedding(ids.to(weight.device).long(), weight)
        return rows.to(self.device, torch.bfloat16)

    def forward(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """One layer: hidden states [B, T, H] in and out, BF16, on the device. `module` is from `layer`."""
        with torch.inference_mode():
            result: Tensor = module(hidden, **self._arguments(hidden)[self._numbers[module]])
        return result

    def final_norm(self, weight: Tensor, hidden: Tensor) -> Tensor:
        """The hidden states [B, T, H] after the decoder's final norm, whose weight [H] is given."""
        norm = copy.deepcopy(self._norm)
        norm.load_state_dict({"weight": weight.to(self.device, torch.bfloat16)}, assign=True)
        with torch.inference_mode():
            result: Tensor = norm(hidden)
        return result

    def _arguments(self, hidden: Tensor) -> list[dict[str, Any]]:
        """What the model's forward passes to each layer for hidden states of this shape."""
        shape = tuple(hidden.shape)
        if shape not in self._calls:
            with torch.inference_mode():
                self._model(inputs_embeds=hidden, use_cache=False)
            self._calls[shape] = [recorder.call for recorder in self._model.layers]
        return self._calls[shape]


class _Recorder(nn.Module):
    """Stands in a layer's place, and keeps what it was called with."""

    call: dict[str, Any]

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.call = arguments
        return hidden

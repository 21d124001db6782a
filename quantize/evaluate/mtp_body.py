"""The body whose head drafts: what acceptance needs of a model, and the model run a layer at a time."""

import copy
from collections.abc import Callable
from typing import Any, Protocol

from assemble.architecture import Architecture
from quantize.evaluate.mtp_family import family_class, text_config


class Body(Protocol):
    """A model without its MTP head. All tensors are on `device`."""

    device: Any

    def start(self) -> None:
        """Forgets what was read."""
        ...

    def read(self, ids: Any) -> Any:
        """Reads tokens [B, N] after those that were read before: the states [B, N, H] after the final norm."""
        ...

    def extend(self, ids: Any) -> Any:
        """The states [B, N, H] for tokens [B, N] after those that were read; rows may be padded on the right.

        Leaves nothing behind: the next call starts at the same place again.
        """
        ...

    def embed(self, ids: Any) -> Any:
        """The embeddings [..., H] of token ids [...]."""
        ...

    def logits(self, hidden: Any) -> Any:
        """lm_head of states [..., H]: [..., V]."""
        ...


class LayerwiseBody:
    """A model run a layer at a time: as many layers as fit stay on the device, the others are loaded again each pass.

    What the layers cached of what was read is a transformers cache. `extend` gives each layer a copy of its part of it.

    Args:
        architecture: Of the checkpoint.
        decoder: A `quantize.streaming.decoder.Decoder`.
        layer_at: Layer number -> the layer, on the device.
        embedding: [V, H]; may lie on the host.
        norm: The final norm's weight, [H].
        lm_head: [V, H]; moved to the device.
        keep_bytes: Memory for layers that stay.
    """

    def __init__(
        self, architecture: Architecture, decoder: Any, layer_at: Callable[[int], Any], embedding: Any, norm: Any, lm_head: Any,
        keep_bytes: int = 0,
    ) -> None:  # fmt: skip
        import torch

        self._config = text_config(architecture)
        self._rotary = family_class(architecture, "TextRotaryEmbedding")(config=self._config).to(decoder.device)
        self._decoder, self._layer_at, self._embedding, self._norm = decoder, layer_at, embedding, norm
        self._lm_head = lm_head.to(decoder.device, torch.bfloat16)
        self._kept: dict[int, Any] = {}
        self._room = keep_bytes
        self._past: list[Any] = []
        self._length = 0
        self.device = decoder.device

    def start(self) -> None:
        """Forgets what was read."""
        self._past, self._length = [], 0

    def read(self, ids: Any) -> Any:
        """Reads tokens [B, N] and keeps them: the states [B, N, H]. The weights of layers that did not stay are read once."""
        hidden = self._run(ids, keep=True)
        self._length += ids.shape[1]
        return hidden

    def extend(self, ids: Any) -> Any:
        """The states [B, N, H] for tokens [B, N] after those that were read. The same weights are read."""
        return self._run(ids, keep=False)

    def embed(self, ids: Any) -> Any:
        """The embeddings of token ids."""
        return self._decoder.embed(self._embedding, ids)

    def logits(self, hidden: Any) -> Any:
        """lm_head."""
        import torch

        return torch.nn.functional.linear(hidden, self._lm_head)

    @property
    def resident_layers(self) -> int:
        """How many layers stayed on the device so far."""
        return len(self._kept)

    def _run(self, ids: Any, *, keep: bool) -> Any:
        import torch
        from transformers import DynamicCache

        hidden = self.embed(ids)
        queries = torch.arange(self._length, self._length + ids.shape[1], device=self.device)
        rotary = self._rotary(hidden, queries.expand(len(ids), -1))
        causal = (queries[:, None] >= torch.arange(self._length + ids.shape[1], device=self.device))[None, None]
        cache = DynamicCache(config=self._config)
        empty = list(cache.layers)
        for index, kind in enumerate(self._config.layer_types):
            if self._past:
                cache.layers[index] = copy.deepcopy(self._past[index])
            mask = causal if kind == "full_attention" else None
            hidden = self._layer(index)(hidden, position_embeddings=rotary, attention_mask=mask, past_key_values=cache)
            if not keep:
                cache.layers[index] = empty[index]
        if keep:
            self._past = list(cache.layers)
        return self._decoder.final_norm(self._norm, hidden)

    def _layer(self, index: int) -> Any:
        if index in self._kept:
            return self._kept[index]
        layer = self._layer_at(index)
        size = sum(parameter.nbytes for parameter in layer.parameters())
        if size <= self._room:
            self._room -= size
            self._kept[index] = layer
        return layer

"""The MTP head: its tensors, and what it computes.

transformers drops the head on load and has no code for it, so this is the one forward pass of the project that is written
down here, after vLLM (0.33 and 0.32 models/qwen3_5_mtp.py `Qwen3_5MultiTokenPredictor.forward`), out of transformers' own
decoder layer, norm and rotary embedding:

    x = fc(concat(pre_fc_norm_embedding(e), pre_fc_norm_hidden(h)))      e: embedding of token t+1
    y = norm(layers.0(x))                                                h: the body's state at t, after its final norm
    logits = lm_head(y)                                                  -> the draft of token t+2

The embedding comes first in `concat`. Embedding and lm_head are the body's. `layers.0` is a full-attention layer of the
body's class, at the body's rotary positions, causal over the head's inputs at all earlier positions.

A head of several layers: vLLM never passes a step number (`Qwen3_5MTP.forward`), so only `layers.0` drafts there; so here.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assemble.architecture import MTP_PREFIX, Architecture
from assemble.errors import InputError
from quantize.evaluate.mtp_family import family_class, text_config
from quantize.evaluate.simulation import simulate

LAYER = "layers.0."
SHOWN = 4


class HeadError(InputError):
    """A head that cannot draft: tensors missing, misshapen, or in a format that is not read here."""


@dataclass(frozen=True)
class Draft:
    """What one pass of the head is told besides its inputs.

    Attributes:
        positions: Rotary positions [B, T], int64.
        mask: True where a query may attend to a key: [B, 1, T, keys so far], bool.
        cache: A `transformers.DynamicCache` that holds the keys so far, and gets this pass's.
    """

    positions: Any
    mask: Any
    cache: Any


class Head:
    """A head with its weights on a device, BF16.

    Args:
        architecture: Of the checkpoint that the head is for.
        tensors: By name without `mtp.`, routed experts as two 3-D stacks a layer, as `Weights.mtp_tensors` returns them.
        device: Where it runs.
        kv_fp8: Round its keys and values to E4M3 at scale 1: a server keeps them in the cache that the body's are in.

    Raises:
        HeadError: tensors missing, or of another shape than the config implies.
    """

    def __init__(self, architecture: Architecture, tensors: Mapping[str, Any], device: Any, *, kv_fp8: bool = False) -> None:
        import torch

        check_complete(architecture, tensors)
        config = text_config(architecture, num_hidden_layers=1, layer_types=["full_attention"])
        norm, hidden = family_class(architecture, "RMSNorm"), config.hidden_size
        with torch.device("meta"):
            self._parts = torch.nn.ModuleDict(
                {
                    "fc": torch.nn.Linear(2 * hidden, hidden, bias=False),
                    "pre_fc_norm_embedding": norm(hidden, eps=config.rms_norm_eps),
                    "pre_fc_norm_hidden": norm(hidden, eps=config.rms_norm_eps),
                    "layers": torch.nn.ModuleList([family_class(architecture, "DecoderLayer")(config, 0)]),
                    "norm": norm(hidden, eps=config.rms_norm_eps),
                }
            )
        used = {
            n: t.to(device, torch.bfloat16) for n, t in tensors.items() if not n.startswith("layers.") or n.startswith(LAYER)
        }
        self._parts.load_state_dict(used, strict=True, assign=True)
        self._parts.eval().requires_grad_(requires_grad=False)
        if kv_fp8:
            simulate(self._parts["layers"][0], {}, (1.0, 1.0))  # type: ignore[index]
        self._rotary = family_class(architecture, "TextRotaryEmbedding")(config=config).to(device)

    def forward(self, embedding: Any, hidden: Any, draft: Draft) -> Any:
        """One pass: the states for the logits.

        Args:
            embedding: Of the token after each position, [B, T, H] BF16.
            hidden: The body's state at each position, or the head's own output for a draft's draft, [B, T, H] BF16.
            draft: Positions, mask and earlier keys.

        Returns:
            [B, T, H] BF16, after `norm`: what lm_head takes, and the `hidden` of the next draft.
        """
        import torch

        parts = self._parts
        both = torch.cat([parts["pre_fc_norm_embedding"](embedding), parts["pre_fc_norm_hidden"](hidden)], dim=-1)
        x = parts["fc"](both)
        x = parts["layers"][0](  # type: ignore[index]
            x,
            position_embeddings=self._rotary(x, draft.positions),
            attention_mask=draft.mask,
            past_key_values=draft.cache,
        )
        return parts["norm"](x)


def absent_tensors(architecture: Architecture, names: Container[str]) -> list[str]:
    """Tensors of the head that a checkpoint with these names does not have, in whichever layout it stores experts."""
    return [name for name in architecture.mtp_tensors if name not in names]


def check_complete(architecture: Architecture, tensors: Mapping[str, Any], absent: Sequence[str] = ()) -> None:
    """Compares a head, experts as stacks, with what the config implies.

    Args:
        architecture: Of the checkpoint.
        tensors: By name without `mtp.`.
        absent: What the files do not have.

    Raises:
        HeadError: a tensor missing or misshapen. vLLM says nothing about either, and drafts with what was in memory.
    """
    expected = dataclasses.replace(architecture, split_head_experts=False).mtp_tensors
    missing = list(absent) or [name for name in expected if name.removeprefix(MTP_PREFIX) not in tensors]
    wrong = [
        f"{name} is {list(found.shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if (found := tensors.get(name.removeprefix(MTP_PREFIX))) is not None and tuple(found.shape) != shape
    ]
    if len(missing) == len(architecture.mtp_tensors if absent else expected):
        raise HeadError("there is no MTP head: no mtp.* tensor. `python -m assemble splice` puts the source's back.")
    if missing or wrong:
        text = [f"{_listed(missing)} missing"] if missing else []
        text += [_listed(wrong)] if wrong else []
        raise HeadError(f"the MTP head is not whole: {'; '.join(text)}. `python -m assemble splice` puts the source's back.")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

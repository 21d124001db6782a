"""What a checkpoint holds, sorted by where vLLM puts it: sharded over the cards, copied to each, or not loaded at all.

Tensor parallelism in vLLM cuts a matrix by its output rows (column parallel) or its input columns (row parallel); either
way a card holds 1/TP of it. Key and value heads are cut until one a card is left, and copied from there on. What is small
(norms, routers, scalar scales) is copied. Where each module stands:

- vLLM 0.32 model_executor/models/qwen3_next.py `Qwen3NextAttention`, `Qwen3NextSparseMoeBlock`, `Qwen2MoeMLP`: q, k, v,
  gate, up by column, o and down by row, router and shared_expert_gate copied;
- model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py: in_proj_* and conv1d by column, out_proj by row, A_log and dt_bias
  by head, norm copied;
- model_executor/models/qwen3_5_mtp.py: fc by column; the head's embedding and lm_head are the decoder's own;
- model_executor/layers/vocab_parallel_embedding.py: embedding and lm_head by row.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assemble.architecture import LM_HEAD, MTP_PREFIX, VISION_PREFIX, Architecture, read_architecture
from assemble.checkpoint import Checkpoint, TensorInfo
from assemble.resolution import kv_cache_dtype

SHARDED, BY_KV_HEAD, COPIED = "sharded", "by KV head", "copied"
MTP_HEAD, VISION = "MTP head", "vision tower"
KINDS = (
    "routed experts", "MLP", "shared expert", "full attention", "linear attention", "embedding", "lm_head", "router and norms",
    VISION, MTP_HEAD,
)  # fmt: skip
FORMATS = {"U8": "4 bit", "F8_E4M3": "FP8", "BF16": "BF16", "F16": "F16", "F32": "F32", "I32": "4 bit"}


@dataclass
class Held:
    """Bytes of one kind of module, by the way they are split, and by the dtype they are stored in."""

    split: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes in the checkpoint."""
        return self.split.total()

    @property
    def stored(self) -> str:
        """The format of most of it: `4 bit`, `FP8`, `BF16`."""
        dtype = self.dtypes.most_common(1)[0][0]
        return FORMATS.get(dtype, dtype)

    def on_a_card(self, tensor_parallel: int, kv_heads: int) -> int:
        """Bytes on each of `tensor_parallel` cards."""
        kv_share = max(1, kv_heads // tensor_parallel) / kv_heads
        shares = {SHARDED: 1 / tensor_parallel, BY_KV_HEAD: kv_share, COPIED: 1.0}
        return round(sum(nbytes * shares[way] for way, nbytes in self.split.items()))


@dataclass(frozen=True)
class Model:
    """A checkpoint as `fit` sees it: bytes by kind, and what its config says about memory.

    Attributes:
        name: The checkpoint's directory or Hub id.
        architecture: What config.json implies.
        held: Bytes by kind; a kind that is absent is not there.
        kv_dtype: What `--kv-cache-dtype auto` becomes: `fp8_e4m3` or `bfloat16`.
        state_dtype: config.json's mamba_ssm_dtype; None where it has none.
        quantized: Whether config.json declares a quantization.
        vision_widths: The vision tower's hidden and intermediate size; zeros without one.
    """

    name: str
    architecture: Architecture
    held: Mapping[str, Held]
    kv_dtype: str
    state_dtype: str | None
    quantized: bool
    vision_widths: tuple[int, int] = (0, 0)

    @property
    def max_len(self) -> int:
        """The longest context that the model was made for (max_position_embeddings)."""
        value = self.architecture.text.get("max_position_embeddings")
        return value if type(value) is int and value > 0 else 262_144

    def number(self, key: str) -> int:
        """A positive integer of the text config, which `read_architecture` has checked."""
        value = self.architecture.text[key]
        assert isinstance(value, int)  # noqa: S101 - checked when the architecture was read
        return value

    @property
    def attention_layers(self) -> int:
        """Decoder layers with a growing KV cache."""
        return self.architecture.layer_types.count("full_attention")

    @property
    def linear_layers(self) -> int:
        """Decoder layers with a state of fixed size."""
        return self.architecture.layer_types.count("linear_attention")

    @property
    def draft_layers(self) -> int:
        """Layers of the MTP head, each with a KV cache of its own; 0 when the checkpoint has none of its tensors."""
        return max(1, self.architecture.num_mtp_layers) if MTP_HEAD in self.held else 0


def read_model(checkpoint: Checkpoint, name: str | None = None) -> Model:
    """Sorts a checkpoint's tensors.

    Args:
        checkpoint: Headers and config.json; nothing else is read.
        name: What to call it, when its directory is not its name.

    Raises:
        ConfigError: not a model of this family.
    """
    architecture = read_architecture(checkpoint.config, checkpoint)
    sums: dict[tuple[tuple[str, str], str], int] = defaultdict(int)
    for tensor in checkpoint.tensors.values():
        sums[place(tensor), tensor.dtype] += tensor.nbytes
    held: dict[str, Held] = defaultdict(Held)
    for ((kind, way), dtype), nbytes in sums.items():
        if kind == LM_HEAD and architecture.tied:
            continue  # vLLM uses the embedding
        held[kind].split[way] += nbytes
        held[kind].dtypes[dtype] += nbytes
    quantization = _quantization(checkpoint.config)
    kv = kv_cache_dtype(quantization) if quantization else "auto"
    state = architecture.text.get("mamba_ssm_dtype")
    return Model(
        name or str(checkpoint.root),
        architecture,
        {kind: held[kind] for kind in KINDS if kind in held},
        "fp8_e4m3" if kv == "fp8_e4m3" else "bfloat16",
        state if isinstance(state, str) else None,
        quantized=bool(quantization),
        vision_widths=_vision_widths(checkpoint.config),
    )


def _vision_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    vision = config.get("vision_config")
    values = [vision.get(key) for key in ("hidden_size", "intermediate_size")] if isinstance(vision, Mapping) else []
    hidden, inner = (value if type(value) is int else 0 for value in values or (0, 0))
    return hidden, inner


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    value = config.get("quantization_config")
    return value if isinstance(value, Mapping) else {}


def place(tensor: TensorInfo) -> tuple[str, str]:
    """The kind of module that a tensor belongs to, and how it is split."""
    name = tensor.name
    if ".mlp.experts." in name:  # first: nearly all tensors of a mixture of experts
        kind, way = "routed experts", SHARDED
    elif name.startswith(VISION_PREFIX):
        matrix = len(tensor.shape) == 2 and (".blocks." in name or ".linear_fc" in name)
        return VISION, SHARDED if matrix else COPIED
    else:
        kind, way = _of_decoder(name)
    if tensor.nbytes <= 8:  # a scalar scale
        way = COPIED
    return (MTP_HEAD, way) if name.startswith(MTP_PREFIX) else (kind, way)


def _of_decoder(name: str) -> tuple[str, str]:
    if ".mlp." in name:
        return _of_mlp(name)
    if ".linear_attn." in name:
        return "linear attention", COPIED if ".linear_attn.norm." in name else SHARDED
    if ".self_attn." in name:
        return "full attention", _of_attention(name)
    if name.startswith(f"{LM_HEAD}.") or ".embed_tokens." in name:
        return LM_HEAD if name.startswith(LM_HEAD) else "embedding", SHARDED
    return "router and norms", SHARDED if name.startswith(f"{MTP_PREFIX}fc.") else COPIED


def _of_attention(name: str) -> str:
    if ".k_proj." in name or ".v_proj." in name:
        return BY_KV_HEAD
    return SHARDED if ".q_proj." in name or ".o_proj." in name else COPIED


def _of_mlp(name: str) -> tuple[str, str]:
    if ".mlp.gate." in name or ".shared_expert_gate." in name:
        return "router and norms", COPIED
    return ("shared expert" if ".shared_expert." in name else "MLP"), SHARDED

"""The cache of a hybrid model, as vLLM pages it: one pool of equal blocks for KV that grows and for states that do not.

Full attention keeps a key and a value of every token: `2 x KV heads x head_dim x bytes` a layer. A Gated DeltaNet layer keeps
a state of fixed size instead: the last inputs of its convolution, and one matrix a head. vLLM wants one page size for both,
so it makes the *attention block* longer until its page holds a state (a multiple of 16 tokens), pads the state's page up to
it, and groups the layers: as many in each group as there are attention layers, one block of every group's layers being the
pool's unit. A 27B over two cards with an FP8 cache has blocks of 848 tokens with BF16 states, of 1,616 with float32 ones.

A request of L tokens takes ceil(L / block) blocks for the attention group, and for each group of linear layers a fixed number
of states: 1, or 2 with prefix caching (mode `align`), and one more for every drafted token. That fixed part is why halving the
state's dtype helps short contexts much and long ones little, and why FP8 does not quite halve the bytes a token.

"Tokens in the pool" in vLLM's log is therefore no capacity of the pool alone: it is `blocks / (blocks of one request of
max_model_len) x max_model_len`, and changes with --max-model-len.

Sources, vLLM 0.32: platforms/interface.py `_align_hybrid_block_size`; v1/kv_cache_interface.py `AttentionSpec`, `MambaSpec`;
v1/core/kv_cache_utils.py `_get_kv_cache_groups_uniform_page_size`, `get_max_concurrency_for_kv_cache_config`,
`get_kv_cache_capacity`; model_executor/layers/mamba/mamba_utils.py `gated_delta_net_state_shape`;
model_executor/models/config.py `Qwen3_5ForConditionalGenerationConfig`, `MambaModelConfig`. Read alike in 0.20, 0.25.1, 0.27.1.
"""

import math
from dataclasses import dataclass

from assemble.fit.model import Model
from assemble.fit.settings import ServeSettings

KERNEL_BLOCK = 16  # tokens; of FlashInfer, Triton and FlashAttention on sm_120 (`get_supported_kernel_block_sizes`)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1}
PADDED_GROUP = 1.5  # below this ratio of layer counts, the larger becomes the group's size


@dataclass(frozen=True)
class CacheGeometry:
    """Pages, blocks and groups of one card.

    Attributes:
        attention_layers: Layers with KV, the MTP head's not counted.
        draft_layers: The MTP head's, when it drafts.
        linear_layers: Layers with a state.
        token_bytes: KV of one token in one layer.
        state_bytes: State of one linear layer: convolution and recurrence.
        block_tokens: Tokens an attention block holds.
        states: States a request keeps in each linear layer.
    """

    attention_layers: int
    draft_layers: int
    linear_layers: int
    token_bytes: int
    state_bytes: int
    block_tokens: int
    states: int

    @property
    def page_bytes(self) -> int:
        """One block of one layer."""
        return self.block_tokens * self.token_bytes

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.attention_layers + self.draft_layers, self.linear_layers

    @property
    def group_layers(self) -> int:
        """Layers in a group; a group with fewer is padded."""
        sizes = [size for size in self._sizes if size]
        return max(sizes) if max(sizes) < PADDED_GROUP * min(sizes) else min(sizes)

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of attention layers and of linear layers."""
        attention, linear = (math.ceil(size / self.group_layers) for size in self._sizes)
        return attention, linear

    @property
    def block_bytes(self) -> int:
        """The pool's unit."""
        return self.group_layers * self.page_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in all decoder layers: the field reports' number."""
        return self.attention_layers * self.token_bytes

    @property
    def state_blocks(self) -> int:
        """Blocks that a request takes before its first token."""
        return self.groups[1] * self.states

    def blocks(self, context: int) -> int:
        """Blocks that a request of `context` tokens takes."""
        return self.groups[0] * math.ceil(context / self.block_tokens) + self.state_blocks

    def bytes_per_token(self, context: int) -> float:
        """Bytes a token takes in a request of `context` tokens, its states and padding included."""
        return self.blocks(context) * self.block_bytes / context

    def longest(self, blocks: int, limit: int) -> int:
        """The longest request that fits in `blocks`, `limit` at most; 0 when not even one token does."""
        free = (blocks - self.state_blocks) // self.groups[0] if self.groups[0] else limit
        return max(0, min(limit, free * self.block_tokens))


def geometry(model: Model, settings: ServeSettings, tensor_parallel: int) -> CacheGeometry:
    """The cache of one of `tensor_parallel` cards. `settings` are filled."""
    drafts = settings.num_speculative_tokens
    heads = max(1, model.number("num_key_value_heads") // tensor_parallel)
    token_bytes = 2 * heads * model.number("head_dim") * DTYPE_BYTES[kv_dtype(model, settings)]
    state_bytes = _state_bytes(model, settings, tensor_parallel) if model.linear_layers else 0
    block_tokens = KERNEL_BLOCK * max(1, math.ceil(state_bytes / (KERNEL_BLOCK * token_bytes)))
    return CacheGeometry(
        model.attention_layers,
        model.draft_layers if drafts else 0,
        model.linear_layers,
        token_bytes,
        state_bytes,
        block_tokens,
        (2 if settings.enable_prefix_caching else 1) + drafts,
    )


def kv_dtype(model: Model, settings: ServeSettings) -> str:
    """The dtype of the KV cache, `auto` resolved."""
    return model.kv_dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype


def state_dtypes(model: Model, settings: ServeSettings) -> tuple[str, str]:
    """The dtypes of a linear layer's convolution and recurrence, `auto` resolved."""
    conv = "bfloat16" if settings.mamba_cache_dtype == "auto" else settings.mamba_cache_dtype
    if settings.mamba_ssm_cache_dtype != "auto":
        return conv, settings.mamba_ssm_cache_dtype
    return conv, model.state_dtype if model.state_dtype in DTYPE_BYTES else conv


def _state_bytes(model: Model, settings: ServeSettings, tensor_parallel: int) -> int:
    conv, recurrent = (DTYPE_BYTES[dtype] for dtype in state_dtypes(model, settings))
    keys, values = model.number("linear_key_head_dim"), model.number("linear_value_head_dim")
    heads = model.number("linear_num_value_heads")
    width = 2 * keys * model.number("linear_num_key_heads") + values * heads
    length = model.number("linear_conv_kernel_dim") - 1 + settings.num_speculative_tokens
    return width // tensor_parallel * length * conv + heads // tensor_parallel * values * keys * recurrent

"""The buffers that vLLM allocates for adapters before it has seen one.

With --enable-lora every supported module gets, for each of --max-loras adapters, an A of [rank, inputs] and a B of
[outputs, rank] in the model's dtype, of --max-lora-rank whatever the adapter's own rank is. A mixture of experts gets them for
every expert: that is where the memory goes.

Split over cards: B of a column-parallel module and A of a row-parallel one are cut, the other half is copied
(--fully-sharded-loras, which cuts both, is not assumed).

The experts of this family are 3-D (`is_3d_moe_weight`), so gate and up share one A: `FusedMoE3DWithLoRA`. Other models, and
0.32 with --enable-mixed-moe-lora-format, use `FusedMoEWithLoRA` with an A each: a third more.

Sources, vLLM 0.32, read alike in 0.20 and 0.25.1: lora/layers/fused_moe.py, lora/layers/base_linear.py
`create_lora_weights`, lora/layers/vocab_parallel_embedding.py, lora/layers/logits_processor.py,
model_executor/models/qwen3_5.py `is_3d_moe_weight`.
"""

from assemble.architecture import LM_HEAD
from assemble.fit.model import Model

BYTES = 2  # config/lora.py `lora_dtype` "auto": the model's BF16
ROW_PARALLEL = (".o_proj", ".out_proj", ".down_proj")
COPIED = (".mlp.gate", ".shared_expert_gate")
SLICES = {".in_proj_qkv": 3}  # one tensor here, three slices of in_proj_qkvz in vLLM, each with an A of its own


def lora_bytes(model: Model, rank: int, max_loras: int, tensor_parallel: int) -> tuple[int, int]:
    """Bytes of adapter buffers on each card.

    Args:
        model: The model that the adapters are for.
        rank: --max-lora-rank; 0 for none.
        max_loras: --max-loras.
        tensor_parallel: Number of cards.

    Returns:
        For the routed experts, and for everything else.
    """
    if not rank:
        return 0, 0
    experts = _experts(model, tensor_parallel)
    modules = model.architecture.common_modules.items()
    others = sum(_module(name, rows, columns, tensor_parallel) for name, (rows, columns) in modules)
    hidden, vocab = model.number("hidden_size"), model.number("vocab_size")
    others += vocab + hidden  # the embedding's, whole on every card
    scale = rank * max_loras * BYTES
    return experts * scale, others * scale


def _experts(model: Model, tensor_parallel: int) -> int:
    """Elements of A and B for each unit of rank, in all layers."""
    architecture = model.architecture
    if not architecture.moe:
        return 0
    hidden, inner = model.number("hidden_size"), model.number("moe_intermediate_size") // tensor_parallel
    gate_up, down = hidden + 2 * inner, inner + hidden
    return architecture.num_experts * (gate_up + down) * architecture.num_layers


def _module(name: str, rows: int, columns: int, tensor_parallel: int) -> int:
    slices = next((count for suffix, count in SLICES.items() if name.endswith(suffix)), 1)
    if name.endswith(COPIED) or name == LM_HEAD:
        return columns + rows
    if name.endswith(ROW_PARALLEL):
        return columns // tensor_parallel + rows
    return slices * columns + rows // tensor_parallel

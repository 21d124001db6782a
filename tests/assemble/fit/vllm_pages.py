"""Run by an interpreter that has vLLM: pages, blocks, groups and tokens as vLLM's own code computes them.

Reads a list of cases from stdin; prints for each block tokens, bytes of a block, groups, and "GPU KV cache size" in tokens.
`_align_hybrid_block_size` itself wants a whole engine config; its two lines of arithmetic are repeated here.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def attention(case: dict[str, Any], block: int) -> FullAttentionSpec:
    heads = max(1, case["kv_heads"] // case["tp"])
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=case["head_dim"], dtype=DTYPES[case["kv"]])


def answer(case: dict[str, Any]) -> list[int]:
    mode = "align" if case["prefix"] else "none"
    linear = {
        "shapes": MambaStateShapeCalculator.gated_delta_net_state_shape(
            case["tp"], case["k_heads"], case["v_heads"], case["k_dim"], case["v_dim"], case["kernel"], case["drafts"]
        ),
        "dtypes": (DTYPES[case["conv"]], DTYPES[case["recurrent"]]),
        "mamba_cache_mode": mode,
        "num_speculative_blocks": case["drafts"],
    }
    state = MambaSpec(block_size=-1, **linear).page_size_bytes
    block = 16 * -(-state // (16 * attention(case, 1).page_size_bytes))
    page = attention(case, block)
    mamba = MambaSpec(block_size=block if case["prefix"] else case["length"], page_size_padded=page.page_size_bytes, **linear)
    specs = {f"a{i}": page for i in range(case["attention"])} | {f"m{i}": mamba for i in range(case["linear"])}
    groups = kv_cache_utils._get_kv_cache_groups_uniform_page_size(specs)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["length"]),
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    pool = SimpleNamespace(kv_cache_groups=groups, num_blocks=case["blocks"])
    concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, pool)
    nbytes = max(sum(specs[name].page_size_bytes for name in group.layer_names) for group in groups)
    return [block, nbytes, len(groups), int(concurrency * case["length"])]


if __name__ == "__main__":
    for each in json.load(sys.stdin):
        print(json.dumps(answer(each)))  # noqa: T201 - this is its answer

"""The page arithmetic against vLLM's own code, run by an interpreter that has it."""

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from assemble.fit import Model, ServeSettings, parse_cards
from assemble.fit.cache import CacheGeometry, geometry

SCRIPT = Path(__file__).with_name("vllm_pages.py")
ROOT = Path(__file__).parents[3]
BLOCKS = 1234


def case(model: Model, found: CacheGeometry, cards: int, settings: ServeSettings) -> dict[str, Any]:
    number = model.number
    return {
        "tp": cards,
        "k_heads": number("linear_num_key_heads"),
        "v_heads": number("linear_num_value_heads"),
        "k_dim": number("linear_key_head_dim"),
        "v_dim": number("linear_value_head_dim"),
        "kernel": number("linear_conv_kernel_dim"),
        "kv_heads": number("num_key_value_heads"),
        "head_dim": number("head_dim"),
        "drafts": settings.num_speculative_tokens,
        "conv": settings.mamba_cache_dtype,
        "recurrent": settings.mamba_ssm_cache_dtype,
        "kv": settings.kv_cache_dtype,
        "prefix": settings.enable_prefix_caching,
        "length": settings.max_model_len,
        "attention": found.attention_layers + found.draft_layers,
        "linear": found.linear_layers,
        "blocks": BLOCKS,
    }


@pytest.mark.vllm
def test_blocks_bytes_groups_and_tokens_are_vllms(model_27b: Model, model_35b: Model) -> None:
    python = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python")).absolute()
    if not python.is_file():
        pytest.skip(f"vLLM's environment is not there ({python}): make vllm-env builds it")
    cases, expected = [], []
    for model, cards, drafts, kv, state, prefix, length in itertools.product(
        (model_27b, model_35b),
        (1, 2, 4),
        (0, 2, 4),
        ("fp8", "bfloat16"),
        ("float32", "bfloat16"),
        (True, False),
        (5000, 150_000),
    ):
        settings = ServeSettings(
            max_model_len=length, num_speculative_tokens=drafts, kv_cache_dtype=kv, mamba_cache_dtype="bfloat16",
            mamba_ssm_cache_dtype=state, enable_prefix_caching=prefix,
        ).filled(parse_cards("16GB").card, model.max_len)  # fmt: skip
        found = geometry(model, settings, cards)
        cases.append(case(model, found, cards, settings))
        tokens = int(BLOCKS / found.blocks(length) * length)
        expected.append([found.block_tokens, found.block_bytes, sum(found.groups), tokens])
    result = subprocess.run([python, SCRIPT], input=json.dumps(cases), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")] == expected

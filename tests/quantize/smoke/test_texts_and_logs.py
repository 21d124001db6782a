"""Detectors of broken text, and what is read out of logs."""

import pytest

from quantize.smoke import logs, texts
from quantize.smoke.failures import EXPECTED, WARNINGS, signs
from tests.quantize.smoke.replay import RECORDED, recorded

# As vLLM 0.26 on an H200 and 0.32 word them (sources in logs.py).
OLD = """
(EngineCore pid=1) INFO 11-28 10:00:01 [cuda.py:483] Using FLASH_ATTN attention backend out of potential backends: ['F'].
(EngineCore pid=1) INFO 11-28 10:00:01 [__init__.py:605] Selected CutlassFP8ScaledMMLinearKernel for ModelOptFp8LinearMethod
(EngineCore pid=1) WARNING 11-28 10:00:02 [marlin_utils_fp4.py:353] Your GPU does not have native support for FP4 ...
(EngineCore pid=1) INFO 11-28 10:00:03 [nvfp4.py:242] Using 'MARLIN' NvFp4 MoE backend out of potential backends: ['MARLIN'].
(EngineCore pid=1) INFO 11-28 10:00:04 [kv_cache_utils.py:2177] GPU KV cache size: 1,234,567 tokens
(EngineCore pid=1) INFO 11-28 10:00:04 [kv_cache_utils.py:2177] GPU KV cache size: 1,234,000 tokens
"""
NEW = """
INFO [__init__.py:1240] Using MarlinNvFp4LinearKernel for NVFP4 GEMM
INFO [__init__.py:700] Selected FlashInferFP8ScaledMMLinearKernel for QKVParallelLinear
"""


def test_kernels_are_read_from_both_wordings() -> None:
    assert logs.kernels(OLD) == {"FP8": ["CutlassFP8ScaledMMLinearKernel"], "attention": ["FLASH_ATTN"], "experts": ["MARLIN"]}
    assert logs.kernels(NEW) == {"NVFP4": ["MarlinNvFp4LinearKernel"], "FP8": ["FlashInferFP8ScaledMMLinearKernel"]}


def test_the_smallest_pool_counts() -> None:
    assert logs.pool_tokens(OLD) == 1_234_000
    assert logs.pool_tokens("nothing") is None


def test_a_real_log_tells_its_pool() -> None:
    assert (logs.pool_tokens(recorded("mtp").log) or 0) > 1000


def test_layers_tell_kernels_in_both_generations_of_vllm() -> None:
    layers = {
        "MergedColumnParallelLinear: ModelOptNvFp4W4A16LinearMethod: MarlinNvFp4LinearKernel": 4,
        "ParallelLMHead: ModelOptLinearMethod[KNvfp4Static]: MarlinNvFp4LinearKernel": 1,
        "QKVParallelLinear: ModelOptLinearMethod[KFp8StaticTensor]: CutlassFP8ScaledMMLinearKernel": 1,
        "RowParallelLinear: ModelOptFp8LinearMethod: -": 2,
        "ColumnParallelLinear: UnquantizedLinearMethod: -": 3,
    }
    assert logs.num_quantized(layers) == {"NVFP4": 5, "FP8": 3}
    assert logs.kernels_of_layers(layers) == {"NVFP4": ["MarlinNvFp4LinearKernel"], "FP8": ["CutlassFP8ScaledMMLinearKernel"]}


def test_expected_warnings_are_no_faults() -> None:
    assert signs(OLD, WARNINGS) == []
    assert [line[-3:] for _, line in signs(OLD, EXPECTED)] == ["..."]


@pytest.mark.parametrize("name", ["plain", "mtp"])
def test_a_good_log_shows_no_sign_of_trouble(name: str) -> None:
    assert signs((RECORDED / f"{name}.log").read_text()) == []


def test_one_token_again_and_again_is_stuck() -> None:
    assert texts.stuck([1, 2, *[0] * texts.RUN])
    assert not texts.stuck([1, 2] * 50)
    assert not texts.stuck([0] * (texts.RUN - 1))


@pytest.mark.parametrize("phrase", [[4], [1, 2], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_a_phrase_again_and_again_loops(phrase: list[int]) -> None:
    assert texts.loops([*range(100, 120), *(phrase * 20)])


def test_text_does_not_loop() -> None:
    assert not texts.loops(list(range(128)))
    assert not texts.loops([1, 2] * 4)  # too short to tell
    assert not any(texts.loops(output.tokens) and texts.stuck(output.tokens) for output in recorded("plain").outputs)

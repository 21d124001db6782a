"""The points that two field reports measured, each with how near `fit` comes and why that is near enough.

Where a point is arithmetic (pages, blocks, bytes a token) it is met exactly. Where it is what a running engine had left over
for the cache, the sum of everything else stands against it: a cache of 2.7 of 14.5 GiB moves by 5 % when 0.14 GiB, 1 % of the
budget, is misjudged.
"""

import dataclasses

import pytest

from assemble.fit import Fit, Model, ServeSettings, fit, parse_cards
from assemble.fit.cache import CacheGeometry, geometry
from assemble.fit.estimate import AGENTS_SHARE
from assemble.fit.lora import lora_bytes
from assemble.fit.overhead import graph_bytes
from assemble.fit.settings import GIB

TWO_16GB = parse_cards("2xRTX5070Ti")
ONE_48GB = parse_cards("1xRTXPRO5000")
ONE_32GB = parse_cards("1xRTX5090")
ONE_96GB = parse_cards("1xRTXPRO6000")
WORKSPACE = 64 * 1024 * 1024
BF16_STATES = {"mamba_cache_dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}

NIGHTLY = "0.27.2rc1.dev110"  # caches prefixes of hybrid models by default, as releases do from 0.28 on

LONG_CONTEXT = ServeSettings(
    gpu_memory_utilization=0.94, max_model_len=150_000, max_num_seqs=3, max_num_batched_tokens=1024, kv_cache_dtype="fp8",
    num_speculative_tokens=4, language_model_only=True, flashinfer_workspace_bytes=WORKSPACE, vllm=NIGHTLY, **BF16_STATES,
)  # fmt: skip
THROUGHPUT = ServeSettings(
    gpu_memory_utilization=0.95, max_model_len=98_304, max_num_seqs=8, num_speculative_tokens=4, language_model_only=True,
    vllm=NIGHTLY,
)  # fmt: skip
# The older build: prefix caching off, as releases before 0.28 have it, and no full graphs with drafts (FlashInfer of that
# time had none: "FULL_AND_PIECEWISE is not supported with spec-decode", vLLM 0.20 to 0.25).
OLDER_BUILD = dataclasses.replace(LONG_CONTEXT, max_model_len=160_000, vllm="0.25", cudagraph_mode="PIECEWISE")
AGENTS_48GB = ServeSettings(
    gpu_memory_utilization=0.90, max_model_len=65_536, max_num_batched_tokens=8192, kv_cache_dtype="fp8", max_lora_rank=64,
    vllm="0.25",
)  # fmt: skip
ON_32GB = dataclasses.replace(AGENTS_48GB, max_lora_rank=0, max_num_seqs=32, max_cudagraph_capture_size=32)
AGENTS_96GB = ServeSettings(kv_cache_dtype="bfloat16", max_lora_rank=64, vllm="0.20")


def cache(model: Model, settings: ServeSettings, cards: int) -> CacheGeometry:
    return geometry(model, settings.filled(TWO_16GB.card, model.max_len), cards)


def tokens(found: CacheGeometry, blocks: int, length: int) -> int:
    """vLLM's "GPU KV cache size" for a pool of so many blocks."""
    return int(blocks / found.blocks(length) * length)


def near(measured: float, share: float) -> object:
    return pytest.approx(measured, rel=share)


def test_27b_has_16384_bytes_a_token_a_card(model_27b: Model) -> None:
    assert fit(model_27b, TWO_16GB, LONG_CONTEXT).kv_bytes_per_token == 16_384


def test_27b_weights_are_10_5_gb_a_card(model_27b: Model) -> None:
    """The report has 9.9 GiB and 10.5 GiB. The headers have 10.50 GB, which is 9.78 GiB: the second is GB; the first has an
    allocator's rounding on top, 1.2 % (a 27B on one card loads as 19.75 GiB elsewhere, headers 19.62)."""
    weights = fit(model_27b, TWO_16GB, LONG_CONTEXT).weights_bytes
    assert weights / 1e9 == pytest.approx(10.50, abs=0.01)
    assert weights / GIB == near(9.9, 0.015)


def test_150096_tokens_are_177_blocks_of_848(model_27b: Model) -> None:
    """vLLM: "estimated maximum model length is 150096" and a pool of 150,000 tokens, exactly 1.00x. One number of blocks
    gives both."""
    found = cache(model_27b, LONG_CONTEXT, 2)
    assert found.block_tokens == 848
    assert found.longest(195, 262_144) == 150_096
    assert tokens(found, 195, 150_000) == 150_000


def test_114480_tokens_are_92_blocks_with_float32_states(model_27b: Model) -> None:
    found = cache(model_27b, THROUGHPUT, 2)
    assert found.block_tokens == 1616
    assert tokens(found, 92, 98_304) == 114_480


def test_177254_tokens_are_226_blocks_without_prefix_caching(model_27b: Model) -> None:
    assert tokens(cache(model_27b, OLDER_BUILD, 2), 226, 160_000) == 177_254


@pytest.mark.parametrize(("settings", "measured"), [(LONG_CONTEXT, 150_000), (THROUGHPUT, 114_480), (OLDER_BUILD, 177_254)])
def test_27b_pools_of_two_16gb_cards(model_27b: Model, settings: ServeSettings, measured: int) -> None:
    """5 %: three pools of two hosts and two builds are met with two constants (runtime, communication); 5 % is 0.14 GiB."""
    found = fit(model_27b, TWO_16GB, settings)
    assert found.fits
    assert found.pool_tokens == near(measured, 0.05)


def test_160000_tokens_fit_on_the_older_build_only(model_27b: Model) -> None:
    assert fit(model_27b, TWO_16GB, OLDER_BUILD).max_context >= 160_000
    newer = fit(model_27b, TWO_16GB, dataclasses.replace(LONG_CONTEXT, max_model_len=160_000))
    assert not newer.fits
    assert "A request of 160,000 tokens needs" in newer.reason


def test_graphs_take_two_percent_of_a_16gb_card(model_27b: Model) -> None:
    """0.94 "is effectively 0.9164". The constant for full graphs was fitted to this one."""
    settings = LONG_CONTEXT.filled(TWO_16GB.card, model_27b.max_len)
    assert graph_bytes(model_27b, settings) / TWO_16GB.card.usable_bytes == pytest.approx(0.94 - 0.9164, abs=0.001)


def test_eight_slots_cost_four_percent_of_the_pool(model_27b: Model) -> None:
    """4.2 % by the report; blocks are 1.1 % of this pool each, and both pools are rounded down to blocks."""
    eight, four = (fit(model_27b, TWO_16GB, dataclasses.replace(THROUGHPUT, max_num_seqs=n)).num_blocks for n in (8, 4))
    assert 0.03 < 1 - eight / four < 0.065


def test_five_requests_do_not_fit_in_the_throughput_pool(model_27b: Model) -> None:
    """Its knee is at four: each request holds 18 blocks of states and one of KV at least, and there are 92."""
    found = cache(model_27b, THROUGHPUT, 2)
    assert 92 // found.blocks(1) == 4


def test_bf16_states_gain_22_percent_at_41k_tokens(model_27b: Model) -> None:
    """The report's +22 % is not a constant: states are a fixed part of each request, so the gain falls with its length. At the
    report's own 160,000 tokens it is 7 %; 22 % it is at 40,960, with prefix caching off as on that build."""

    def gain(length: int) -> float:
        half = cache(model_27b, OLDER_BUILD, 2)
        whole = cache(model_27b, dataclasses.replace(OLDER_BUILD, mamba_ssm_cache_dtype="float32"), 2)
        return whole.bytes_per_token(length) / half.bytes_per_token(length) - 1

    assert gain(40_960) == pytest.approx(0.22, abs=0.01)
    assert gain(160_000) == pytest.approx(0.074, abs=0.01)
    assert gain(8_192) > 0.5


def test_utilization_must_leave_room_for_the_first_request(model_27b: Model) -> None:
    """0.96 with the default workspace fails at the first request, 0.94 with 64 MiB and 0.95 do not. The default is 394 MiB in
    vLLM 0.20 to 0.32; the report's 128 MiB would not explain its failure. The context's size was fitted to this."""
    default = dataclasses.replace(LONG_CONTEXT, flashinfer_workspace_bytes=None, max_model_len=65_536)
    high = fit(model_27b, TWO_16GB, dataclasses.replace(default, gpu_memory_utilization=0.96))
    assert not high.fits
    assert "outside the budget" in high.reason
    assert fit(model_27b, TWO_16GB, dataclasses.replace(default, gpu_memory_utilization=0.95)).fits
    assert fit(model_27b, TWO_16GB, LONG_CONTEXT).fits


def test_35b_has_10_56_kb_a_token(model_35b: Model) -> None:
    """Not the KV alone, which is 10,240 bytes: a request of the full 262,144 tokens with its states, in whole blocks."""
    found = fit(model_35b, ONE_48GB, AGENTS_48GB)
    assert found.kv_bytes_per_token == 10_240
    assert found.geometry.bytes_per_token(262_144) / 1000 == pytest.approx(10.56, abs=0.005)


def test_35b_weights_are_25_5_gb_with_bf16_attention(experts_only_35b: Model, model_35b: Model) -> None:
    """25.5 GB is what a checkpoint has whose experts alone are NVFP4, its MTP head and vision tower included (25.6); this
    project's recipe also takes attention and lm_head down, to 23.4 (the report's smaller one: 23.2)."""
    assert sum(held.total for held in experts_only_35b.held.values()) / 1e9 == near(25.5, 0.01)
    assert sum(held.total for held in model_35b.held.values()) / 1e9 == near(23.2, 0.015)


def test_rank_64_takes_7_4_gb_for_all_experts(model_35b: Model) -> None:
    """The report says about 5 GB. vLLM's own allocation, 256 x 64 x (2048 + 2 x 512 + 512 + 2048) x 40 layers x 2 bytes, is
    7.38 GB in 0.20, 0.25 and 0.32, and the report's own observations want it: with 5 GB its 48 GB card would have had more
    than 10 GiB of cache by our count, and it had 8.8."""
    experts, others = lora_bytes(model_35b, 64, 1, 1)
    assert experts == 256 * 64 * (2048 + 2 * 512 + 512 + 2048) * 40 * 2
    assert experts / 1e9 == pytest.approx(7.38, abs=0.01)
    assert others < 0.05 * experts


def test_48gb_holds_64k_conversations_12_times(experts_only_35b: Model) -> None:
    """8.8 GiB of cache are 12.57 requests exactly ("12.6x"). By our sum there are 8.1, 8 % less: 10 % of it is 2 % of the
    budget, and it comes out low."""
    found = fit(experts_only_35b, ONE_48GB, AGENTS_48GB)
    blocks = int(8.8 * GIB) // found.geometry.block_bytes
    assert blocks / found.geometry.blocks(65_536) == pytest.approx(12.6, abs=0.05)
    assert blocks / found.geometry.blocks(262_144) == near(3.5, 0.03)
    assert found.fits
    assert found.pool_bytes / GIB == near(8.8, 0.10)
    assert found.concurrency(65_536) == near(12.6, 0.16)


def test_32gb_holds_the_base_and_not_the_adapter(experts_only_35b: Model) -> None:
    assert fit(experts_only_35b, ONE_32GB, ON_32GB).fits
    found = fit(experts_only_35b, ONE_32GB, dataclasses.replace(ON_32GB, max_lora_rank=64))
    assert not found.fits
    assert found.pool_bytes < 0
    assert found.remedy is None  # nothing but a smaller rank or another checkpoint helps


def test_mtp_squeezes_the_32gb_cache(experts_only_35b: Model) -> None:
    """0.63 GiB by the report, whose batch size is not given: within 0.8 GiB, 3 % of the card."""
    found = fit(experts_only_35b, ONE_32GB, dataclasses.replace(ON_32GB, num_speculative_tokens=2))
    assert found.pool_bytes / GIB == pytest.approx(0.63, abs=0.8)
    without = fit(experts_only_35b, ONE_32GB, ON_32GB)
    assert without.pool_bytes - found.pool_bytes > 1.5 * GIB


def agents_96gb(model: Model, kv: str, utilization: float) -> Fit:
    return fit(model, ONE_96GB, dataclasses.replace(AGENTS_96GB, kv_cache_dtype=kv, gpu_memory_utilization=utilization))


def test_fp8_cache_is_not_twice_bf16(fp8_35b: Model) -> None:
    """1.65M -> 2.70M tokens are 1.64x. With equal bytes it would be 1.97x: states do not shrink with the KV. The rest is fewer
    bytes: 1.65M tokens took 31.9 GiB, 2.70M take 26.6. The report names 0.95 and 0.90 ("0.95 ran out of memory, 0.90 is
    stable") without saying which run had which; from one to the other are 4.7 GiB, and the ratio is 1.72x, 5 % above."""
    equal = agents_96gb(fp8_35b, "fp8", 0.90).geometry.bytes_per_token(262_144)
    bf16 = agents_96gb(fp8_35b, "bfloat16", 0.95)
    assert bf16.geometry.bytes_per_token(262_144) / equal == pytest.approx(1.97, abs=0.01)
    ratio = agents_96gb(fp8_35b, "fp8", 0.90).pool_tokens / bf16.pool_tokens
    assert ratio == near(2.70 / 1.65, 0.06)


def test_96gb_pools(fp8_35b: Model) -> None:
    """Within 25 %, and too high: the report gives no flags of these runs, and a card of 70 GiB or more serves 1,024 requests
    by default, whose sampling is the least known of our terms. One adapter slot more (7.1 GiB) would explain all of it."""
    assert agents_96gb(fp8_35b, "bfloat16", 0.95).pool_tokens == near(1.65e6, 0.25)
    assert agents_96gb(fp8_35b, "fp8", 0.90).pool_tokens == near(2.70e6, 0.25)


def test_rule_for_agents_gives_34_where_24_were_best(fp8_35b: Model) -> None:
    assert pytest.approx(34, abs=0.5) == AGENTS_SHARE * 1.65e6 / 24_000
    found = agents_96gb(fp8_35b, "bfloat16", 0.95)
    assert found.agents(24_000) == pytest.approx(found.pool_tokens / 48_000)

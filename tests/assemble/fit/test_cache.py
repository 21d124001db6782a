"""Pages, blocks and what follows from them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assemble.fit import Model, ServeSettings, parse_cards
from assemble.fit.cache import CacheGeometry, geometry

CARD = parse_cards("16GB").card
LAYERS = st.integers(1, 96)
GEOMETRIES = st.builds(
    CacheGeometry,
    attention_layers=LAYERS,
    draft_layers=st.integers(0, 2),
    linear_layers=st.integers(0, 96),
    token_bytes=st.sampled_from([512, 1024, 2048, 4096]),
    state_bytes=st.just(0),
    block_tokens=st.integers(1, 200).map(lambda n: 16 * n),
    states=st.integers(1, 10),
)


def of(model: Model, cards: int = 1, **settings: object) -> CacheGeometry:
    return geometry(model, ServeSettings(**settings).filled(CARD, model.max_len), cards)  # type: ignore[arg-type]


@given(GEOMETRIES, st.integers(0, 5000), st.integers(1, 300_000))
def test_the_longest_request_fits_and_one_more_token_does_not(found: CacheGeometry, blocks: int, limit: int) -> None:
    longest = found.longest(blocks, limit)
    if longest:
        assert found.blocks(longest) <= blocks
    if longest < limit:
        assert found.blocks(longest + 1) > blocks


@given(GEOMETRIES)
def test_groups_hold_every_layer(found: CacheGeometry) -> None:
    attention, linear = found.groups
    assert attention * found.group_layers >= found.attention_layers + found.draft_layers
    assert linear * found.group_layers >= found.linear_layers
    assert found.block_bytes == found.group_layers * found.page_bytes


@pytest.mark.parametrize("cards", [1, 2, 4, 8])
@pytest.mark.parametrize("kv", ["fp8", "bfloat16"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_a_page_holds_a_state_and_no_16_tokens_more(model_27b: Model, cards: int, kv: str, state: str) -> None:
    found = of(model_27b, cards, kv_cache_dtype=kv, mamba_ssm_cache_dtype=state, num_speculative_tokens=2)
    assert found.page_bytes - 16 * found.token_bytes < found.state_bytes <= found.page_bytes
    assert found.block_tokens % 16 == 0


@pytest.mark.parametrize(
    ("fixture", "cards", "kv", "blocks"),
    [
        ("model_27b", 1, "fp8", 1568),
        ("model_27b", 2, "bfloat16", 784),
        ("model_35b", 1, "fp8", 2096),
        ("model_35b", 1, "bfloat16", 1056),
    ],
)
def test_block_sizes_of_public_logs(request: pytest.FixtureRequest, fixture: str, cards: int, kv: str, blocks: int) -> None:
    """ "Setting attention block size to 1568 tokens" and so on, in logs that are not the field reports'."""
    assert of(request.getfixturevalue(fixture), cards, kv_cache_dtype=kv).block_tokens == blocks


@pytest.mark.parametrize(
    ("fixture", "cards", "kv", "length", "blocks", "tokens"),
    [
        ("model_35b", 1, "fp8", 131_072, 299, 567_978),  # 5.98 GiB on an RTX 5090, vLLM 0.24, prefix caching on
        ("model_27b", 2, "bfloat16", 262_144, 491, 377_456),  # 2x RTX 5090, vLLM 0.26.1rc1
        ("model_27b", 2, "bfloat16", 262_144, 580, 445_875),
    ],
)
def test_pools_of_public_logs(
    request: pytest.FixtureRequest, fixture: str, cards: int, kv: str, length: int, blocks: int, tokens: int
) -> None:
    """vLLM's own counts are met to the token by a whole number of blocks; 5.98 GiB are 299."""
    found = of(request.getfixturevalue(fixture), cards, kv_cache_dtype=kv, enable_prefix_caching=True)
    assert int(blocks / found.blocks(length) * length) == tokens
    if tokens == 567_978:
        assert int(5.98 * 1024**3) // found.block_bytes == blocks


def test_drafts_lengthen_the_convolution_and_multiply_the_states(model_27b: Model) -> None:
    without, four = of(model_27b, 2), of(model_27b, 2, num_speculative_tokens=4)
    assert four.state_bytes - without.state_bytes == 4 * (10_240 // 2) * 2
    assert (without.states, four.states) == (2, 6)
    assert (without.draft_layers, four.draft_layers) == (0, 1)
    assert dataclasses.replace(four, draft_layers=0).groups == (1, 3)

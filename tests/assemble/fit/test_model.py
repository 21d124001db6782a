"""Which tensors go where, over how many cards."""

import json
from pathlib import Path

import pytest

from assemble.checkpoint import Checkpoint
from assemble.fit import FitError, Model, ServeSettings, SettingError, fit, parse_cards, read_model
from assemble.fit.cache import geometry
from assemble.fit.lora import lora_bytes
from assemble.fit.model import MTP_HEAD, VISION
from tests.assemble.fit.conftest import checkpoint_of

CARD = parse_cards("96GB").card


def weights(model: Model, cards: str, **settings: object) -> dict[str, int]:
    found = fit(model, parse_cards(cards), ServeSettings(**settings))  # type: ignore[arg-type]
    return {term.name: term.nbytes for term in found.terms if term.weights}


def test_every_byte_of_a_checkpoint_is_placed_once(root_27b: Path, model_27b: Model) -> None:
    checkpoint = Checkpoint.open(root_27b)
    assert sum(held.total for held in model_27b.held.values()) == sum(t.nbytes for t in checkpoint.values())
    loaded = weights(model_27b, "1x96GB", num_speculative_tokens=1)
    assert sum(loaded.values()) == sum(t.nbytes for t in checkpoint.values())


def test_only_what_is_served_is_loaded(model_27b: Model) -> None:
    assert {VISION, MTP_HEAD}.isdisjoint(weights(model_27b, "1x96GB", language_model_only=True))
    assert VISION in weights(model_27b, "1x96GB")
    assert MTP_HEAD in weights(model_27b, "1x96GB", num_speculative_tokens=1)


def test_what_is_large_is_split_and_what_is_small_is_copied(model_27b: Model) -> None:
    one, two = (weights(model_27b, f"{n}x96GB", language_model_only=True) for n in (1, 2))
    for kind in ("MLP", "full attention", "linear attention", "embedding", "lm_head"):
        assert two[kind] == pytest.approx(one[kind] / 2, rel=1e-4), kind
    assert two["router and norms"] == one["router and norms"]


def test_kv_heads_are_copied_once_there_is_one_a_card(model_35b: Model) -> None:
    """35B-A3B has two: over four cards each card holds one, and as much of the cache as over two."""
    settings = ServeSettings(kv_cache_dtype="fp8").filled(CARD, 262_144)
    assert [geometry(model_35b, settings, n).token_bytes for n in (1, 2, 4, 8)] == [1024, 512, 512, 512]
    two, four = (weights(model_35b, f"{n}x96GB")["full attention"] for n in (2, 4))
    assert four > two / 2


@pytest.mark.parametrize(("cards", "field"), [("3x16GB", "linear_num_key_heads"), ("64x16GB", "num_attention_heads")])
def test_a_split_that_vllm_refuses(model_27b: Model, cards: str, field: str) -> None:
    with pytest.raises(FitError, match=r"num_attention_heads|linear_num_key_heads") as error:
        fit(model_27b, parse_cards(cards))
    assert field in str(error.value) or "num_attention_heads" in str(error.value)


def test_drafting_needs_a_head(tiny: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    headless = Checkpoint(
        checkpoint.root, checkpoint.config, {n: t for n, t in checkpoint.items() if not n.startswith("mtp.")}, ()
    )
    with pytest.raises(FitError, match="splice --head-from"):
        fit(headless, parse_cards("16GB"), ServeSettings(num_speculative_tokens=2))


def test_the_bundled_tiny_models(tiny: Path, tiny_moe: Path) -> None:
    for root in (tiny, tiny_moe):
        found = fit(Checkpoint.open(root), parse_cards("16GB"), ServeSettings(num_speculative_tokens=2, max_num_seqs=4))
        assert found.fits
        assert found.pool_tokens > 1_000_000


def test_bf16_and_quantized_checkpoints_differ_in_weights_only(bf16_27b: Model, model_27b: Model) -> None:
    bf16, ours = (fit(m, parse_cards("96GB"), ServeSettings(kv_cache_dtype="fp8")) for m in (bf16_27b, model_27b))
    assert bf16.geometry == ours.geometry
    assert bf16.weights_bytes / ours.weights_bytes == pytest.approx(2.63, abs=0.05)
    assert not bf16_27b.quantized


def test_the_declared_cache_is_taken(bf16_27b: Model, model_27b: Model) -> None:
    assert (bf16_27b.kv_dtype, model_27b.kv_dtype) == ("bfloat16", "fp8_e4m3")


def test_published_122b_on_96gb(reference: Path) -> None:
    """A quarter of its layers, to save time, on a quarter of the budget."""
    config = json.loads((reference / "nvidia--Qwen3.5-122B-A10B-NVFP4_config.json").read_text())
    text = config["text_config"]
    text |= {
        "num_hidden_layers": text["num_hidden_layers"] // 4,
        "layer_types": text["layer_types"][: text["num_hidden_layers"] // 4],
    }
    model = read_model(checkpoint_of(config, "122B"))
    one, two = (fit(model, parse_cards(f"{n}x24GB"), ServeSettings(max_num_seqs=32, language_model_only=True)) for n in (1, 2))
    assert 15 < one.weights_bytes / 1e9 < 25
    assert two.fits
    assert two.pool_tokens > 2 * one.pool_tokens


def test_adapters_of_a_dense_model_have_no_experts(model_27b: Model) -> None:
    experts, others = lora_bytes(model_27b, 16, 1, 1)
    assert experts == 0
    assert lora_bytes(model_27b, 32, 2, 1) == (0, 4 * others)
    assert others / 2 < lora_bytes(model_27b, 16, 1, 2)[1] < others  # half of each pair is copied


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_lora_rank", 63),
        ("kv_cache_dtype", "fp4"),
        ("mamba_ssm_cache_dtype", "fp8"),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", 0.0),
        ("max_model_len", 0),
        ("num_speculative_tokens", -1),
        ("cudagraph_mode", "EAGER"),
        ("vllm", "latest"),
    ],
)
def test_settings_that_vllm_would_refuse(field: str, value: object) -> None:
    with pytest.raises(SettingError):
        ServeSettings(**{field: value})  # type: ignore[arg-type]


def test_defaults_are_vllms_for_the_card() -> None:
    small, big = parse_cards("48GB").card, CARD
    assert ServeSettings().filled(small, 262_144).max_num_seqs == 256
    assert ServeSettings().filled(small, 262_144).max_num_batched_tokens == 2048
    assert ServeSettings().filled(big, 262_144).max_num_seqs == 1024
    assert ServeSettings().filled(big, 262_144).max_num_batched_tokens == 8192
    assert ServeSettings(vllm="0.25").filled(small, 1).enable_prefix_caching is False
    assert ServeSettings(vllm="v0.27.1").filled(small, 1).enable_prefix_caching is False
    assert ServeSettings(vllm="0.27.2rc1.dev110").filled(small, 1).enable_prefix_caching is True
    assert ServeSettings(vllm="0.28").filled(small, 1).enable_prefix_caching is True
    assert not ServeSettings(vllm="0.27").behaviour.reserves_null_block

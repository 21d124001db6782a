"""Fingerprints: canonical, refusing what has no text, golden for the shipped recipes, and readable when they differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantize.fingerprint import canonical, difference, fingerprint
from quantize.pipeline import PIPELINE
from recipes.loader import load

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
# What decides the bytes of a run with a shipped recipe. A change here makes every run in progress stale: make it knowingly.
GOLDEN = {
    "w4a16_nvfp4-fp8_attn-kv_fp8_cast": "6d96b9b3aa14f20ab8815fd714d6a95b8b35d17a90540d07521e0c720cba79cc",
    "w4a16_nvfp4_mse-fp8_attn-kv_fp8_cast": "df2a0655228f04cd5e711ee10b63c20d693d14e09fa0a3220739818ddfeb8c5a",
    "demo": "5dcb71042f5edcfdccc1d72773eb6387248d0ebaffd3068bb5687e5e03d5b199",
}


@given(PLAIN)
def test_order_does_not_matter_and_equal_is_equal(value: object) -> None:
    assert canonical(value) == canonical(reordered(value))
    assert list(difference(value, reordered(value))) == []


def reordered(value: object) -> object:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("value", [1.5, float("nan"), {1: "a"}, {"a": {2}}, (1, 2), b"x", {"a": [object()]}])
def test_what_has_no_text_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        canonical(value)


def test_true_is_not_one() -> None:
    assert fingerprint({"a": True}) != fingerprint({"a": 1})
    assert fingerprint({"a": "1"}) != fingerprint({"a": 1})


def test_a_difference_reads_as_fields() -> None:
    old = {"calibration": {"num_samples": 512, "seed": 0}, "inputs": {"x": "a" * 64}, "gone": 1}
    new = {"calibration": {"num_samples": 256, "seed": 0}, "inputs": {"x": "b" * 64, "y": "c"}}
    assert list(difference(old, new)) == [
        "calibration.num_samples: 512 -> 256", "gone: 1 -> absent",
        "inputs.x: aaaaaaaaaaaa… -> bbbbbbbbbbbb…", "inputs.y: absent -> c",
    ]  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_shipped_recipes_are_golden(name: str) -> None:
    recipe = load(name).recipe
    making = [stage for stage in PIPELINE if stage.name != "card" and not stage.optional]
    settings = {stage.name: [stage.version, stage.settings(recipe)] for stage in making}
    assert fingerprint(settings) == GOLDEN[name]

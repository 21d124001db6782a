"""Recipes: the shipped ones are sound, and a wrong one is refused with a word that helps."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from recipes.errors import RecipeError
from recipes.loader import DEFAULT, SHIPPED, load, shipped_names


@pytest.mark.parametrize("name", shipped_names())
def test_shipped(name: str) -> None:
    loaded = load(name)
    assert loaded.name == name
    assert loaded.recipe.description
    assert loaded.recipe.mtp.precision == "bf16"
    assert loaded.recipe.mtp.required
    assert set(loaded.recipe.modelopt) == {"qwen3_5", "qwen3_5_moe"}


def test_the_default_is_shipped() -> None:
    assert DEFAULT in shipped_names()
    assert load(DEFAULT).recipe.calibration.num_samples == 512


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(load("demo").text)
    assert load(str(path)).recipe == load("demo").recipe
    with pytest.raises(ValidationError):
        load(str(path)).recipe.calibration.seed = 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("a: 1\n---\nb: 1\n", "holds 2 documents"),
        ("description: x\ndescription: y\n", "the key 'description' is there twice .* line 2"),
        ("- a", "must be a mapping"),
        ("\xff", "must be a mapping"),
        ("{}", "key 'calibration' is missing"),
        ("{modelopt: {}, calibration: {dataset: x, num_samples: 1, sequence_length: 2}}", "modelopt"),
        ("{modelopt: {llama: x}, calibration: {dataset: x, num_samples: 1, sequence_length: 2}}", "modelopt.llama"),
        ("{modelopt: {qwen3_5: x}, calibration: {dataset: x, num_sample: 1}}", "did you mean 'num_samples'"),
        ("{modelopt: {qwen3_5: x}, calibration: {dataset: x, num_samples: 0, sequence_length: 2}}", "calibration.num_samples"),
        ("{modelopt: {qwen3_5: x}, calibration: {dataset: '', num_samples: 1, sequence_length: 2}}", "calibration.dataset"),
        (
            "{modelopt: {qwen3_5: x}, calibration: {dataset: x, num_samples: 1, sequence_length: 2}, mtp: {precision: fp8}}",
            "mtp",
        ),
    ],
)
def test_wrong_recipes(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        load(str(path))


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean demo"):
        load("dmo")
    with pytest.raises(RecipeError, match="does not exist"):
        load(str(tmp_path / "absent.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"description: \xe9")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(str(tmp_path / "latin.yaml"))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((SHIPPED / "demo.yaml").read_text().replace("  num_samples: 16\n", ""))
    with pytest.raises(RecipeError, match=r"key 'calibration\.num_samples' is missing$"):
        load(str(path))

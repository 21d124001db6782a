"""libyaml reads what PyYAML's own parser reads."""

from pathlib import Path

import pytest
import yaml

import quantize
import recipes
from recipes.yaml_text import parse_yaml

FILES = sorted(path for package in (recipes, quantize) for path in Path(package.__file__).parent.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shipped_files_mean_the_same(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert parse_yaml(text) == [yaml.safe_load(text)]
    assert parse_yaml(f"{text}\n---\n- 1\n") == [yaml.safe_load(text), [1]]


@pytest.mark.parametrize(
    "text", ["a: [1", "!!python/object/apply:os.getcwd []", "a: 1\nb: 2\na: 1\n", "a: {b: 1, 'b': 2}", "- {1: x, 1: y}"]
)
def test_what_is_no_plain_data_or_says_something_twice_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


def test_what_only_looks_like_twice_is_read() -> None:
    text = "base: &base {a: 1, b: 2}\nmine: {<<: *base, a: 3}\nnumbers: {1: x, '1': y}\n"
    assert parse_yaml(text) == [{"base": {"a": 1, "b": 2}, "mine": {"a": 3, "b": 2}, "numbers": {1: "x", "1": "y"}}]

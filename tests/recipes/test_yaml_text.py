"""libyaml reads what PyYAML's own parser reads."""

from pathlib import Path

import pytest
import yaml

import quantize
import recipes
from recipes.yaml_text import parse_yaml, parse_yaml_documents

FILES = sorted(path for package in (recipes, quantize) for path in Path(package.__file__).parent.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shipped_files_mean_the_same(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml_documents(f"{text}\n---\n- 1\n") == [yaml.safe_load(text), [1]]


@pytest.mark.parametrize("text", ["a: [1", "a: 1\n---\nb: 2\n", "!!python/object/apply:os.getcwd []"])
def test_what_is_not_one_document_of_plain_data_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)

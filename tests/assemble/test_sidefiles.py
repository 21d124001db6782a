"""The files beside the weights."""

import shutil
from pathlib import Path

import pytest

from assemble.architecture import Architecture, read_architecture
from assemble.checkpoint import Checkpoint
from assemble.sidefiles import SideFileError, check_generation_config, check_side_files, side_files


@pytest.fixture
def root(tiny: Path, tmp_path: Path) -> Path:
    for path in tiny.glob("*.j*"):
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path


@pytest.fixture
def architecture(tiny: Path) -> Architecture:
    checkpoint = Checkpoint.open(tiny)
    return read_architecture(checkpoint.config, checkpoint)


def test_only_known_files(root: Path) -> None:
    (root / "README.md").write_text("the base model's")
    (root / "merges.txt").mkdir()
    assert side_files(root) == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]


def test_notes(root: Path, architecture: Architecture) -> None:
    assert check_side_files(root, architecture) == ["no image processor files: serve with --language-model-only"]
    (root / "processor_config.json").write_text("{}")
    assert check_side_files(root, architecture) == []
    (root / "chat_template.jinja").unlink()
    (root / "generation_config.json").unlink()
    assert [note.split(":")[0] for note in check_side_files(root, architecture)] == [
        "generation_config.json is absent",
        "no chat template",
    ]
    (root / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert len(check_side_files(root, architecture)) == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_no_tokenizer(name: str, root: Path, architecture: Architecture) -> None:
    (root / name).unlink()
    with pytest.raises(SideFileError, match=f"has no {name}"):
        check_side_files(root, architecture)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"temperature": "hot"}', '{"temperature": -1}', '{"top_p": 2}', '{"top_k": true}', '{"max_new_tokens": 0}'],
)
def test_generation_configs_that_cannot_be(text: str, root: Path) -> None:
    (root / "generation_config.json").write_text(text)
    with pytest.raises(SideFileError, match="Fix it"):
        check_generation_config(root)


@pytest.mark.parametrize("text", ["{}", '{"temperature": null, "top_p": 0.95, "top_k": 20, "do_sample": true}'])
def test_generation_configs_that_can_be(text: str, root: Path) -> None:
    (root / "generation_config.json").write_text(text)
    check_generation_config(root)
    (root / "generation_config.json").unlink()
    check_generation_config(root)

"""Hostile files: never a traceback, never a read outside the folder, never memory without bounds."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assemble.checkpoint import INDEX, CheckpointError, read_layout, read_shard
from assemble.jsonfile import JSONFileError
from assemble.verify import Report, verify
from tests.assemble.checkpoints import Copy
from tests.assemble.conftest import Pair

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
_opened: list[str] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(args[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(args[0]))


sys.addaudithook(_watch)


@contextlib.contextmanager
def nothing_read_outside(root: Path) -> Iterator[None]:
    """Fails when a file is opened that does not lie, links resolved, under `root` (Python's own modules aside)."""
    global _opened  # noqa: PLW0603 - an audit hook cannot be taken out again
    _opened = []
    try:
        yield
        seen = {Path(p).resolve() for p in _opened}
    finally:
        _opened = None
    library = tuple(Path(p).resolve() for p in (sys.prefix, sys.base_prefix, Path(__file__).parents[2]))
    assert not [p for p in seen if not p.is_relative_to(root.resolve()) and not any(p.is_relative_to(x) for x in library)]


def examined(root: Path) -> Report:
    with nothing_read_outside(root):
        report = verify(root, deep=True)
    json.dumps(report.as_json())
    report.groups  # noqa: B018 - folding must not fail either
    return report


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from(["", "FP8", "modelopt", "..", "/etc/passwd", "\0", "\ud800", "model.language_model.", "mtp*", "*", "["]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def paths_into(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_into(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@FUZZ
@given(data=st.data(), name=st.sampled_from(["config.json", "config.json", "hf_quant_config.json", "generation_config.json"]))
def test_any_value_anywhere_in_a_config(data: st.DataObject, name: str, dense: Copy, bases: dict[str, Pair]) -> None:
    value = json.loads((bases["dense"][1] / name).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        places = sorted(paths_into(value), key=len)
        value = replaced(value, data.draw(st.sampled_from(places)), data.draw(JSON))
    (dense.root / name).write_text(json.dumps(value))
    try:
        examined(dense.root)
    finally:
        (dense.root / name).write_bytes((bases["dense"][1] / name).read_bytes())


@FUZZ
@given(data=st.data())
def test_any_key_dropped_from_a_config_of_experts(
    data: st.DataObject, moe: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("moe") / "checkpoint"
    root.mkdir()
    for path in moe[1].iterdir():
        os.link(path, root / path.name)
    value = json.loads((moe[1] / "config.json").read_text())
    place = data.draw(st.sampled_from([p for p in paths_into(value) if p and "quantized_layers" not in p]))
    (root / "config.json").unlink()
    (root / "config.json").write_text(json.dumps(replaced(value, place, data.draw(JSON))))
    examined(root)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["BF16", "U8", "F8_E4M3", "F32", "F4", "", "BOOL", None, 7]) | JSON,
        "shape": st.lists(st.integers(-1, 5) | st.sampled_from([2**62, 2**63, 1.5, True, "2"]), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-4, 64) | st.just(2**63), min_size=0, max_size=3) | JSON,
    }
)
HEADER = st.dictionaries(st.text(max_size=12) | st.just("__metadata__"), ENTRY | JSON, max_size=5)


@FUZZ
@given(header=HEADER | JSON, length=st.none() | st.integers(0, 2**64 - 1), body=st.binary(max_size=64), cut=st.integers(0, 300))
def test_any_header(header: Any, length: int | None, body: bytes, cut: int, dense: Copy, bases: dict[str, Pair]) -> None:
    text = json.dumps(header).encode()
    data = (len(text) if length is None else length).to_bytes(8, "little") + text + body
    path = dense.root / "model-00002-of-00002.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(data[: max(0, len(data) - cut)] if cut < 100 else data)
    report = examined(dense.root)
    assert "IDX-4" in {f.rule for f in report.findings} or report.errors


@FUZZ
@given(raw=st.binary(max_size=200))
def test_any_bytes_in_the_place_of_json(raw: bytes, dense: Copy, bases: dict[str, Pair]) -> None:
    for name in ("config.json", "hf_quant_config.json", INDEX, "tokenizer_config.json", "tokenizer.json"):
        (dense.root / name).write_bytes(raw)
        examined(dense.root)
        (dense.root / name).write_bytes((bases["dense"][1] / name).read_bytes())


NAMES = st.sampled_from(
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/../../x.safetensors",
        "..",
        "",
        "\0.safetensors",
        "\ud800.safetensors",
        "C:\\x.safetensors",
    ]
)


@FUZZ
@given(files=st.lists(NAMES | st.text(max_size=12), min_size=1, max_size=4))
def test_any_file_name_in_the_index(files: list[str], dense: Copy, bases: dict[str, Pair]) -> None:
    outside = dense.root.parent / "x.safetensors"
    outside.write_bytes(b"\2\0\0\0\0\0\0\0{}")
    index = json.loads((bases["dense"][1] / INDEX).read_text())
    index["weight_map"] |= {f"t{i}": f for i, f in enumerate(files)}
    (dense.root / INDEX).write_text(json.dumps(index))
    assert examined(dense.root).errors


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "generation_config.json",
             "chat_template.jinja", "model-00001-of-00002.safetensors"]
)  # fmt: skip
def test_a_link_out_of_the_folder_is_not_followed(name: str, dense: Copy) -> None:
    outside = dense.root.parent / "outside"
    (dense.root / name).rename(outside)
    (dense.root / name).symlink_to(outside)
    report = examined(dense.root)
    assert any("not followed" in f.found for f in report.findings), report.findings


def test_a_link_to_a_device_or_a_loop_or_nothing(dense: Copy) -> None:
    for target in ("/dev/zero", "config.json", "nowhere"):
        (dense.root / "config.json").unlink()
        (dense.root / "config.json").symlink_to(target)
        assert {f.rule for f in examined(dense.root).errors} >= {"CFG-1"}


def test_a_pipe_or_a_folder_in_the_place_of_a_file(dense: Copy) -> None:
    for make in (os.mkfifo, os.mkdir):
        for name in ("config.json", "model-00001-of-00002.safetensors"):
            (dense.root / name).unlink(missing_ok=True)
            make(dense.root / name)
        assert examined(dense.root).errors
        for name in ("config.json", "model-00001-of-00002.safetensors"):
            (os.rmdir if make is os.mkdir else os.unlink)(dense.root / name)


def test_huge_files_are_not_read(dense: Copy) -> None:
    """Sparse files of 20 GB: a header that says it is 10 GB long, and a config."""
    with (dense.root / "model-00003.safetensors").open("wb") as file:
        file.write((10_000_000_000).to_bytes(8, "little"))
        file.truncate(20_000_000_000)
    (dense.root / INDEX).unlink()
    (dense.root / "hf_quant_config.json").unlink()
    with (dense.root / "hf_quant_config.json").open("wb") as file:
        file.truncate(20_000_000_000)
    start = time.monotonic()
    rules = {f.rule for f in examined(dense.root).errors}
    assert rules >= {"IDX-4", "CFG-7"}
    assert time.monotonic() - start < 5


def shard(path: Path, header: str, body: bytes = b"") -> Path:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("{" + ", ".join(['"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}'] * 2) + "}", 1),
        ('{"a": {"dtype": "U8", "shape": [' + "1," * 200_000 + '1], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}}', 0),
        ('{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', 2),
        ("[" * 100_000 + "]" * 100_000, 0),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", 0),
        ('{"a": 1' + "0" * 10_000 + "}", 0),
        ("{} trailing", 0),
    ],
    ids=["twice", "many dimensions", "overflow", "NaN", "negative", "hole", "deep", "deep value", "huge number", "trailing"],
)  # fmt: skip
def test_bad_headers(header: str, body: int, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises((CheckpointError, JSONFileError)):
        read_shard(shard(tmp_path / "x.safetensors", header, bytes(body)))
    assert time.monotonic() - start < 5
    assert {p.kind for p in read_layout(tmp_path).problems} == {"IDX-4"}


def test_names_for_a_terminal(dense: Copy) -> None:
    """Names with escape sequences, markup and lone surrogates are printed as text."""
    for name in ("\x1b[31mred", "[bold]b[/bold]", "\ud800", "x" * 5000, "line\nbreak"):
        dense.put("y", "U8", (), b"\0")
        dense.rename("y", name.encode("utf-8", "replace").decode())
    dense.save()
    dense.header("model-00002-of-00002.safetensors", lambda h: h.update({"\ud800": h.pop("?", None) or h.pop("line\nbreak")}))
    result = subprocess.run(
        [sys.executable, "-m", "assemble", "verify", str(dense.root)],
        capture_output=True,
        check=False,
        env=os.environ | {"LC_ALL": "C"},
    )
    assert result.returncode == 1
    assert b"Traceback" not in result.stderr
    assert b"\x1b[31mred" not in result.stdout
    assert b"[bold]b[/bold]" in result.stdout
    assert b"\\ud800" in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 2000

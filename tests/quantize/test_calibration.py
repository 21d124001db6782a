"""Calibration data: every local form, every fault of one, the packing of rows, and the Hub through the real `datasets`."""

import copy
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from quantize.calibration import (
    CalibrationError,
    check_path,
    check_reachable,
    documents_from_hub,
    documents_from_path,
    pack_rows,
    rows_sha256,
)
from quantize.console import Reporter
from quantize.runner import run
from quantize.stage import Request
from recipes import loader
from recipes.schema import Calibration
from tests.loopback_hub import LoopbackHub, loopback_hub

TEXTS = ["a short one", "another, somewhat longer text", "", "def f(x):\n    return x + 1\n"]
MESSAGES = [[{"role": "user", "content": text}, {"role": "assistant", "content": text.upper()}] for text in TEXTS]
DATASET = "abisee/cnn_dailymail"
# sha256sum of "(2, 3)" and of the six numbers 1, 2, 3, -4, 5, 70000 as little-endian int32
GOLDEN = "cbfde52e1257599c9895b735150e6c19fd2713c626ff7a30d396b305aa16311a"
README = """---
configs:
- config_name: 3.0.0
  data_files:
  - split: train
    path: 3.0.0/train-*
  - split: test
    path: 3.0.0/test-*
---
"""


def settings(**changes: Any) -> Calibration:
    defaults = {"dataset": DATASET, "config": "3.0.0", "column": "article", "num_samples": 2, "sequence_length": 8}
    return Calibration(**{**defaults, **changes})


def write_jsonl(path: Path, columns: dict[str, list[Any]]) -> None:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))  # the blank lines between are no rows


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    parquet.write_table(pa.table(columns), path)


def save_dataset(path: Path, columns: dict[str, list[Any]]) -> None:
    datasets.Dataset.from_dict(columns).save_to_disk(str(path))


def save_splits(path: Path, columns: dict[str, list[Any]]) -> None:
    other = datasets.Dataset.from_dict({name: values[:1] for name, values in columns.items()})
    datasets.DatasetDict({"test": other, "train": datasets.Dataset.from_dict(columns)}).save_to_disk(str(path))


FORMS = {"rows.jsonl": write_jsonl, "rows.parquet": write_parquet, "saved": save_dataset, "splits": save_splits}


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny, local_files_only=True)


@pytest.fixture(params=FORMS)
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[dict[str, list[Any]]], Path]:
    """Writes columns in one of the forms and returns the path."""

    def write_form(columns: dict[str, list[Any]]) -> Path:
        FORMS[request.param](tmp_path / request.param, columns)
        return tmp_path / request.param

    return write_form


@pytest.mark.parametrize(("column", "documents"), [("article", TEXTS), ("text", TEXTS), ("messages", MESSAGES)])
def test_every_form_gives_its_documents_in_order(write: Callable, column: str, documents: list) -> None:
    path = write({"id": list("abcd"), column: documents})
    assert check_path(path, settings()) == column
    assert list(documents_from_path(path, settings())) == documents


def test_the_recipes_column_wins_over_the_known_ones(write: Callable) -> None:
    path = write({"article": ["x"], "text": ["y"], "code": ["z"]})
    assert list(documents_from_path(path, settings(column="code"))) == ["z"]
    assert list(documents_from_path(path, settings(column="text"))) == ["y"]
    assert list(documents_from_path(path, settings(column="absent"))) == ["x"]


def test_a_wrong_column_names_those_that_are_there(write: Callable) -> None:
    path = write({"body": ["x"], "id": ["1"]})
    with pytest.raises(CalibrationError, match=r"no column 'article' \(nor text, messages\); it has: body, id") as caught:
        check_path(path, settings())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": "y"\n', "line 2 is not valid JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n[1, 2]\n', "line 3 is not a JSON object, but list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"other": "y"}\n', "row 2 has no 'text'"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not valid JSON"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.parquet", b"", "is not a readable parquet file"),
        ("a.parquet", b"PAR1 and then nothing", "is not a readable parquet file"),
        ("a.csv", b"text\nx\n", r"is neither .jsonl, .parquet nor a folder"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=said) as caught:
        documents_from_path(path, settings())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "absent"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CalibrationError, match=rf"{name} (cannot be read: No such file|does not exist)"):
        check_path(tmp_path / name, settings())


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert documents_from_path(tmp_path / "a.jsonl", settings()) == ["x"]


def test_a_folder_that_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(CalibrationError, match="not a folder saved by `datasets`"):
        check_path(tmp_path, settings())
    datasets.DatasetDict({}).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(CalibrationError, match="holds no split"):
        check_path(tmp_path / "empty", settings())
    save_dataset(tmp_path / "broken", {"text": TEXTS})
    (tmp_path / "broken" / "state.json").write_text("{}")
    with pytest.raises(CalibrationError, match="not a folder saved by `datasets`"):
        check_path(tmp_path / "broken", settings())


@pytest.mark.parametrize(("values", "shown"), [(["x", None], "row 2 .* holds None"), ([1, 2], r"row [12] .* holds \d")])
def test_a_cell_that_is_no_text(write: Callable, tokenizer: Any, values: list, shown: str) -> None:
    documents = documents_from_path(write({"text": values}), settings())
    with pytest.raises(CalibrationError, match=shown):
        pack_rows(documents, tokenizer, settings())


@pytest.mark.parametrize("messages", [["hello"], [{"role": "user"}, 3]])
def test_messages_that_the_template_does_not_take(tokenizer: Any, messages: list) -> None:
    tokenizer = strict(tokenizer)
    with pytest.raises(CalibrationError, match=r"row 1 .* is not messages that the model's chat template takes"):
        pack_rows([messages], tokenizer, settings())


def test_messages_for_a_model_without_a_chat_template(tokenizer: Any) -> None:
    bare = strict(tokenizer)
    bare.chat_template = None
    with pytest.raises(CalibrationError, match=r"row 1 .* the model has no chat template"):
        pack_rows([MESSAGES[0]], bare, settings())


def strict(tokenizer: Any) -> Any:
    """The tokenizer with a template that, as the published ones do, raises on a message it does not know."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    return made


def test_messages_are_rendered_by_the_chat_template(tokenizer: Any) -> None:
    rows = pack_rows(MESSAGES[:1], tokenizer, settings(num_samples=1))
    rendered = "<|im_start|>user\na short one<|im_end|>\n<|im_start|>assistant\nA SHORT ONE<|im_end|>\n"
    assert rows[0].tolist() == tokenizer(rendered)["input_ids"][:8]


def test_rows_are_full_and_hold_the_documents_end_to_end(tokenizer: Any) -> None:
    wanted = settings(num_samples=5, sequence_length=8)
    documents = [f"text number {i} of some" for i in range(20)]
    rows = pack_rows(documents, tokenizer, wanted)
    assert (rows.shape, rows.dtype) == ((5, 8), np.int32)
    stream = []
    for i in np.random.default_rng(wanted.seed).permutation(len(documents)):
        stream += [*tokenizer(documents[i])["input_ids"], tokenizer.eos_token_id]
    assert rows.ravel().tolist() == stream[:40]
    # this tokenizer pads with its end token: each one in the rows must be the end of a document
    texts = tokenizer.decode(rows.ravel().tolist()).split(tokenizer.eos_token)
    assert len(texts) > 2
    assert set(texts[:-1]) <= set(documents)
    assert len(set(texts[:-1])) == len(texts) - 1


def test_the_seed_alone_decides_the_order(tokenizer: Any) -> None:
    documents = [f"text number {i}" for i in range(50)]
    first, again, other = (pack_rows(documents, tokenizer, settings(seed=seed)) for seed in (0, 0, 1))
    assert rows_sha256(first) == rows_sha256(again) != rows_sha256(other)


def test_too_few_tokens_says_how_many_there_are(tokenizer: Any) -> None:
    documents = ["a", "b", "c"]
    exact = settings(num_samples=3, sequence_length=2)  # one token each, and its end
    assert pack_rows(documents, tokenizer, exact).shape == (3, 2)
    with pytest.raises(CalibrationError, match=r"3 documents hold 6 tokens, the recipe asks for 4 rows of 2 \(8 tokens\)"):
        pack_rows(documents, tokenizer, settings(num_samples=4, sequence_length=2))


def test_a_row_that_is_not_text_counts_when_it_is_come_to(tokenizer: Any) -> None:
    wanted = settings(num_samples=2, sequence_length=4)
    order = np.random.default_rng(wanted.seed).permutation(40).tolist()
    documents: list[Any] = ["text number one of some"] * 40
    used = next(n for n in range(1, 40) if n * (len(tokenizer(documents[0])["input_ids"]) + 1) >= 8)
    documents[order[used]] = 7
    assert pack_rows(documents, tokenizer, wanted).shape == (2, 4)
    documents[order[used - 1]] = 8
    with pytest.raises(CalibrationError, match=rf"row {order[used - 1] + 1} of the calibration data holds 8"):
        pack_rows(documents, tokenizer, wanted)


def test_the_hash_of_rows_is_golden() -> None:
    rows = np.array([[1, 2, 3], [-4, 5, 70_000]], dtype=np.int32)
    assert rows.tobytes() == struct.pack("<6i", 1, 2, 3, -4, 5, 70_000)
    assert rows_sha256(rows) == GOLDEN
    assert rows_sha256(np.asfortranarray(rows)) == rows_sha256(rows.astype(">i4")) == GOLDEN  # type: ignore[arg-type]
    assert rows_sha256(rows.reshape(3, 2)) != GOLDEN


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset's repository, laid out as the recipe's is."""
    root = tmp_path_factory.mktemp("dataset")
    (root / "3.0.0").mkdir()
    (root / "README.md").write_text(README)
    write_parquet(root / "3.0.0" / "train-00000-of-00001.parquet", {"article": TEXTS, "id": list("abcd")})
    write_parquet(root / "3.0.0" / "test-00000-of-00001.parquet", {"article": ["other"], "id": ["e"]})
    return root


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A hub that has the dataset; this process uses it, with empty caches."""
    with loopback_hub() as hub:
        hub.add(DATASET, repository, kind="dataset")
        hub.connect(monkeypatch, tmp_path / "home")
        yield hub


def test_a_hub_dataset_and_then_its_cache(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_reachable(settings()) is None
    assert not hub.files_sent()
    assert list(documents_from_hub(settings())[0]) == TEXTS
    assert "3.0.0/train-00000-of-00001.parquet" in hub.files_sent()
    assert documents_from_hub(settings())[1] == hub.repos["dataset", DATASET].refs["main"]
    assert list(documents_from_hub(settings(split="test"))[0]) == ["other"]
    hub.go_offline(monkeypatch)
    asked = len(hub.requests)
    note = check_reachable(settings())
    assert note is not None
    assert f"the Hub cannot be asked for {DATASET}" in note
    assert "--calibration PATH" in note
    assert list(documents_from_hub(settings())[0]) == TEXTS
    assert len(hub.requests) == asked


def refused(read: Callable[[Calibration], object], wanted: Calibration) -> str:
    """The one paragraph of the refusal, which must name the dataset and the ways out."""
    with pytest.raises(CalibrationError) as caught:
        read(wanted)
    text = str(caught.value)
    assert wanted.dataset in text
    assert "--calibration PATH" in text
    assert "\n" not in text
    return text


def test_a_gated_dataset(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["dataset", DATASET].gated = True
    for read in (check_reachable, documents_from_hub):
        text = refused(read, settings())
        assert "gated" in text
        assert "hf auth login" in text
    hub.tokens.add("hf_good")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert check_reachable(settings()) is None
    assert list(documents_from_hub(settings())[0]) == TEXTS


def test_a_token_that_the_hub_refuses(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    for read in (check_reachable, documents_from_hub):
        assert "hf_expired" not in refused(read, settings())
    assert "refuses your token" in refused(check_reachable, settings())


def test_a_missing_dataset(hub: LoopbackHub) -> None:
    assert "no such dataset" in refused(check_reachable, settings(dataset="abisee/absent"))
    assert "doesn't exist" in refused(documents_from_hub, settings(dataset="abisee/absent"))
    assert "--" in refused(check_reachable, settings(dataset="abisee/a--b"))


@pytest.mark.parametrize(
    ("changes", "said"), [({"config": "9.9"}, "9.9"), ({"split": "dev"}, "dev"), ({"column": "body"}, "it has: article, id")]
)
def test_a_recipe_that_the_dataset_does_not_fit(hub: LoopbackHub, changes: dict, said: str) -> None:
    assert said in refused(documents_from_hub, settings(**changes))


def test_broken_files_in_the_dataset(hub: LoopbackHub, tmp_path: Path) -> None:
    for name in ("broken", "unlike", "scripted"):
        (tmp_path / name).mkdir()
        hub.add(f"org/{name}", tmp_path / name, kind="dataset")
    (tmp_path / "broken" / "train.parquet").write_bytes(b"not parquet")
    refused(documents_from_hub, settings(dataset="org/broken", config=None))
    write_parquet(tmp_path / "unlike" / "train-0.parquet", {"article": ["a"]})
    write_parquet(tmp_path / "unlike" / "train-1.parquet", {"body": ["b"]})
    assert "generating the dataset" in refused(documents_from_hub, settings(dataset="org/unlike", config=None))
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit")
    assert "scripts are no longer supported" in refused(documents_from_hub, settings(dataset="org/scripted", config=None))


def test_offline_without_a_cache(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.go_offline(monkeypatch)
    assert "--calibration PATH" in str(check_reachable(settings()))
    assert "Couldn't reach" in refused(documents_from_hub, settings())
    assert not hub.requests


def test_a_hub_in_trouble_is_a_note_only(hub: LoopbackHub) -> None:
    hub.errors = 1
    assert "cannot be asked" in str(check_reachable(settings()))


def test_a_gated_dataset_stops_the_run_before_a_model_is_loaded(hub: LoopbackHub, tiny: Path, tmp_path: Path) -> None:
    hub.repos["dataset", DATASET].gated = True
    request = Request(str(tiny), tmp_path / "out", loader.load("demo"), device="cpu")
    with pytest.raises(CalibrationError, match="gated"):
        run(request, Reporter())
    finished = {path.parent.name for path in request.workspace.glob("*/stage.json")}
    assert finished == {"fetch", "plan"}
    assert not request.out.exists()

"""Held-out rows: in order, cut, never padded, and never what was calibrated on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assemble.errors import InputError
from quantize.evaluate.rows import HeldOut, batches, read_rows
from recipes import loader
from recipes.schema import Evaluation

TEXTS = [f"def function_{i}(argument):\n    return argument * {i} + sum(range({i}))\n" * 8 for i in range(6)]
BASE = loader.load("demo").recipe.calibration
Read = Callable[..., HeldOut]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def read(tokenizer: Any, tmp_path: Path) -> Read:
    def rows_of(texts: list[str], calibrated: list[np.ndarray] | None = None, **asked: int) -> HeldOut:
        path = tmp_path / "text.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return read_rows(path, tokenizer, Evaluation(**asked), BASE, calibrated)

    return rows_of


def test_first_documents_first_tokens(read: Read, tokenizer: Any) -> None:
    found = read(TEXTS, rows=4, tokens=64)
    assert [row.tolist() for row in found.rows] == [tokenizer(text)["input_ids"][:64] for text in TEXTS[:4]]
    assert found.scored_tokens == 4 * 63
    facts = found.as_json()
    assert facts["name"] == "text.jsonl"
    assert (facts["rows"], facts["tokens_per_row"], facts["calibration"]) == (4, 64, "unknown")


def test_short_documents_are_kept_or_left_out(read: Read) -> None:
    found = read(["x = 1", TEXTS[0][:120], TEXTS[1]], tokens=64)
    lengths = [len(row) for row in found.rows]
    assert len(lengths) == 2
    assert lengths[0] < lengths[1] == 64


def test_calibrated_rows_are_left_out(read: Read, tokenizer: Any) -> None:
    ids = np.concatenate([tokenizer(text)["input_ids"] for text in (TEXTS[1], TEXTS[3])]).astype(np.int32)
    calibrated = [ids[: len(ids) // 32 * 32].reshape(-1, 32), np.zeros((2, 40), np.int32)]
    found = read(TEXTS, calibrated, rows=10, tokens=100)
    assert (found.excluded, len(found.rows), found.as_json()["calibration"]) == (2, 4, "excluded")
    assert read([TEXTS[0]], calibrated).as_json()["calibration"] == "disjoint"
    with pytest.raises(InputError, match=r"1 rows of it were calibrated on\. Give text that was not"):
        read([TEXTS[1]], calibrated)


def test_a_shared_header_is_no_calibration(read: Read, tokenizer: Any) -> None:
    header = "# Licensed under the Apache License, Version 2.0; you may not use this file except in compliance.\n" * 2
    calibrated = [np.array(tokenizer(header + TEXTS[1])["input_ids"], np.int32)[None]]
    found = read([header + TEXTS[2]], calibrated, tokens=512)
    assert found.as_json()["calibration"] == "disjoint"


def test_batches_are_full_and_hold_every_row_once() -> None:
    rows = [np.arange(n, dtype=np.int32) for n in (40, 64, 64, 20, 64, 40)]
    made = batches(rows, 130)
    assert sorted(number for batch in made for number in batch.rows) == list(range(6))
    for batch in made:
        assert batch.ids.shape == (len(batch.rows), len(rows[batch.rows[0]]))
        assert batch.ids.numel() <= 130 or len(batch.rows) == 1
        assert all(batch.ids[i].tolist() == rows[number].tolist() for i, number in enumerate(batch.rows))


def test_no_data_and_no_hub(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    with pytest.raises(InputError, match=r"no held-out text: the recipe's dataset abisee/cnn_dailymail, split test") as error:
        read_rows(None, tokenizer, Evaluation(), BASE, None)
    assert "--data PATH" in str(error.value)

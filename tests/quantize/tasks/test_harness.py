"""lm-evaluation-harness itself, against a server on the loopback device, on tasks that are made here."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.evaluate.tasks import harness, server
from quantize.evaluate.tasks.command import run_tasks
from tests.loopback_openai import LoopbackOpenAI

QUESTIONS = [(2, 3), (4, 4), (5, 1), (3, 3), (6, 2)]  # a + b
ASKED = "Question: what is {{a}} plus {{b}}?\nAnswer:"
CHOICE = f"""
task: sums_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: ROWS}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{ASKED!s}"
doc_to_choice: ["even", "odd"]
doc_to_target: parity
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""".replace("\n ", " ")
WRITTEN = f"""
task: sums_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: ROWS}}}}
test_split: test
output_type: generate_until
doc_to_text: "{ASKED!s}"
doc_to_target: "{{{{sum}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false, max_gen_toks: 16}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""

needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both tasks."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = tmp_path / "rows.jsonl"
    lines = [{"a": a, "b": b, "sum": a + b, "parity": (a + b) % 2} for a, b in QUESTIONS]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("choice", CHOICE), ("written", WRITTEN)):
        escaped = text.replace("?\nAnswer:", "?\\nAnswer:").replace("ROWS", str(rows))
        (folder / f"{name}.yaml").write_text(escaped)
    return folder


def knows_even(tokenizer: Tokenizer) -> Callable[[Sequence[int], int], float]:
    """A model of tokens that finds every token of "even" likelier than any other."""
    even = set(tokenizer.encode(" even").ids)
    return lambda _before, token: -0.1 if token in even else -3.0


@needs_harness
def test_results_of_real_tasks_are_read(tiny: Path, tasks: Path, tmp_path: Path) -> None:
    """Likelihoods and generations: the server says `even` to all, and gets sums below 8 right."""
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))

    def reply(prompt: str) -> str:
        text = tokenizer.decode([int(i) for i in prompt.split()]) if prompt.replace(" ", "").isdigit() else prompt
        a, b = (int(word.strip("?")) for word in text.replace("plus", "").split() if word.strip("?").isdigit())
        return f"{a + b}\n" if a + b < 8 else "many\n"

    with LoopbackOpenAI(reply, knows_even(tokenizer), max_model_len=512) as loopback:
        served = server.connect(loopback.url, None)
        options = harness.Options(tokenizer=str(tiny), task_folder=tasks, concurrency=2)
        results = harness.run(served, ["sums_choice", "sums_written"], tmp_path / "out", options, Reporter())
    found = {(m.task, m.metric): m for m in results.metrics}
    even = sum((a + b) % 2 == 0 for a, b in QUESTIONS) / len(QUESTIONS)
    small = sum(a + b < 8 for a, b in QUESTIONS) / len(QUESTIONS)
    assert found["sums_choice", "acc"].value == pytest.approx(even)
    assert found["sums_written", "exact_match"].value == pytest.approx(small)
    assert found["sums_choice", "acc"].samples == len(QUESTIONS)
    assert found["sums_choice", "acc"].stderr is not None
    assert results.as_json()["metrics"][0]["task"] == "sums_choice"
    assert {r["path"] for r in loopback.requests} == {"/v1/completions"}
    assert results.log.read_text()


@needs_harness
def test_chat_through_the_command(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user sees: a table, a report, and the request fields that were given."""
    monkeypatch.setenv("COLUMNS", "100")
    with LoopbackOpenAI(lambda _: "5", max_model_len=512) as loopback:
        run_tasks(
            loopback.url, ["sums_written"], out=tmp_path / "out", chat=True, task_folder=tasks, limit=2, temperature=0.5,
            max_tokens=9,
        )  # fmt: skip
    assert [r["path"] for r in loopback.requests] == ["/v1/chat/completions"] * 2
    assert loopback.requests[0]["temperature"] == 0.5
    assert loopback.requests[0]["max_tokens"] == 9
    shown = capsys.readouterr().out
    assert "sums_written" in shown
    assert "0.5000" in shown  # 2 + 3 is 5, 4 + 4 is not
    assert "| sums_written | exact_match | 0.5000 |" in (tmp_path / "out" / "tasks.md").read_text()
    written = json.loads((tmp_path / "out" / "tasks.json").read_text())
    assert written["lm_eval"]["metrics"][0]["samples"] == 2


@needs_harness
def test_an_unknown_task_is_named(tmp_path: Path) -> None:
    with LoopbackOpenAI() as loopback:
        served = server.connect(loopback.url, None)
        with pytest.raises(InputError, match="does not know the task no_such_task"):
            harness.run(served, ["no_such_task"], tmp_path, harness.Options(chat=True), Reporter())


def test_a_missing_harness_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    served = server.Served("http://127.0.0.1:9/v1", "m", None, None)
    with pytest.raises(harness.NotInstalledError, match=r'pip install "nvfp4-mtp\[tasks\]"'):
        harness.run(served, ["gsm8k"], tmp_path, harness.Options(), Reporter())
    assert not list(tmp_path.iterdir())


@needs_harness
def test_a_tokenizer_that_only_the_server_has(tmp_path: Path) -> None:
    served = server.Served("http://127.0.0.1:9/v1", "m", "/srv/no/such/model", 4096)
    with pytest.raises(InputError, match=r"/srv/no/such/model, which is not here\. Give its --tokenizer"):
        harness.run(served, ["gsm8k"], tmp_path, harness.Options(), Reporter())

"""The benchmark: the command line that vLLM is given, what its results sum up to, the knee, the tables and the plot."""

import itertools
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quantize.__main__ import app
from quantize.bench.cells import Cell, ResultError, knee, levels, read_cell
from quantize.bench.prompts import read_categories
from quantize.bench.report import category_rows, markdown, plot, sentence, sweep_rows

# A published sweep of a 27B of this kind on two 16 GB cards: concurrency, tok/s, mean TTFT, mean and 99 % ITL (ms).
FIELD = [
    (1, 114.8, 285, 21.9, 22),
    (2, 203.2, 338, 24.6, 120),
    (4, 322.9, 423, 31.0, 254),
    (6, 348.0, 1176, 36.3, 259),
    (8, 360.1, 2156, 34.5, 247),
]


def field_cells(category: str = "all", factor: float = 1.0) -> list[Cell]:
    return [Cell(category, c, factor * tps, ttft, itl, p99, 2.9, 16, 0) for c, tps, ttft, itl, p99 in FIELD]


def stub(folder: Path, body: str = "") -> Path:
    """A `vllm` that writes what `vllm bench serve` 0.32 writes (benchmarks/serve.py), for a server of known speed."""
    folder.mkdir(exist_ok=True)
    path = folder / "vllm"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, sys\n"
        "argv = sys.argv[1:]\n"
        f"pathlib.Path({str(folder / 'calls')!r}).open('a').write(json.dumps(argv) + chr(10))\n"
        f"{body}\n"
        "flags = {a: argv[i + 1] for i, a in enumerate(argv[:-1]) if a.startswith('--')}\n"
        "c = int(flags['--max-concurrency'])\n"
        "n = int(flags['--num-prompts'])\n"
        "lines = pathlib.Path(flags['--dataset-path']).read_text().splitlines()\n"
        "assert len(lines) == n and all('prompt' in json.loads(line) for line in lines)\n"
        "speed = {1: 100.0, 2: 180.0, 4: 300.0, 6: 320.0, 8: 330.0}[c]\n"
        "result = {'date': '20260101-000000', 'backend': flags['--backend'], 'num_prompts': n, 'max_concurrency': c}\n"
        "result |= {\n"
        "  'duration': 1.0, 'completed': n, 'failed': 0, 'total_output_tokens': n * 8, 'output_throughput': speed,\n"
        "  'mean_ttft_ms': 10.0 * c, 'p99_ttft_ms': 20.0, 'mean_itl_ms': 5.0 + c, 'p99_itl_ms': 9.0 * c,\n"
        "  'spec_decode_acceptance_rate': 74.0, 'spec_decode_acceptance_length': 2.48}\n"
        "pathlib.Path(flags['--result-dir'], flags['--result-filename']).write_text(json.dumps(result))\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = stub(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def bench(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "--endpoint", "http://127.0.0.1:8000/v1", *map(str, arguments)])


def calls(vllm: Path) -> list[list[str]]:
    return [json.loads(line) for line in (vllm.parent / "calls").read_text().splitlines()]


def test_every_category_is_measured_at_every_concurrency(vllm: Path, tmp_path: Path) -> None:
    done = bench("--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    argv = calls(vllm)
    assert len(argv) == 4 * 5
    first = argv[0]
    assert first[:2] == ["bench", "serve"]
    pairs = dict(itertools.pairwise(first))
    assert pairs["--base-url"] == "http://127.0.0.1:8000"
    assert pairs["--temperature"] == "0"
    assert json.loads(pairs["--extra-body"]) == {"chat_template_kwargs": {"enable_thinking": False}}
    assert {"--ignore-eos", "--save-result", "--skip-chat-template"} <= set(first)
    told = json.loads((tmp_path / "out/report.json").read_text())
    assert told["knee"] == 4
    assert [level["tokens_per_second"] for level in told["sweep"]] == [100, 180, 300, 320, 330]
    assert "4 is the knee" in done.stdout
    assert (tmp_path / "out/bench.png").read_bytes()[:4] == b"\x89PNG"
    assert "| 4 (knee) | 300.0 | 75.0 |" in (tmp_path / "out/report.md").read_text()


def test_options_reach_vllm(vllm: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"category": "A b/c", "prompt": "x"}\n{"category": "spec", "turns": ["first", "second"]}\n')
    levels = ("--concurrency", "2,1", "--output-tokens", 32)
    done = bench("--prompts", prompts, *levels, "--tokenizer", "/m", "--thinking", "--out", tmp_path / "o", "--json")
    assert done.exit_code == 0, done.output
    assert [c["category"] for c in json.loads(done.stdout)["cells"]] == ["A b/c", "A b/c", "spec", "spec"]
    pairs = dict(itertools.pairwise(calls(vllm)[2]))
    assert (pairs["--custom-output-len"], pairs["--tokenizer"], pairs["--max-concurrency"]) == ("32", "/m", "1")
    assert json.loads(pairs["--extra-body"])["chat_template_kwargs"]["enable_thinking"] is True
    assert json.loads(Path(pairs["--dataset-path"]).read_text()) == {"prompt": "first"}


def test_another_python_s_vllm_is_called_as_a_module(tmp_path: Path) -> None:
    path = stub(tmp_path / "bin")
    done = bench("--vllm-python", path, "--concurrency", "1", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert calls(path)[0][:4] == ["-m", "vllm.entrypoints.cli.main", "bench", "serve"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("sys.exit('ModuleNotFoundError: No module named \\'pandas\\'')", "pip install 'vllm[bench]'"),
        ("sys.exit('aiohttp.ClientConnectorError: Cannot connect to host 127.0.0.1:8000')", "no server is there"),
        ("sys.exit('something else')", "something else"),
        ("sys.exit(0)", "exit code 0"),
    ],
)
def test_a_vllm_that_fails_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, text: str) -> None:
    path = stub(tmp_path / "bin", body)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    done = bench("--out", tmp_path / "out")
    assert done.exit_code == 1
    assert text in done.stderr
    assert ".log" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--concurrency", "1,two"], "not a list of numbers"),
        (["--concurrency", "0"], "below 1"),
        (["--prompts", "nowhere.jsonl"], "cannot be read"),
        (["--vllm-python", "/no/python"], "cannot be run"),
    ],
)
def test_bad_input_exits_with_2(vllm: Path, tmp_path: Path, arguments: list[str], text: str) -> None:
    done = bench(*arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert text in done.stderr


def test_no_vllm_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = bench("--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "no `vllm` on the PATH" in done.stderr


@pytest.mark.parametrize(
    ("content", "text"), [("", "is empty"), ("{", "not JSON"), ('{"category": "x"}', "no prompt"), ("[1]", "no prompt")]
)
def test_prompts_that_are_none_are_refused(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=text):
        read_categories(path)


def test_the_bundled_prompts_have_categories() -> None:
    counts = {category: len(prompts) for category, prompts in read_categories().items()}
    assert counts == {"math": 4, "coding": 4, "writing": 4, "qa": 4}


def test_a_published_sweep_has_its_knee_where_its_author_saw_it() -> None:
    assert knee(levels(field_cells())) == 4
    assert "+25 tok/s" in sentence(field_cells())


def test_a_sweep_that_still_grows_has_no_knee_below_its_end() -> None:
    cells = [Cell("all", c, 100.0 * c, 10, 5, 6, None, 4, 0) for c in (1, 2, 4)]
    assert knee(levels(cells)) is None
    assert "still grows at 4" in sentence(cells)
    assert "knee" not in str(sweep_rows(cells))
    assert knee(levels(cells[:1])) is None


def test_the_sweep_is_the_mean_of_the_categories() -> None:
    sweep = levels([*field_cells("a", 1.5), *field_cells("b", 0.5)])
    assert [level.tokens_per_second for level in sweep] == pytest.approx([tps for _, tps, *_ in FIELD])
    assert sweep[-1].per_stream == pytest.approx(360.1 / 8)


def test_tables_have_a_row_for_each() -> None:
    cells = [*field_cells("slow", 0.5), *field_cells("fast")]
    assert [row[0] for row in sweep_rows(cells)] == ["1", "2", "4 (knee)", "6", "8"]
    assert [row[0] for row in category_rows(cells)] == ["fast", "slow"]
    assert category_rows(cells)[0][3] == f"{360.1 / 114.8:.2f}x"
    text = markdown(cells, 256)
    assert text.count("\n| ---") == 2
    assert "256 tokens a request" in " ".join(text.split())


def test_the_plot_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plot(field_cells(), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_result_without_answers_is_refused_with_the_server_s_error() -> None:
    with pytest.raises(ResultError, match="500 Internal"):
        read_cell("qa", 2, {"completed": 0, "failed": 4, "errors": ["", "500 Internal Server Error"]})
    with pytest.raises(ResultError, match="output_throughput"):
        read_cell("qa", 2, {"completed": 4})

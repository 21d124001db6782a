"""`python -m quantize evaluate --endpoint URL --tasks ...`: benchmarks against a served checkpoint."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from assemble.errors import InputError
from assemble.jsonfile import read_object, write_object
from quantize.console import Reporter, duration

AIME = "aime"  # ours; every other name is lm-evaluation-harness's
OUT = Path("tasks.evaluation")
JSON_FILE, MARKDOWN_FILE = "tasks.json", "tasks.md"
TIMEOUT_SECONDS = 7200.0

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", help="Benchmark a served checkpoint: the server's base URL, http://HOST:PORT/v1.", show_default=False
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks", help="With --endpoint: `aime`, or names of lm-evaluation-harness's tasks. Repeatable, or with commas."
    ),
]
Problems = Annotated[
    Path | None,
    typer.Option(
        help="For `aime`: a .jsonl file with `problem` and `answer` (a whole number) on each line.", show_default=False
    ),
]
Model = Annotated[str | None, typer.Option(help="The served model's name, if the server has several.", show_default=False)]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="For the harness: the tokenizer's directory or Hub id. By default the server's.", show_default=False),
]
Chat = Annotated[bool, typer.Option("--chat", help="For the harness: through the chat template, not as plain completions.")]
TaskFolder = Annotated[Path | None, typer.Option(help="For the harness: a folder with task definitions of your own.")]
NumFewshot = Annotated[int | None, typer.Option(min=0, help="For the harness: examples in each prompt.", show_default=False)]
Limit = Annotated[int | None, typer.Option(min=1, help="For the harness: questions of each task.", show_default=False)]
Concurrency = Annotated[int, typer.Option(min=1, help="For the harness: requests at a time. `aime` is always one.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Of the sampling. `aime`: 0.6.", show_default=False)]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Of the sampling. `aime`: 0.95.", show_default=False)]
TopK = Annotated[int | None, typer.Option(min=-1, help="Of the sampling. `aime`: 20.", show_default=False)]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Of an answer. `aime`: 90000.", show_default=False)]
Thinking = Annotated[bool, typer.Option("--thinking/--no-thinking", help="For `aime`: what the chat template is told.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that an answer may take.")]


def run_tasks(
    endpoint: str,
    tasks: list[str],
    *,
    out: Path = OUT,
    model: str | None = None,
    problems: Path | None = None,
    tokenizer: str | None = None,
    chat: bool = False,
    task_folder: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    concurrency: int = 1,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    thinking: bool = True,
    timeout_seconds: float = TIMEOUT_SECONDS,
    as_json: bool = False,
) -> None:
    """Runs benchmarks against a server, prints what came out, and writes `tasks.json` and `tasks.md` into `out`.

    Raises:
        InputError: an option that does not fit, no server, unreadable problems, a harness that is not installed.
        CheckFailedError: the server or the harness failed on the way.
    """
    from quantize.evaluate.tasks import harness, server

    names = [name.strip() for entry in tasks for name in entry.split(",") if name.strip()]
    _check(names, problems)
    reporter = Reporter()
    served = server.connect(endpoint, model)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens}
    given = {key: value for key, value in sampling.items() if value is not None}
    out.mkdir(parents=True, exist_ok=True)
    result = _earlier(out, served.model, served.root)
    others = [name for name in names if name != AIME]
    if others:
        options = harness.Options(
            chat, tokenizer, task_folder, num_fewshot, limit, concurrency, _generation(given), timeout_seconds
        )
        measured = harness.run(served, others, out, options, reporter).as_json()
        result["lm_eval"] = _joined(result["lm_eval"], measured)
        _write(result, out)
    if problems is not None:
        sampled = given | {"thinking": thinking}
        result["aime"] = _aime(served, problems, out, sampled, timeout_seconds, reporter)
        _write(result, out)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print(result, out)


def markdown(result: dict[str, Any]) -> list[str]:
    """A section of a report, line by line."""
    lines = ["## Tasks", "", f"Model: {result['model']}", ""]
    if result["lm_eval"] is not None:
        lines += ["| task | metric | value | standard error | questions | shots |", "|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in _rows(result["lm_eval"])]
        lines += ["", f"lm-evaluation-harness {result['lm_eval']['lm_eval_version']}.", ""]
    if result["aime"] is not None:
        lines += [f"**AIME pass@1 {_pass(result['aime'])}**", "", *[f"- {line}" for line in _aime_lines(result["aime"])], ""]
    return lines


def _check(names: list[str], problems: Path | None) -> None:
    if not names:
        raise InputError("--endpoint needs --tasks: `aime`, or names of lm-evaluation-harness's tasks such as gsm8k.")
    if (AIME in names) != (problems is not None):
        text = "--tasks aime needs --problems FILE" if problems is None else "--problems is for --tasks aime"
        raise InputError(f"{text}: a .jsonl file with `problem` and `answer` on each line.")


def _earlier(out: Path, model: str, root: str | None) -> dict[str, Any]:
    """What `out` holds of this model, to be added to; another model's results are replaced."""
    found = read_object(out / JSON_FILE) if (out / JSON_FILE).is_file() else {}
    if (found.get("model"), found.get("loaded_from")) == (model, root):
        return found
    return {"model": model, "loaded_from": root, "aime": None, "lm_eval": None}


def _joined(earlier: dict[str, Any] | None, measured: dict[str, Any]) -> dict[str, Any]:
    """The tasks measured now, and earlier ones that were not measured again."""
    again = {metric["task"] for metric in measured["metrics"]}
    kept = [metric for metric in (earlier or {}).get("metrics", []) if metric["task"] not in again]
    return measured | {"metrics": kept + measured["metrics"]}


def _aime(
    served: Any, problems: Path, out: Path, sampled: dict[str, Any], timeout_seconds: float, reporter: Reporter
) -> dict[str, Any]:
    from quantize.evaluate.tasks import aime

    return aime.run(served, problems, out, aime.Sampling(**sampled), reporter, timeout_seconds).as_json()


def _generation(given: dict[str, Any]) -> dict[str, Any]:
    """The same in the harness's words."""
    words = {"max_tokens": "max_gen_toks"}
    sampled = {"do_sample": True} if given.get("temperature") else {}
    return {words.get(key, key): value for key, value in given.items()} | sampled


def _write(result: dict[str, Any], out: Path) -> None:
    write_object(out / JSON_FILE, result)
    (out / MARKDOWN_FILE).write_text("\n".join(markdown(result)), encoding="utf-8")


def _print(result: dict[str, Any], out: Path) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"model: {result['model']}", markup=False)
    if result["lm_eval"] is not None:
        table = Table("task", "metric", "value", "standard error", "questions", "shots", box=None, pad_edge=False)
        for row in _rows(result["lm_eval"]):
            table.add_row(*row)
        console.print(table)
    if result["aime"] is not None:
        console.print(f"AIME pass@1 {_pass(result['aime'])}", markup=False)
        for line in _aime_lines(result["aime"]):
            console.print(f"  {line}", markup=False)
    console.print(f"report: {out / MARKDOWN_FILE}", markup=False)


def _rows(measured: dict[str, Any]) -> list[list[str]]:
    return [
        [
            m["task"],
            m["metric"] if m["filter"] == "none" else f"{m['metric']} ({m['filter']})",
            f"{m['value']:.4f}",
            "" if m["stderr"] is None else f"{m['stderr']:.4f}",
            "" if m["samples"] is None else str(m["samples"]),
            "" if m["num_fewshot"] is None else str(m["num_fewshot"]),
        ]
        for m in measured["metrics"]
    ]


def _pass(score: dict[str, Any]) -> str:
    return (
        f"{score['correct']}/{score['problems']} = {score['pass_at_1']:.3f} (95 %: {score['low']:.3f} to {score['high']:.3f})"
    )


def _aime_lines(score: dict[str, Any]) -> list[str]:
    sampling = score["sampling"]
    shown = ", ".join(f"{key} {value}" for key, value in sampling.items() if value is not None)
    lines = [f"protocol: {score['protocol']}", f"sampling: {shown}"]
    for key, words in (
        ("wrong", "wrong"),
        ("finished_by_length", "ended by length"),
        ("without_answer", "without a boxed number"),
    ):
        lines.append(f"{words}: {', '.join(score[key]) or 'none'}")
    speed = f", {score['tokens_per_second']} tokens/s" if score["tokens_per_second"] else ""
    lines.append(f"{score['completion_tokens']:,} completion tokens in {duration(score['seconds'])}{speed}")
    lines.append("one sample is not a ceiling: at this temperature another pass gives another number")
    return lines

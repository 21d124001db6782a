"""lm-evaluation-harness's tasks against a served checkpoint. The harness runs as it is, in a process of its own.

It is not a dependency: `pip install "nvfp4-mtp[tasks]"` brings it. It is given a config file, its output is kept in a log,
and its own results file is what is read back, so whatever task it knows works here.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.errors import CheckFailedError
from quantize.evaluate.tasks.server import Served

INSTALL = 'pip install "nvfp4-mtp[tasks]" (or: pip install "lm_eval[api]")'
FOLDER = "lm_eval"
REQUESTS = re.compile(rb"Requesting API:\s+(\d+)%")
TAIL_LINES = 12
UNKNOWN = re.compile(r"^ValueError: Tasks not found: (.+)$", re.MULTILINE)  # lm_eval 0.4.13 config/evaluate_config.py


class NotInstalledError(InputError):
    """lm-evaluation-harness is not in this environment."""


class HarnessError(CheckFailedError):
    """lm-evaluation-harness failed."""


@dataclass(frozen=True)
class Options:
    """What the harness is told besides the tasks; None leaves its default.

    Attributes:
        chat: Through the chat template. Tasks that compare likelihoods need plain completions.
        tokenizer: Directory or Hub id, for plain completions; None: where the server loaded the model from.
        task_folder: A folder with task definitions of your own.
        num_fewshot: Examples in each prompt.
        limit: Questions of each task.
        concurrency: Requests at a time.
        generation: Fields of a request, such as `temperature`.
        timeout_seconds: How long a request may take.
    """

    chat: bool = False
    tokenizer: str | None = None
    task_folder: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    concurrency: int = 1
    generation: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 7200.0


@dataclass(frozen=True)
class Metric:
    """One number of one task; `stderr` is the harness's own."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    samples: int | None
    num_fewshot: int | None


@dataclass(frozen=True)
class Results:
    """What the harness measured."""

    model: str
    lm_eval_version: str
    metrics: list[Metric]
    seconds: float
    log: Path

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "lm_eval_version": self.lm_eval_version,
            "metrics": [asdict(metric) for metric in self.metrics],
            "seconds": round(self.seconds, 1),
        }


def run(served: Served, tasks: list[str], out: Path, options: Options, reporter: Reporter) -> Results:
    """Runs tasks and reads their results.

    Args:
        served: The server, from `server.connect`.
        tasks: Names that the harness knows, or of `options.task_folder`.
        out: A directory; everything of this run goes into a new folder under its `lm_eval/`.
        options: What else to tell it.
        reporter: Where progress goes.

    Raises:
        NotInstalledError: with the command that installs it.
        InputError: a task that it does not know, or a tokenizer that is not here.
        HarnessError: it failed; with the end of its log.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise NotInstalledError(f"--tasks {','.join(tasks)} needs lm-evaluation-harness: {INSTALL}")
    if options.task_folder is not None and not options.task_folder.is_dir():
        raise InputError(f"--task-folder {options.task_folder} is not a directory with task definitions (.yaml)")
    folder = _new_folder(out / FOLDER)
    config, log = folder / "config.yaml", folder / "log.txt"
    config.write_text(yaml.safe_dump(_config(served, tasks, folder, options), sort_keys=False), encoding="utf-8")
    reporter.line(f"lm_eval: {', '.join(tasks)}; its log is {log}")
    started = time.monotonic()
    code = _process([sys.executable, "-m", "lm_eval", "run", "--config", str(config)], log, reporter)
    found = sorted(folder.rglob("results_*.json"))
    if code != 0 or not found:
        raise _failure(log, code)
    return _read(found[-1], served.model, time.monotonic() - started, log)


def _new_folder(parent: Path) -> Path:
    number = 1
    while True:
        folder = parent / f"run-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def _config(served: Served, tasks: list[str], folder: Path, options: Options) -> dict[str, Any]:
    kind, path = ("local-chat-completions", "chat/completions") if options.chat else ("local-completions", "completions")
    arguments: dict[str, Any] = {
        "model": served.model,
        "base_url": f"{served.url}/{path}",
        "num_concurrent": options.concurrency,
        "timeout": int(options.timeout_seconds),
        "max_retries": 3,
    }
    if not options.chat:
        tokenizer = options.tokenizer or _tokenizer_of(served)
        if tokenizer is not None:
            arguments |= {"tokenizer_backend": "huggingface", "tokenizer": tokenizer}
        if served.max_model_len is not None:
            arguments["max_length"] = served.max_model_len
    config: dict[str, Any] = {
        "model": kind,
        "model_args": arguments,
        "tasks": tasks,
        "output_path": str(folder),
        "log_samples": True,
        "apply_chat_template": options.chat,
    }
    optional = {
        "num_fewshot": options.num_fewshot,
        "limit": options.limit,
        "include_path": None if options.task_folder is None else str(options.task_folder),
        "gen_kwargs": dict(options.generation) or None,
    }
    return config | {key: value for key, value in optional.items() if value is not None}


def _tokenizer_of(served: Served) -> str | None:
    """Where the server's tokenizer is: a folder that is here too, or a Hub id.

    Raises:
        InputError: the server names a folder of its own machine.
    """
    root = served.root
    if root is not None and Path(root).is_absolute() and not Path(root).is_dir():
        raise InputError(f"the server loaded {served.model} from {root}, which is not here. Give its --tokenizer, or --chat.")
    return root


def _process(command: list[str], log: Path, reporter: Reporter) -> int:
    """Runs the harness with its output in a file, and shows how far its requests are."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as file, reporter.task("lm_eval requests", 100) as progress:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)  # noqa: S603
        try:
            _follow(process, file, progress)
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def _follow(process: subprocess.Popen[bytes], file: Any, progress: Any) -> None:
    if process.stdout is None:
        return
    shown = 0
    while data := os.read(process.stdout.fileno(), 65536):
        file.write(data)
        file.flush()
        percents = [int(number) for number in REQUESTS.findall(data)]
        if percents and percents[-1] > shown:
            progress(percents[-1] - shown)
            shown = percents[-1]


def _failure(log: Path, code: int) -> Exception:
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    if unknown := UNKNOWN.search(text):
        return InputError(
            f"lm_eval does not know the task {unknown[1].strip()}. `lm-eval ls tasks` lists what it knows; a task of your own "
            "needs --task-folder."
        )
    lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return HarnessError(f"lm_eval failed with status {code}. The end of its log {log}:\n" + "\n".join(f"  {x}" for x in lines))


def _read(path: Path, model: str, seconds: float, log: Path) -> Results:
    """The harness's results file: `results` task -> "metric,filter" -> value, standard errors as "metric_stderr,filter"."""
    found = json.loads(path.read_text(encoding="utf-8"))
    metrics = []
    for task, values in found["results"].items():
        samples = (found.get("n-samples") or {}).get(task) or {}
        for key, value in values.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr") or type(value) not in (int, float):
                continue
            stderr = values.get(f"{metric}_stderr,{name}")
            stderr = float(stderr) if type(stderr) in (int, float) else None
            shots = (found.get("n-shot") or {}).get(task)
            metrics.append(Metric(task, metric, name, float(value), stderr, samples.get("effective"), shots))
    return Results(model, str(found.get("lm_eval_version") or "unknown"), metrics, seconds, log)

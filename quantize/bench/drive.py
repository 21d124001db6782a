"""Runs `vllm bench serve`, once a cell, as a process of its own."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assemble.errors import InputError
from assemble.jsonfile import read_object
from quantize.bench.cells import Cell, read_cell
from quantize.console import Reporter
from quantize.errors import CheckFailedError

MAX_SECONDS = 3600.0  # a cell
HINTS = {  # what its log says -> what to do
    r"No module named 'pandas'|vllm\[bench\]|PlaceholderModule": "pandas is missing there: pip install 'vllm[bench]'",
    r"Cannot connect to host|Connection refused|ClientConnectorError|Endpoint .* not (ready|available)": "no server is there",
    r"is not a local folder|Repo id must|couldn't connect to 'https://huggingface": "no tokenizer: give --tokenizer CHECKPOINT",
}


class BenchError(CheckFailedError):
    """`vllm bench serve` failed."""


@dataclass(frozen=True)
class Load:
    """What is asked of the server.

    Attributes:
        url: The server's address, without /v1.
        command: What runs vLLM's command line: `vllm`, or a Python with `-m`.
        output_tokens: Tokens generated a request, no more and no fewer.
        warmups: Requests before the clock starts.
        tokenizer: The checkpoint whose tokenizer counts tokens; None: the name that the server gives its model.
        thinking: Whether the chat template may let the model think first.
    """

    url: str
    command: tuple[str, ...]
    output_tokens: int = 256
    warmups: int = 8
    tokenizer: str | None = None
    thinking: bool = False

    def arguments(self, dataset: Path, num_prompts: int, concurrency: int, result: Path) -> list[str]:
        """The whole command of one cell. Every flag is in vLLM 0.26 and 0.32, benchmarks/serve.py and datasets.py."""
        kwargs = json.dumps({"chat_template_kwargs": {"enable_thinking": self.thinking}})
        return [
            *self.command,
            *("bench", "serve", "--backend", "openai-chat", "--base-url", self.url, "--endpoint", "/v1/chat/completions"),
            *("--dataset-name", "custom", "--dataset-path", str(dataset), "--disable-shuffle", "--skip-chat-template"),
            *("--num-prompts", str(num_prompts), "--num-warmups", str(self.warmups), "--max-concurrency", str(concurrency)),
            *("--custom-output-len", str(self.output_tokens), "--ignore-eos", "--temperature", "0", "--extra-body", kwargs),
            *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99", "--disable-tqdm"),
            *(("--tokenizer", self.tokenizer) if self.tokenizer else ()),
            *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
        ]


def vllm_command(python: Path | None) -> tuple[str, ...]:
    """What runs vLLM's command line.

    Raises:
        InputError: there is none.
    """
    program = str(python) if python else "vllm"
    if shutil.which(program) is None:
        what = f"{program} cannot be run" if python else "there is no `vllm` on the PATH"
        raise InputError(f"{what}. Give the Python of an environment that has vLLM: --vllm-python PYTHON.")
    return (program, "-m", "vllm.entrypoints.cli.main") if python else (program,)


def measure(
    load: Load, categories: dict[str, list[str]], concurrencies: Sequence[int], folder: Path, reporter: Reporter
) -> list[Cell]:
    """Measures every cell; results and logs stay in `folder`.

    Raises:
        BenchError: a run failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cells = []
    with reporter.task("benchmark", len(categories) * len(concurrencies)) as progress:
        for number, (category, prompts) in enumerate(categories.items()):
            dataset = folder / f"{number:02d}-{_file_name(category)}.jsonl"
            dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
            for concurrency in concurrencies:
                result = folder / f"{dataset.stem}-c{concurrency}.json"
                _run(load.arguments(dataset, len(prompts), concurrency, result), result)
                cells.append(read_cell(category, concurrency, read_object(result)))
                progress(1, f"{category}, {concurrency} at once")
    return cells


def _run(command: Sequence[str], result: Path) -> None:
    log = result.with_suffix(".log")
    result.unlink(missing_ok=True)
    with log.open("wb") as output, _ended(command, output) as process:
        try:
            code = process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            raise BenchError(f"`vllm bench serve` did not end within {MAX_SECONDS:.0f} s; its log: {log}") from None
    if code != 0 or not result.is_file():
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        hint = next((hint for pattern, hint in HINTS.items() if re.search(pattern, text)), "")
        last = lines[-1][:300] if lines else "it said nothing"
        raise BenchError(f"`vllm bench serve` failed ({hint or f'exit code {code}'}): {last}. Its log: {log}")


@contextlib.contextmanager
def _ended(command: Sequence[str], output: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is ended whatever happens."""
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own vLLM
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,  # type: ignore[call-overload]
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run ({error.strerror}).") from error
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _file_name(category: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", category).strip("-").lower() or "prompts"

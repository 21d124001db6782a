"""Records what a real vLLM does, for the tests that have none: `python -m tests.quantize.smoke.record VLLM_PYTHON [NAME ...]`.

Failures (cases.py) are kept as `recorded/failures/NAME.json`: the runner's result and the end of the log. A good pair of
passes over the bundled tiny model, in BF16, is kept as `recorded/plain.json`, `recorded/mtp.json` and their logs. Paths of the
machine are taken out.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from quantize import demo
from quantize.console import Reporter
from quantize.runner import run
from quantize.smoke.launch import Interpreter, run_pass
from quantize.smoke.passes import Pass
from quantize.smoke.settings import RUNNER, Ask
from quantize.stage import Request
from recipes import loader
from recipes.schema import Smoke
from tests.quantize.smoke.cases import CASES, CPU, Case, make, settings_of

RECORDED = Path(__file__).parent / "recorded"
LOG_LINES = 60
TOKENS = 48


def run_case(case: Case, python: Path, bf16: Path, quantized: Path, folder: Path) -> Path:
    """Has vLLM refuse a case. Returns the result's path."""
    root = make(case, quantized if case.base == "quantized" else bf16, bf16, folder / "checkpoint")
    settings, result = folder / "settings.json", folder / "result.json"
    settings.write_text(json.dumps(settings_of(case, root)))
    subprocess.run([str(python), str(RUNNER), str(settings), str(result)], check=False, timeout=300, stdin=subprocess.DEVNULL)
    return result


def tiny_ask(root: Path = demo.MODEL) -> Ask:
    """Six prompts from this project's own source text, as the ids that tokenizer.json makes of it."""
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    names = ("verify", "plan", "writer", "reader", "splice", "hub")
    texts = [(Path(__file__).parents[3] / f"assemble/{name}.py").read_text() for name in names]
    prompts = [{"prompt_token_ids": tokenizer.encode(text).ids[:96], "ignore_eos": True} for text in texts]
    return Ask(root, Smoke(max_new_tokens=TOKENS), prompts)


class OnCPU(Interpreter):
    """The interpreter, with little memory for the KV cache."""

    def environment(self) -> dict[str, str]:
        return super().environment() | CPU


def scrubbed(text: str, *paths: Path) -> str:
    """The text without the machine's paths, process ids and times."""
    for path in sorted((str(p) for p in paths), key=len, reverse=True):
        text = text.replace(path, "/checkpoint")
    text = re.sub(r"(/[\w.+-]+)+/site-packages/", "/site-packages/", text)
    text = re.sub(r"(/[\w.+-]+)+/smoke_runner\.py", "/smoke_runner.py", text)
    text = re.sub(r"(/[\w.+-]+)+/lib/python3", "/lib/python3", text)
    text = re.sub(r"file:///tmp/vllm_dist_\w+", "file:///vllm_dist", text)
    return re.sub(r"pid=\d+", "pid=1", text)


def record_failures(python: Path, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        rows = base / "rows.jsonl"
        demo.write_calibration(rows)
        request = Request(str(demo.MODEL), base / "out", loader.load("demo"), calibration=rows, device="cpu")
        quantized = run(request, Reporter()).out
        for case in [c for c in CASES if not names or c.name in names]:
            folder = base / case.name.replace(" ", "_")
            folder.mkdir()
            result = run_case(case, python, demo.MODEL, quantized, folder)
            log = result.with_suffix(".log")
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.is_file() else []
            kept = {"result": json.loads(result.read_text()), "log": "\n".join(lines) + "\n"}
            text = scrubbed(json.dumps(kept, indent=1), folder / "checkpoint", folder, demo.MODEL)
            target = RECORDED / "failures" / f"{case.name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text + "\n")
            said = str((kept["result"]["error"] or {}).get("message"))[:150]
            print(f"{case.name}: {said}")  # noqa: T201


def record_passes(python: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("plain", "mtp"):
            one: Pass = run_pass(OnCPU(python), tiny_ask(), name, folder, 900.0, Reporter())
            text = json.dumps({**one.result, "python": "3"}, separators=(",", ":"))
            (RECORDED / f"{name}.json").write_text(scrubbed(text, demo.MODEL, folder) + "\n")
            (RECORDED / f"{name}.log").write_text(scrubbed(one.log, demo.MODEL, folder))
            print(name, one.end, one.result.get("speculation"))  # noqa: T201


if __name__ == "__main__":
    chosen = sys.argv[2:]
    if not chosen or chosen == ["passes"]:
        record_passes(Path(sys.argv[1]))
    if chosen != ["passes"]:
        record_failures(Path(sys.argv[1]), chosen)

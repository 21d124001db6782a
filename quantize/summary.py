"""What a finished run tells the user."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quantize.console import duration, size
from quantize.preview import FORMATS
from quantize.runner import Outcome
from quantize.stage import Record


def summary_json(outcome: Outcome, seconds: float) -> dict[str, Any]:
    """The summary as plain data."""
    records = outcome.records
    return {
        "out": str(outcome.out),
        "already_complete": outcome.already_complete,
        "seconds": round(seconds, 1),
        "total_size": records["plan"].facts["total_size"],
        "counts": records["plan"].facts["counts"],
        "rules_checked": records["verify"].facts["rules"],
        "warnings": records["verify"].facts["warnings"],
        "evaluated": records["evaluate"].facts["quality"] if "evaluate" in records else None,
        "smoke_passed": records["smoke"].facts["passed"] if "smoke" in records else None,
        "published": dict(records["publish"].facts) if "publish" in records else None,
        "stages": {n: {"seconds": r.seconds, "peak_memory_bytes": r.peak_memory_bytes} for n, r in records.items()},
    }


def print_summary(outcome: Outcome, seconds: float, console: Console) -> None:
    """Prints what was made, how it was checked, and what to do with it."""
    records, out = outcome.records, outcome.out
    facts = records["plan"].facts
    if outcome.already_complete:
        console.print(f"{out} is already complete: it was made from the same inputs and recipe.", markup=False)
    table = Table("in the checkpoint", "modules", "tensors", "size", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, entry in facts["sizes"].items():
        table.add_row(FORMATS[kind], str(facts["counts"].get(kind, "")), str(entry["tensors"]), size(entry["bytes"]))
    console.print(table)
    head, verified = records["assemble"].facts["head_sha256"], records["verify"].facts
    console.print(
        f"verified: {verified['rules']} rules, no errors, {_count(len(verified['warnings']), 'warning')}", markup=False
    )
    console.print(f"MTP head: {len(head)} tensors, identical to the source, byte for byte", markup=False)
    for line in _measured(records):
        console.print(line, markup=False)
    if not outcome.already_complete:
        peak = max(r.peak_memory_bytes for r in records.values())
        console.print(f"took {duration(seconds)}, peak host memory {size(peak)}", markup=False)
    console.print(f"\ncheckpoint: {out} ({size(facts['total_size'])}); its model card is {out / 'README.md'}", markup=False)
    console.print(
        f"check it again: python -m assemble verify {out} --deep --source {records['fetch'].facts['model']['root']}",
        markup=False,
    )
    if "publish" in records:
        sent = records["publish"].facts
        seen = "private" if sent["private"] else "public"
        console.print(f"published: {sent['url']} ({seen}, {sent['revision']}, commit {sent['commit']})", markup=False)
    console.print(f"serve it: {_serve_command(out, text_only=facts['text_only'])}", markup=False)


def _measured(records: Mapping[str, Record]) -> list[str]:
    """What the optional stages found out, a line each."""
    lines = []
    if "evaluate" in records:
        quality = {name: estimate["value"] for name, estimate in records["evaluate"].facts["quality"].items()}
        lines.append(
            f"evaluated: KL {quality['kl_mean']:.4f} nats a token, same most likely token {quality['top1_agreement']:.1%}, "
            f"perplexity {quality['perplexity_bf16']:.4g} -> {quality['perplexity_quantized']:.4g}"
        )
    if "smoke" in records:
        lines.append(f"served by vLLM {records['smoke'].facts['vllm']}: all checks passed")
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _serve_command(out: Path, *, text_only: bool) -> str:
    tower = "" if text_only else "--language-model-only "
    speculative = '{"method":"mtp","num_speculative_tokens":2}'
    return f"vllm serve {out} {tower}--kv-cache-dtype fp8 --speculative-config '{speculative}' --no-enable-prefix-caching"

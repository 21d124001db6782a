"""`verify` and `rules`: how a report and the law book look on a terminal, as data, and as a page."""

import sys
import textwrap
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from assemble.rules import Needs, Served, Severity
from assemble.rules.book import RULES
from assemble.verify import Group, Report

STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
MEANS = {
    Served.LOUD: "does not start",
    Served.SILENT: "starts, and is wrong without a word",
    Served.WORSE: "right, but not as good as it could be",
}
LEVELS = {
    Needs.FILES: "always, even when config.json makes no sense",
    Needs.HEADERS: "always: headers, configs and a few scalars",
    Needs.VALUES: "`--deep`: tensor values",
    Needs.SOURCE: "`--source BF16`: identity with the source",
}


def print_report(report: Report) -> None:
    """Prints the findings, a paragraph a kind, then the verdict and what it takes to serve the checkpoint."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for group in report.groups:
        _print_group(console, group)
    counts = Counter(f.severity for f in report.findings)
    said = ", ".join(f"{n} {s.value}{'s' if n > 1 and s is not Severity.INFO else ''}" for s in Severity if (n := counts[s]))
    verdict = Text("sound", "bold green")
    if report.findings:
        verdict = Text("not fit to serve", "bold red") if report.errors else Text("fit to serve", "bold yellow")
    console.print(Text.assemble(f"{report.root}: ", verdict, f" ({said or 'no findings'}; {len(report.rules)} rules applied)"))
    needs = report.requires
    console.print(
        Text(
            f"needs vLLM {needs.vllm_text} or newer ({needs.reason}), CUDA compute capability {needs.capability / 10} or higher"
        )
    )
    for note in needs.notes:
        console.print(Text(f"note: {note}"))


def _print_group(console: Console, group: Group) -> None:
    first, count = group.findings[0], len(group.findings)
    times = f"  ({count:,} of this kind)" if count > 1 else ""
    console.print(Text.assemble((f"{first.severity.value:<8}", STYLE[first.severity]), f"{first.rule:<7} {group.where}{times}"))
    example = f"  (at {first.where})" if count > 1 and first.where != group.where else ""
    served = f"{first.served.value} ({MEANS[first.served]}): {first.why}"
    for word, text in (
        ("found", first.found + example),
        ("expected", first.expected),
        ("served", served),
        ("mend", first.mend),
    ):
        console.print(Text(f"{'':8}{word:<10}{text}"))


def book() -> list[dict[str, Any]]:
    """The law book as plain data."""
    return [
        {
            "id": rule.id,
            "severity": rule.severity.value,
            "law": rule.law,
            "served": rule.served.value,
            "why": rule.why,
            "needs": rule.needs.value,
            "mend": rule.mend.value,
            "source": rule.source,
        }
        for rule in RULES
    ]


def print_book() -> None:
    """Prints the law book for reading."""
    columns = ("rule", "severity", "must hold", "served", "else", "source")
    table = Table(*(Column(name, overflow="fold") for name in columns), box=None, pad_edge=False)
    for rule in RULES:
        table.add_row(rule.id, rule.severity.value, rule.law, rule.served.value, rule.why, rule.source)
    Console(file=sys.stdout, highlight=False).print(table)


def markdown() -> str:
    """The law book as docs/law-book.md."""
    counts = Counter(rule.served for rule in RULES)
    lines = [
        "# The law book",
        "",
        *textwrap.wrap(
            f"What vLLM requires of a quantized checkpoint of the Qwen3.5 family: {len(RULES)} rules. This page is made by "
            "`python -m assemble rules --markdown`; `python -m assemble verify CHECKPOINT` applies it.",
            120,
        ),
        "",
        "| served | what vLLM does with a checkpoint that breaks the rule | rules |",
        "|---|---|---|",
        *(f"| {served.value} | {MEANS[served]} | {counts[served]} |" for served in Served),
        "",
    ]
    for needs, title in LEVELS.items():
        lines += [f"## {title[0].upper()}{title[1:]}", "", "| rule | severity | must hold | served | else | source |"]
        lines += ["|---|---|---|---|---|---|"]
        for rule in (r for r in RULES if r.needs is needs):
            cells = (rule.id, rule.severity.value, rule.law, rule.served.value, rule.why, rule.source)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"

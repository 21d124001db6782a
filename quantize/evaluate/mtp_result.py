"""What was measured of the head, as plain data, as Markdown and in the terminal."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from quantize.evaluate import mtp_acceptance
from quantize.evaluate.mtp_acceptance import Acceptance, Costs
from quantize.evaluate.mtp_faults import CHANCE, Finding

BODIES = {"bf16": "BF16", "quantized": "quantized"}
OWN = ("its own", "BF16")  # names of the head that a checkpoint has itself
SHOWN_DRAFTS = (1, 2, 4, 6)
SHOWN_FINDINGS = 6
SIMULATED = (
    "greedy drafting and verification; the head's keys are those of its true inputs, as a server leaves them after it verified",
    "FP8 activations and FP8 KV cache of the quantized body; FP8 KV cache of the head, scale 1",
    "heads cast to FP8 or NVFP4: weights only",
)


def result(
    *, cases: Iterable[Any], findings: list[Finding], fault: str | None, settings: Any, num_prompts: int,
    passes: Mapping[str, int], agreement: Mapping[str, Any] | None, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """The measurement as plain data, keys of dicts as text.

    Returns:
        `bodies`: body -> `tokens_per_step` {K: float}, `interval` {K: [low, high]} (95 %, bootstrap over prompts), `acceptance`
        {K: shares of steps that accepted the draft at each position}, `speedup` {K: float}, `best_k` and `best_speedup` (0 and
        1: drafting does not pay), all with the checkpoint's own head; `table`: every body, head and K with its counts;
        `best`: every body and head with the K that pays and what a draft costs there; `head` (findings), `warnings`, what was
        asked, and how long it took.
    """
    cases = list(cases)
    table = [_row(case, a) for case in cases for a in case.acceptances.values()]
    bodies = {case.body: _body(case.acceptances, case.costs) for case in reversed(cases) if case.head in OWN}
    if fault is not None:
        bodies["quantized"] = _nothing(settings.max_drafts)
    return {
        "prompts": num_prompts,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "max_drafts": settings.max_drafts,
        "bodies": {name: bodies[name] for name in BODIES if name in bodies},
        "best": [_best(case) for case in cases],
        "table": table,
        "head": [finding.as_json() for finding in findings],
        "warnings": _warnings(bodies, findings, fault),
        "greedy_texts": agreement,
        "simulated": list(SIMULATED),
        "body_passes": dict(passes),
        "seconds": round(seconds, 1),
    }


def _row(case: Any, acceptance: Acceptance) -> dict[str, Any]:
    return {
        "body": case.body,
        "head": case.head,
        "k": acceptance.num_drafts,
        "steps": acceptance.steps,
        "drafted": acceptance.drafted,
        "accepted": acceptance.accepted,
        "accepted_by_position": list(acceptance.accepted_by_position),
        "tokens_per_step": round(acceptance.tokens_per_step, 4),
        "low": round(acceptance.low, 4),
        "high": round(acceptance.high, 4),
        "speedup": round(case.costs.speedup(acceptance.tokens_per_step, acceptance.num_drafts), 4),
    }


def _body(acceptances: Mapping[int, Acceptance], costs: Costs) -> dict[str, Any]:
    best_k, best_speedup = mtp_acceptance.best(acceptances, costs)
    return {
        "tokens_per_step": {str(k): round(a.tokens_per_step, 4) for k, a in acceptances.items()},
        "interval": {str(k): [round(a.low, 4), round(a.high, 4)] for k, a in acceptances.items()},
        "acceptance": {str(k): [round(rate, 4) for rate in a.rates] for k, a in acceptances.items()},
        "speedup": {str(k): round(costs.speedup(a.tokens_per_step, k), 4) for k, a in acceptances.items()},
        "best_k": best_k,
        "best_speedup": round(best_speedup, 4),
    }


def _nothing(max_drafts: int) -> dict[str, Any]:
    """A body without a head that can draft: a token a step."""
    ks = [str(k) for k in range(1, max_drafts + 1)]
    return {
        "tokens_per_step": dict.fromkeys(ks, 1.0),
        "interval": {k: [1.0, 1.0] for k in ks},
        "acceptance": {k: [0.0] * int(k) for k in ks},
        "speedup": dict.fromkeys(ks, 1.0),
        "best_k": 0,
        "best_speedup": 1.0,
    }


def _best(case: Any) -> dict[str, Any]:
    k, speedup = mtp_acceptance.best(case.acceptances, case.costs)
    costs = {"draft_cost": round(case.costs.draft, 4), "verify_cost": round(case.costs.verify, 4), "costs": case.costs.how}
    return {"body": case.body, "head": case.head, "k": k, "speedup": round(speedup, 4), **costs}


def _warnings(bodies: Mapping[str, Any], findings: list[Finding], fault: str | None) -> list[str]:
    if fault is not None:
        return [f"nothing can be drafted: {fault}"]
    named = ", ".join(f"{f.tensor} ({f.what})" for f in findings[:SHOWN_FINDINGS])
    first = {name: body["acceptance"]["1"][0] for name, body in bodies.items()}
    warnings = []
    if first.get("quantized", 1.0) < CHANCE:
        if named:
            cause = f"The head is at fault: {named}."
        elif first.get("bf16", 1.0) < CHANCE:
            cause = "The head is the source's, and on the source's body it drafts as badly: was it trained with this body?"
        else:
            cause = "The head is the source's, and on the source's body it drafts well: the body is at fault."
        warnings.append(f"the head is of no use: {first['quantized']:.1%} of its first drafts are right. {cause}")
    elif named:
        warnings.append(f"the head is not the source's: {named}.")
    return warnings


def markdown(measured: Mapping[str, Any]) -> list[str]:
    """A section of the report, line by line."""
    drafts = [k for k in SHOWN_DRAFTS if k <= measured["max_drafts"]]
    lines = [
        "## MTP head",
        "",
        _asked(measured),
        "",
        "Tokens a step, and the K that pays:",
        "",
    ]
    lines += ["| body | head | " + " | ".join(f"K={k}" for k in drafts) + " | cost | K that pays |"]
    lines += ["|---|---|" + "---|" * (len(drafts) + 2)]
    lines += [f"| {' | '.join(row)} |" for row in _cells(measured, drafts)]
    lines += ["", _cost_text(measured)]
    for body, values in measured["bodies"].items():
        deepest = str(measured["max_drafts"])
        shares = " ".join(f"{share:.0%}" for share in values["acceptance"][deepest])
        lines += ["", f"Accepted by position, {BODIES[body]} body, K={deepest}: {shares} of steps."]
    lines += [line for warning in measured["warnings"] for line in ("", f"**{warning[0].upper()}{warning[1:]}**")]
    lines += ["", "Simulated: " + "; ".join(measured["simulated"]) + "."]
    return lines


def print_result(measured: Mapping[str, Any], console: Console | None = None) -> None:
    """The same for the terminal."""
    console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
    drafts = [k for k in SHOWN_DRAFTS if k <= measured["max_drafts"]]
    table = Table("body", "head", *[f"K={k}" for k in drafts], "cost", "K that pays", box=None, pad_edge=False)
    for row in _cells(measured, drafts):
        table.add_row(*row)
    console.print(f"MTP head: tokens a step. {_asked(measured)}", markup=False)
    console.print(table)
    console.print(_cost_text(measured), markup=False)
    for warning in measured["warnings"]:
        console.print(f"WARNING: {warning}", markup=False)


def _cells(measured: Mapping[str, Any], drafts: list[int]) -> list[list[str]]:
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for entry in measured["table"]:
        rows.setdefault((entry["body"], entry["head"]), {})[entry["k"]] = (
            f"{entry['tokens_per_step']:.2f} ± {(entry['high'] - entry['low']) / 2:.2f}"
        )
    pays = {(best["body"], best["head"]): _pays(best) for best in measured["best"]}
    return [[BODIES[body], head, *(cells[k] for k in drafts), *pays[body, head]] for (body, head), cells in rows.items()]


def _pays(best: Mapping[str, Any]) -> tuple[str, str]:
    cost = f"{best['draft_cost'] + best['verify_cost']:.2f}"
    return cost, f"{best['k']} ({best['speedup']:.2f} x)" if best["k"] else "none"


def _asked(measured: Mapping[str, Any]) -> str:
    return (
        f"{measured['prompts']} prompts of {measured['prompt_tokens']} held-out tokens, {measured['new_tokens']} greedy tokens "
        "each; ± is half the 95 % interval over prompts."
    )


def _cost_text(measured: Mapping[str, Any]) -> str:
    how = measured["best"][0]["costs"] if measured["best"] else "nothing was measured"
    return (
        "The K that pays has the largest speedup = tokens a step / (1 + K x cost), where cost is that of a draft, and of one "
        f"more token in the body's pass, beside a pass of the body ({how})."
    )

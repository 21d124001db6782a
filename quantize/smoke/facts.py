"""What the card and the stage record are told: plain data, without paths and host names."""

import math
from collections.abc import Mapping
from typing import Any

from quantize.smoke import acceptance, logs
from quantize.smoke.divergence import compare
from quantize.smoke.evidence import Evidence
from quantize.smoke.passes import Pass, number
from quantize.smoke.settings import CANARY

SM_120 = "12.0"  # consumer Blackwell, which these checkpoints are made for


def kernels_of(one: Pass) -> dict[str, list[str]]:
    """The kernels of a pass: from its layers where they could be looked at, and from its log."""
    inside = (one.result.get("inside") or {}).get("target") or {}
    return logs.kernels(one.log) | logs.kernels_of_layers(inside)


def gpus_of(one: Pass | None) -> list[dict[str, str]]:
    """The GPUs that vLLM was given."""
    if one is None:
        return []
    used = int((one.result.get("resolved") or {}).get("tensor_parallel_size") or 1)
    gpus = (one.result.get("platform") or {}).get("gpus") or []
    return [{"name": str(g["name"]), "capability": ".".join(map(str, g["capability"] or ["?"]))} for g in gpus[:used]]


def scores(evidence: Evidence) -> dict[str, Any] | None:
    """The prompts' likelihood: `nll` over all `tokens`; where predicted also `predicted_nll` and the `increase` over it."""
    one = evidence.scored
    rows = (one.result["prompt_logprobs"].get("prompts") if one else None) or []
    numbers = [[number(value) for value in row] for row in rows]
    tokens = sum(map(len, numbers))
    if not tokens:
        return None
    nll = -sum(map(sum, numbers)) / tokens
    pairs = [
        (-sum(row), value * len(row), len(row))
        for row, value in zip(numbers, evidence.prediction.nll, strict=False)
        if value is not None
    ]
    if not pairs:
        return {"nll": nll, "tokens": tokens, "predicted_nll": None, "increase": None}
    seen, expected, counted = (sum(column) for column in zip(*pairs, strict=True))
    return {
        "nll": nll,
        "tokens": tokens,
        "predicted_nll": expected / counted,
        "increase": (seen - expected) / counted,
    }


def facts_of(evidence: Evidence, reached: str) -> dict[str, Any]:
    """The facts for stage records and the card. No paths, no host names."""
    loaded = [p for p in evidence.passes.values() if p.loaded]
    # The last that loaded: it has the head, as a server would.
    known = loaded[-1] if loaded else next(iter(evidence.passes.values()), None)
    resolved: Mapping[str, Any] = known.result.get("resolved") or {} if known else {}
    drafted = evidence.drafted.result.get("resolved") or {} if evidence.drafted else {}
    gpus = gpus_of(known)
    scored = scores(evidence)
    canary = known.result.get("canary") if known else None
    return {
        "reached": reached,
        "vllm": known.result.get("vllm") if known else None,
        "gpus": gpus,
        "tensor_parallel_size": resolved.get("tensor_parallel_size", 1),
        "sm_120": "tried" if gpus and gpus[0]["capability"] == SM_120 else "not tried",
        "quantization": resolved.get("quantization"),
        "architectures": list(resolved.get("architectures") or []),
        "draft_architectures": list((drafted.get("draft") or {}).get("architectures") or []),
        "kernels": kernels_of(known) if known else {},
        "kv_cache_dtype": resolved.get("kv_cache_dtype"),
        "kv_cache_tokens": (logs.pool_tokens(known.log) or known.result.get("kv_cache_tokens")) if known else None,
        "load_seconds": (known.result.get("seconds") or {}).get("load") if known else None,
        "settings": dict(known.result.get("engine") or {}) if known else {},
        "acceptance": acceptance.facts(evidence),
        "agreement": _agreement(evidence),
        "likelihood": {k: scored[k] for k in ("tokens", "nll", "predicted_nll")} if scored else None,
        "canary": {"question": _question(canary), "answer": str(canary["text"]).strip()} if canary else None,
    }


def _question(canary: Mapping[str, Any]) -> str:
    return str(canary.get("question") or CANARY["messages"][0]["content"])  # type: ignore[index]


def _agreement(evidence: Evidence) -> dict[str, Any] | None:
    if not (evidence.plain and evidence.drafted and evidence.plain.outputs and evidence.drafted.outputs):
        return None
    comparison = compare(evidence.plain.outputs, evidence.drafted.outputs)
    limit = evidence.recipe.max_margin_millinats / 1000
    diverged = len(comparison.diverged(limit))
    largest = max((d.disagreement for d in comparison.differences), default=0.0)
    return {
        "prompts": comparison.prompts,
        "same": comparison.same,
        "near_ties": len(comparison.differences) - diverged,
        "diverged": diverged,
        "largest_margin": largest if math.isfinite(largest) else None,
        "limit": limit,
    }

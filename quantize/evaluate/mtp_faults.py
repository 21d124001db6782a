"""What is wrong with an MTP head, by tensor: against the source's, or by itself."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

FC = "fc.weight"
CHANCE = 0.1  # a head whose first draft is accepted less often is taken to be broken; a working one is right in 5 to 9 of 10


@dataclass(frozen=True)
class Finding:
    """One tensor of the head that is not as it should be.

    Attributes:
        tensor: Its name in the checkpoint.
        what: What was found, in words.
        sqnr_db: Signal to noise against the source's tensor, in dB; None where that says nothing.
    """

    tensor: str
    what: str
    sqnr_db: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def inspect_head(tensors: Mapping[str, Any], source: Mapping[str, Any] | None) -> list[Finding]:
    """Every tensor of a head that is absent, zero, not finite, or not the source's, the worst first.

    Args:
        tensors: The head's, by name without `mtp.`, experts fused.
        source: The same of the source; None when it has no head.
    """
    findings = list(_by_itself(tensors))
    if source is not None:
        named = {finding.tensor for finding in findings}
        findings += [f for f in _against(tensors, source) if f.tensor not in named]
    return sorted(findings, key=lambda f: -math.inf if f.sqnr_db is None else f.sqnr_db)


def _by_itself(tensors: Mapping[str, Any]) -> Iterator[Finding]:
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            yield Finding(f"mtp.{name}", "holds NaN or infinity")
        elif tensor.dim() > 1 and not bool(tensor.any()):  # a norm of zeros is the identity: weights are offsets from 1
            yield Finding(f"mtp.{name}", "all zeros")


def _against(tensors: Mapping[str, Any], source: Mapping[str, Any]) -> Iterator[Finding]:
    import torch

    for name, original in source.items():
        if name not in tensors:
            yield Finding(f"mtp.{name}", "absent")
            continue
        found = tensors[name].to(original.device)
        if found.shape != original.shape:
            yield Finding(f"mtp.{name}", f"shape {list(found.shape)}, the source's is {list(original.shape)}")
        elif not torch.equal(found.to(original.dtype), original):
            yield _difference(name, found, original)


def _difference(name: str, found: Any, original: Any) -> Finding:
    import torch

    if name == FC and torch.equal(torch.cat(found.chunk(2, dim=-1)[::-1], dim=-1).to(original.dtype), original):
        text = "its two halves are swapped: the embedding's half must come first"
        return Finding(f"mtp.{name}", text, _sqnr(found, original))
    if not bool(found.any()):
        return Finding(f"mtp.{name}", "all zeros, the source's is not", _sqnr(found, original))
    return Finding(f"mtp.{name}", "not the source's", _sqnr(found, original))


def _sqnr(found: Any, original: Any) -> float:
    noise = (found.float() - original.float()).square().sum().item()
    signal = original.float().square().sum().item()
    return round(10 * math.log10(signal / noise), 1) if signal and noise else 0.0

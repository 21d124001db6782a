"""The recipe's gates: limits that a checkpoint's evaluation has to keep."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quantize.errors import CheckFailedError
from recipes.schema import Evaluation


class GateError(CheckFailedError):
    """An evaluation that does not keep a limit of the recipe."""

    summary = "The evaluation did not keep a limit that the recipe sets."


@dataclass(frozen=True)
class Gate:
    """One limit, and what was found. `found` is None where it was not measured: such a gate is not passed."""

    name: str
    limit: float
    found: float | None

    @property
    def passed(self) -> bool:
        """Whether the limit is kept."""
        if self.found is None:
            return False
        return self.found <= self.limit if self.name.startswith("max_") else self.found >= self.limit

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "passed": self.passed}


def judge(settings: Evaluation, quality: Mapping[str, float], tokens_per_step: float | None, num_outliers: int) -> list[Gate]:
    """The gates that the recipe sets, judged.

    Args:
        settings: The recipe's.
        quality: The whole model's numbers, as `distance.summarize` names them.
        tokens_per_step: With `settings.num_speculative_tokens` drafts a step; None: not measured.
        num_outliers: Modules and tensors that stand out.
    """
    found: dict[str, float | None] = {
        "max_kl": quality["kl_mean"],
        "max_kl_p99": quality["kl_p99"],
        "max_nll_increase": quality["nll_increase"],
        "min_agreement": quality["top1_agreement"],
        "min_tokens_per_step": tokens_per_step,
        "max_outliers": num_outliers,
    }
    limits = {name: getattr(settings, name) for name in found}
    return [Gate(name, limit, found[name]) for name, limit in limits.items() if limit is not None]


def check(gates: list[Gate], where: str) -> None:
    """Raises when a gate is not passed.

    Args:
        gates: Judged.
        where: The report that has more, for the message.

    Raises:
        GateError: names every limit that is not kept.
    """
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        texts = [
            f"{g.name} is {g.limit:g}, found {'nothing: it was not measured' if g.found is None else f'{g.found:.4g}'}"
            for g in failed
        ]
        raise GateError(f"the evaluation does not keep the recipe's limits: {'; '.join(texts)}. The whole report: {where}")

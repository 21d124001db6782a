"""What a verdict is made from, as data: the passes, the config, the law book's findings, what was predicted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from assemble.jsonfile import read_object
from assemble.rules import Finding, Severity
from quantize.smoke.passes import Pass
from quantize.smoke.settings import GRAPHS, MTP, PLAIN
from recipes.schema import Smoke


@dataclass(frozen=True)
class Prediction:
    """What `evaluate` computed without vLLM.

    Attributes:
        tokens_per_step: 1 + accepted / drafts, with the recipe's number of drafted tokens.
        nll: For each prompt, the mean negative log-likelihood of its tokens but the first, in nats; None where unknown.
    """

    tokens_per_step: float | None = None
    nll: tuple[float | None, ...] = ()


def predicted(facts: Mapping[str, Any], num_speculative_tokens: int, prompts: Sequence[Mapping[str, Any]]) -> Prediction:
    """Reads a prediction out of evaluate's facts (its report.json) and the prompts that it wrote; what is not there is None."""
    bodies = (facts.get("mtp") or {}).get("bodies") or {}
    steps = (bodies.get("quantized") or {}).get("tokens_per_step") or {}
    value = steps.get(str(num_speculative_tokens))
    number = float(value) if isinstance(value, (int, float)) else None
    return Prediction(number, tuple(prompt.get("nll") for prompt in prompts))


@dataclass(frozen=True)
class Expectation:
    """What config.json says vLLM should make of the checkpoint.

    Attributes:
        quantized: Whether it is quantized at all.
        method: vLLM's name for the quantization; None for an unquantized checkpoint.
        architectures: The target's.
        draft: The draft's architecture.
        schemes: Algorithms that are listed: `NVFP4`, `FP8`.
        experts: Whether a router chooses experts for each token.
    """

    quantized: bool
    method: str | None
    architectures: tuple[str, ...]
    draft: str
    schemes: tuple[str, ...]
    experts: bool = False


def read_expectation(root: Path) -> Expectation:
    """Reads config.json.

    Raises:
        InputError: no checkpoint there.
    """
    if not (root / "config.json").is_file():
        raise InputError(f"{root} holds no config.json: it is not a checkpoint. Give the directory that `quantize run` made.")
    config = read_object(root / "config.json")
    quantization = config.get("quantization_config") or _twin(root)
    listed = quantization.get("quantized_layers") or {}
    algorithms = {entry.get("quant_algo") for entry in listed.values() if isinstance(entry, dict)}
    schemes = tuple(name for name, algo in (("NVFP4", "W4A16_NVFP4"), ("FP8", "FP8")) if algo in algorithms)
    moe = "moe" in str(config.get("model_type"))
    # vLLM 0.26 config/speculative.py hf_config_override
    draft = "Qwen3_5MoeMTP" if moe else "Qwen3_5MTP"
    method = "modelopt_mixed" if str(quantization.get("quant_algo")) == "MIXED_PRECISION" else None
    return Expectation(bool(quantization), method, tuple(config.get("architectures") or ()), draft, schemes, moe)


def _twin(root: Path) -> dict[str, Any]:
    """What hf_quant_config.json says: a checkpoint that says it there alone is meant to be quantized, too."""
    path = root / "hf_quant_config.json"
    return dict(read_object(path).get("quantization") or {}) if path.is_file() else {}


@dataclass(frozen=True)
class Evidence:
    """What a verdict is made from.

    Attributes:
        passes: By name; a pass that was not run is absent.
        recipe: The limits.
        expectation: What config.json promises.
        findings: The law book's, or None when it was not asked.
        prediction: What evaluate computed.
        source_given: Whether the law book compared with the source.
        tokenize: What the checkpoint's own tokenizer.json makes of a text; None where it cannot be read.
    """

    passes: Mapping[str, Pass]
    recipe: Smoke
    expectation: Expectation
    findings: Sequence[Finding] | None = None
    prediction: Prediction = field(default_factory=Prediction)
    source_given: bool = False
    tokenize: Callable[[str], Sequence[int]] | None = None

    @property
    def plain(self) -> Pass | None:
        """The pass without the head."""
        return self.passes.get(PLAIN)

    @property
    def drafted(self) -> Pass | None:
        """The pass with it."""
        return self.passes.get(MTP)

    @property
    def scored(self) -> Pass | None:
        """The pass whose prompts were scored, or tried to be."""
        return next((one for one in self.passes.values() if one.result.get("prompt_logprobs")), None)

    @property
    def graphs(self) -> Pass | None:
        """The pass with compilation and CUDA graphs."""
        return self.passes.get(GRAPHS)

    def broken(self, *rules: str) -> list[Finding]:
        """The findings of some rules; of all, when none is named. Notes are no findings."""
        found = [f for f in self.findings or () if f.severity is not Severity.INFO]
        return [f for f in found if not rules or f.rule in rules]

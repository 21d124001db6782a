"""What a rule, a finding and the subject of a verification are."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from assemble.architecture import Architecture
from assemble.checkpoint import Checkpoint, Layout, TensorInfo
from assemble.resolution import Resolution


class Severity(Enum):
    """ERROR stops a run and makes `verify` exit with 1; WARNING does not."""

    ERROR = "error"
    WARNING = "warning"


class Needs(Enum):
    """What a rule looks at: headers and configs (about a second), tensor values, or the source checkpoint's values too."""

    HEADERS = "headers"
    VALUES = "values"
    SOURCE = "source"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rule: The rule's id.
        severity: Of the rule.
        where: The tensor, field or file.
        found: What is there.
        expected: What should be there.
    """

    rule: str
    severity: Severity
    where: str
    found: str
    expected: str


@dataclass(frozen=True)
class Subject:
    """The checkpoint under verification, as far as it could be read.

    Attributes:
        layout: Headers and index, with their problems.
        tensors: Every tensor of the files that could be read.
        config: config.json.
        hf_quant_config: hf_quant_config.json, or None where it is absent.
        architecture: What config.json implies.
        source: The BF16 checkpoint it was made from, when given.
        head: The checkpoint its MTP head was taken from; `source` unless said otherwise.
    """

    layout: Layout
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any] | None
    architecture: Architecture
    source: Checkpoint | None = None
    head: Checkpoint | None = None
    progress: Callable[[int], None] = field(default=lambda _: None)

    @property
    def quantization(self) -> Mapping[str, Any]:
        """config.json's `quantization_config`, or an empty mapping."""
        value = self.config.get("quantization_config")
        return value if isinstance(value, dict) else {}

    @property
    def schemes(self) -> dict[str, str]:
        """`quantized_layers` as module -> algorithm; entries that are not understood map to their text."""
        layers = self.quantization.get("quantized_layers")
        if not isinstance(layers, dict):
            return {}
        return {m: str(e.get("quant_algo")) if isinstance(e, dict) else str(e) for m, e in layers.items()}

    @property
    def ignore(self) -> list[str]:
        """`ignore`, or an empty list where it is absent or malformed."""
        value = self.quantization.get("ignore")
        return [e for e in value if isinstance(e, str)] if isinstance(value, list) else []

    @property
    def resolution(self) -> Resolution:
        """vLLM's view of `ignore`."""
        return Resolution(self.ignore, wrapped=self.architecture.wrapped)

    def read(self, name: str) -> bytes:
        """A tensor's bytes."""
        tensor = self.tensors[name]
        with (self.layout.root / tensor.shard).open("rb") as file:
            file.seek(tensor.start)
            return file.read(tensor.nbytes)


Detail = tuple[str, str, str]  # where, found, expected


@dataclass(frozen=True)
class Rule:
    """One law of the book.

    Attributes:
        id: Stable name, as printed in findings.
        severity: Of its findings.
        why: One line: what goes wrong when served.
        source: Where the fact was read.
        check: Yields (where, found, expected) for each violation.
        needs: What it has to read.
    """

    id: str
    severity: Severity
    why: str
    source: str
    check: Callable[[Subject], Iterable[Detail]]
    needs: Needs = Needs.HEADERS

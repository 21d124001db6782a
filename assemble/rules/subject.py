"""The checkpoint under verification: what was read of it, and what follows from that."""

import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assemble.architecture import LM_HEAD, MTP_PREFIX, Architecture, ConfigError, Shape, experts_container
from assemble.checkpoint import Checkpoint, Layout, TensorInfo
from assemble.formats import COMPANIONS
from assemble.reader import Reader, Span
from assemble.resolution import MixedGroupError, PartialGroupError, Resolution, algorithm, plain_algorithm

if TYPE_CHECKING:
    from assemble.rules.scan import Facts

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ".mlp.experts"
QUANTIZED_DTYPES = ("U8", "I8", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class Subject:
    """The checkpoint under verification, as far as it could be read.

    Attributes:
        root: Its directory.
        reader: Reads its shards.
        layout: Headers and index, with their problems.
        tensors: Every tensor of the files that vLLM would read.
        config: config.json; empty when it could not be read.
        hf_quant_config: hf_quant_config.json, or None where it is absent.
        unread: File name -> why it could not be read, for config.json and hf_quant_config.json.
        known: What config.json implies, or the error that says why nothing can be inferred from it.
        source: The BF16 checkpoint it was made from, when given.
        head: The checkpoint its MTP head was taken from; `source` unless said otherwise.
        tensor_parallel: The number of GPUs it is to be split over.
        require_mtp: Whether the absence of an MTP head is an error.
        deep: Whether tensor values are read.
        progress: Called with the bytes read of the checkpoint's values.
    """

    root: Path
    reader: Reader
    layout: Layout
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any] | None
    known: Architecture | ConfigError
    unread: Mapping[str, str] = field(default_factory=dict)
    source: Checkpoint | None = None
    head: Checkpoint | None = None
    tensor_parallel: int = 1
    require_mtp: bool = False
    deep: bool = False
    progress: Callable[[int], None] = field(default=lambda _: None)

    @property
    def architecture(self) -> Architecture:
        """What config.json implies.

        Raises:
            ConfigError: it makes no sense; only rules that need no more than files are asked then.
        """
        if isinstance(self.known, ConfigError):
            raise self.known
        return self.known

    @property
    def quantization(self) -> Mapping[str, Any]:
        """config.json's `quantization_config` as it stands, or an empty mapping."""
        value = self.config.get("quantization_config")
        return value if isinstance(value, dict) else {}

    @functools.cached_property
    def effective(self) -> Mapping[str, Any]:
        """`quantization_config`, with what it lacks taken from hf_quant_config.json, as vLLM falls back on it."""
        q = dict(self.quantization)
        inner = (self.hf_quant_config or {}).get("quantization")
        if isinstance(inner, dict):
            if not q:
                q = {**inner, "ignore": inner.get("exclude_modules")}
            elif not q.get("quantized_layers") and plain_algorithm(q) is None:
                q["quantized_layers"] = inner.get("quantized_layers")
        return q

    @functools.cached_property
    def resolution(self) -> Resolution:
        """vLLM's view of `quantization_config`."""
        return Resolution(self.effective, wrapped=self.architecture.wrapped)

    @property
    def plain(self) -> str | None:
        """The one algorithm of a checkpoint that is not of mixed precision."""
        return self.resolution.plain

    @property
    def ignore(self) -> list[str]:
        """`ignore`, or an empty list where it is absent or malformed."""
        return self.resolution.entries

    @functools.cached_property
    def listed(self) -> dict[str, str]:
        """`quantized_layers` as module -> algorithm; entries that are not understood map to their text."""
        layers = self.effective.get("quantized_layers")
        return {m: algorithm(e) for m, e in layers.items()} if isinstance(layers, dict) and not self.plain else {}

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """Every module that is meant to be quantized -> algorithm, experts one by one.

        For mixed precision: what `quantized_layers` lists, containers expanded. For a plain algorithm: all that vLLM
        would build with it.
        """
        if self.plain:
            return {m: algo for m, algo in self.built.items() if algo}
        found: dict[str, str] = {}
        for module, algo in self.listed.items():
            if module.endswith(EXPERTS) and self.architecture.moe:
                each = (f"{module}.{e}.{p}" for e in range(self.architecture.num_experts) for p in PROJECTIONS)
                found |= dict.fromkeys(each, algo)
            else:
                found[module] = algo
        return found

    @functools.cached_property
    def linear(self) -> dict[str, Shape]:
        """Module -> weight shape of every matrix product of the decoder and of the MTP head."""
        return self.architecture.linear_modules | self.architecture.mtp_linear_modules

    @functools.cached_property
    def built(self) -> dict[str, str | None]:
        """Every linear module, the head's and the vision tower's too -> the algorithm vLLM builds it with, or None."""
        answers: dict[str, str | None] = {}
        modules = [*self.linear, *(n.removesuffix(".weight") for n in self.vision_matrices)]
        found: dict[str, str | None] = {}
        for module in modules:
            key = experts_container(module)
            if key not in answers:
                try:
                    answers[key] = self.resolution.built(module)
                except (PartialGroupError, MixedGroupError):
                    answers[key] = None
            found[module] = answers[key]
        return found

    @functools.cached_property
    def vision_matrices(self) -> list[str]:
        """Names of the vision tower's stored matrices that vLLM builds as linear layers."""
        prefix = "model.visual."
        return [
            name
            for name, tensor in self.tensors.items()
            if name.startswith(prefix) and name.endswith(".weight") and len(tensor.shape) == 2 and "pos_embed" not in name
        ]

    @functools.cached_property
    def head_tensors(self) -> list[TensorInfo]:
        """The stored tensors of an MTP head."""
        return [tensor for name, tensor in self.tensors.items() if name.startswith(MTP_PREFIX)]

    @property
    def has_head(self) -> bool:
        """Whether any tensor of an MTP head is stored."""
        return bool(self.head_tensors)

    @functools.cached_property
    def lm_head(self) -> str | None:
        """What lm_head is meant to be quantized with: `modules` without listing 30,000 others."""
        if not self.plain:
            return self.listed.get(LM_HEAD)
        try:
            return None if self.architecture.tied else self.resolution.built(LM_HEAD)
        except (PartialGroupError, MixedGroupError):
            return None

    @functools.cached_property
    def unquantized_names(self) -> list[str]:
        """The source's tensors that must be here unchanged: all but the head's and those of quantized modules."""
        packed = {experts_container(module) for module in self.modules}
        return [
            name
            for name in self.source or ()
            if not name.startswith(MTP_PREFIX)
            and name.removesuffix(".weight") not in self.modules
            and not (f"{EXPERTS}." in name and experts_container(name) in packed)
        ]

    @functools.cached_property
    def plainly_unquantized(self) -> bool:
        """Whether nothing says that it is quantized, neither a config nor a tensor: a BF16 checkpoint, most likely."""
        declared = self.quantization or self.hf_quant_config or self.unread
        return not declared and not any(self.stored_quantized(name.removesuffix(".weight")) for name in self.tensors)

    @functools.cached_property
    def facts(self) -> "Mapping[str, Facts]":
        """What the values say: of every tensor when values are read, else of those that are compared with an origin."""
        from assemble.rules.scan import scan  # brings numpy, which rules about headers do without

        origins: dict[str, tuple[Path, TensorInfo]] = {}
        head = self.head or self.source
        pairs = [(self.source, self.unquantized_names), (head, [n for n in head or () if n.startswith(MTP_PREFIX)])]
        for checkpoint, names in pairs:
            for name in names if checkpoint else ():
                mine, theirs = self.tensors.get(name), checkpoint[name] if checkpoint else None
                if checkpoint and mine and theirs and (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape):
                    origins[name] = (checkpoint.root, theirs)
        wanted = [t for name, t in self.tensors.items() if self.deep or name in origins]
        return scan(self.root, wanted, origins, self.progress)

    def stored_quantized(self, module: str) -> bool:
        """Whether the module's tensors are in a quantized format, its weight or a companion."""
        weight = self.tensors.get(f"{module}.weight")
        packed = weight is not None and weight.dtype in QUANTIZED_DTYPES
        return packed or any(f"{module}.{leaf}" in self.tensors for leaf in COMPANIONS)

    def read(self, name: str) -> bytes:
        """A tensor's bytes."""
        return self.reader.read([Span.of(self.tensors[name])])[0]

    def scalars(self, names: Iterable[str]) -> dict[str, float]:
        """The values of F32 tensors of one element, by name; others, absent and cut ones are left out."""
        wanted = [t for n in names if (t := self.tensors.get(n)) and t.dtype == "F32" and t.nbytes == 4]
        found = zip(wanted, self.reader.read([Span.of(t) for t in wanted]), strict=True)
        return {tensor.name: struct.unpack("<f", data)[0] for tensor, data in found if len(data) == 4}

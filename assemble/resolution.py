"""How vLLM decides which module it builds in which format: its name mapping, its matchers, its inference, re-stated.

vLLM fuses modules (q, k and v become one `qkv_proj`; a layer's experts one `experts`), names them its own way, and asks for
each fused module: is it excluded by `ignore`? If not, which algorithm? Under `MIXED_PRECISION` the algorithm is looked up in
`quantized_layers`, and what is not found is *inferred*: from a listed sibling of the fused module, from any listed module
below it, for experts even from any listed module beside them. Under a plain algorithm (`NVFP4`) everything that is not
excluded has it. So a list that looks harmless can quantize a BF16 module, or the reverse, in silence.

Restated from vLLM 0.32 and 0.33 (the same in 0.26 but where noted):
- model_executor/layers/quantization/modelopt.py: `apply_vllm_mapper`, `is_layer_excluded`, `_resolve_quant_algo`,
  `ModelOptNvFp4Config._from_config`;
- model_executor/layers/quantization/utils/quant_utils.py: `is_layer_skipped`;
- models/qwen3_5.py, qwen3_vl.py: `hf_to_vllm_mapper`, `packed_modules_mapping`; models/qwen3_5_mtp.py: `fc`;
- utils/torch_utils.py: `get_kv_cache_quant_algo_string`.
"""

import functools
import re
from collections.abc import Mapping
from fnmatch import translate
from typing import Any

from assemble.architecture import FUSED, LM_HEAD, MTP_PREFIX, experts_container

WRAPPED_PREFIXES = (
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)
TEXT_PREFIXES = (("model.language_model.", "model."),)
PACKED: dict[str, tuple[str, ...]] = {**FUSED, "qkv": ("qkv",)}
LINEAR_ALGOS = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"})
# Built without a quantization config: models/qwen3_next.py:177-202, layers/mamba/gdn/qwen_gdn_linear_attn.py:507.
NEVER_QUANTIZED = (".mlp.gate", ".mlp.shared_expert_gate", ".conv1d", ".embed_tokens", ".norm")


class PartialGroupError(ValueError):
    """`ignore` names some members of a fused group and not the others; vLLM raises ValueError on it."""


class MixedGroupError(ValueError):
    """`quantized_layers` gives the members of a fused group different algorithms; vLLM raises ValueError on it."""


class Resolution:
    """vLLM's view of a `quantization_config`.

    Args:
        quantization: config.json's `quantization_config`.
        wrapped: True for the multimodal class, whose names vLLM rearranges.
    """

    def __init__(self, quantization: Mapping[str, Any], *, wrapped: bool) -> None:
        self._renames = WRAPPED_PREFIXES if wrapped else TEXT_PREFIXES
        self.wrapped = wrapped
        self.plain = plain_algorithm(quantization)
        entries = quantization.get("ignore")
        self.entries = [e for e in entries if isinstance(e, str)] if isinstance(entries, list) else []
        self.ignore = [self.rename(pattern) for entry in self.entries for pattern in split_wildcard(entry)]
        self._exact = frozenset(self.ignore)
        self._patterns = [(p, _pattern(p)) for p in self.ignore]
        layers = quantization.get("quantized_layers")
        listed = layers.items() if isinstance(layers, dict) and self.plain is None else ()
        self.layers = {self.rename(module): algorithm(entry) for module, entry in listed}
        self._prefixes: dict[str, str] = {}
        self._below: dict[str, str] = {}
        for module, algo in self.layers.items():
            parents = module.split(".")
            for depth in range(1, len(parents)):
                self._below.setdefault(".".join(parents[:depth]), algo)

    def rename(self, name: str) -> str:
        """A checkpoint's name in vLLM's spelling."""
        for old, new in self._renames:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        return name

    def prefix_of(self, module: str) -> str:
        """The prefix under which vLLM builds a checkpoint's module: a fused module's, or a layer's experts."""
        if module == LM_HEAD:
            return "language_model.lm_head" if self.wrapped else module
        container = experts_container(module)
        if (known := self._prefixes.get(container)) is None:  # asked for each of hundreds of experts
            parent, _, leaf = self.rename(container).rpartition(".")
            fused = next((name for name, members in FUSED.items() if leaf in members), leaf)
            known = self._prefixes[container] = f"{parent}.{fused}" if parent else fused
        return known

    def built(self, module: str) -> str | None:
        """The algorithm with which vLLM builds a checkpoint's module; None for unquantized.

        Raises:
            PartialGroupError: vLLM would raise.
            MixedGroupError: vLLM would raise.
        """
        if module.endswith(NEVER_QUANTIZED) or (self.plain in ("NVFP4", "W4A16_NVFP4") and module == f"{MTP_PREFIX}fc"):
            return None
        prefix = self.prefix_of(module)
        if self.excluded(prefix):
            return None
        algo = self.plain or self.listed(prefix)
        return algo if algo in LINEAR_ALGOS else None

    def excluded(self, prefix: str) -> bool:
        """Whether `ignore` takes out what vLLM builds under `prefix`: `is_layer_excluded`, all three matchers.

        Raises:
            PartialGroupError: vLLM would raise.
        """
        if not self.ignore:
            return False
        return self._skipped(prefix) or any(matches(prefix, *pattern) for pattern in self._patterns)

    def listed(self, prefix: str) -> str | None:
        """The algorithm that `quantized_layers` gives to `prefix`, listed or inferred: `_resolve_quant_algo`.

        Raises:
            MixedGroupError: vLLM would raise.
        """
        for name in _spellings(prefix):
            if name in self.layers:
                return self.layers[name]
        parent, _, leaf = prefix.rpartition(".")
        found = {
            self.layers[f"{base}.{member}"]
            for base in _spellings(parent)
            for member in PACKED.get(leaf, ())
            if f"{base}.{member}" in self.layers
        }
        if len(found) > 1:
            raise MixedGroupError(f"{prefix}: {', '.join(sorted(found))}")
        if found:
            return found.pop()
        return self._inherited(prefix)

    def _inherited(self, prefix: str) -> str | None:
        for name in _spellings(prefix):
            if name in self._below:
                return self._below[name]
        if prefix.endswith(".experts"):
            return self._below.get(prefix.rsplit(".experts", 1)[0])
        return None

    def _skipped(self, prefix: str) -> bool:
        """`is_layer_skipped`: exact names, a fused module by its members, experts by anything below them."""
        leaf = prefix.rpartition(".")[2]
        if leaf in PACKED and prefix not in self._exact:
            listed = [prefix.replace(leaf, member) in self._exact for member in PACKED[leaf]]
            if any(listed) and not all(listed):
                raise PartialGroupError(prefix)
            return all(listed)
        if leaf not in PACKED and "experts" in prefix:
            return any(prefix in entry for entry in self.ignore if "experts" in entry)
        return prefix in self._exact


def matches(prefix: str, entry: str, pattern: re.Pattern[str] | None) -> bool:
    """`is_layer_excluded`'s second and third matcher: plain substring, then fnmatch."""
    if entry != prefix and (entry in prefix or (prefix.startswith("language_model.") and entry in prefix[15:])):
        return True
    return pattern.match(prefix) is not None if pattern else entry == prefix


def split_wildcard(entry: str) -> tuple[str, ...]:
    """vLLM rewrites a trailing `x*` to `x` and `x.*` before it maps names."""
    if len(entry) >= 2 and entry.endswith("*") and entry[-2] != ".":
        return entry[:-1], entry[:-1] + ".*"
    return (entry,)


@functools.lru_cache(maxsize=4096)
def _pattern(entry: str) -> re.Pattern[str] | None:
    """The entry as fnmatch understands it; None when it has no wildcard and so matches itself only."""
    return re.compile(translate(entry)) if any(c in entry for c in "*?[") else None


def _spellings(prefix: str) -> tuple[str, ...]:
    """`_quantized_layer_prefix_candidates`."""
    names = [prefix]
    if prefix.endswith(".lm_head"):
        names.append(LM_HEAD)
    if prefix.startswith("language_model.model."):
        names.append("model.language_model." + prefix.removeprefix("language_model.model."))
    elif prefix.startswith("model.language_model."):
        names.append("language_model.model." + prefix.removeprefix("model.language_model."))
    return tuple(names)


def algorithm(entry: Any) -> str:
    """The algorithm of an entry of `quantized_layers`, in vLLM's capitals; its text when it is not understood."""
    value = entry.get("quant_algo") if isinstance(entry, Mapping) else entry
    return str(value)[:80].upper()


def plain_algorithm(quantization: Mapping[str, Any]) -> str | None:
    """The one algorithm of a checkpoint that is not of mixed precision; None for a mixed or an unquantized one.

    An `NVFP4` checkpoint whose config_groups quantize no activations is `W4A16_NVFP4` (vLLM 0.32 and newer).
    """
    algo = str(quantization.get("quant_algo") or "").upper()
    if algo not in LINEAR_ALGOS:
        return None
    groups = quantization.get("config_groups")
    if algo == "NVFP4" and isinstance(groups, dict) and groups:
        weights_only = (isinstance(g, dict) and g.get("input_activations") is None for g in groups.values())
        return "W4A16_NVFP4" if all(weights_only) else algo
    return algo


def kv_cache_dtype(quantization: Mapping[str, Any]) -> str:
    """What `--kv-cache-dtype auto` becomes: `fp8_e4m3`, `nvfp4`, or `auto` (the model's BF16)."""
    inner = quantization.get("quantization", quantization)
    places = [p for p in (inner, quantization) if isinstance(p, Mapping)]
    values = [p.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo") for p in places]
    value = next((v for v in values if v), None)
    if isinstance(value, Mapping):
        if value.get("dynamic") is False and value.get("num_bits") == 8 and value.get("type") == "float":
            return "fp8_e4m3"
        return "nvfp4" if value.get("num_bits") == 4 and value.get("type") == "float" else "auto"
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(value.lower(), "auto") if isinstance(value, str) else "auto"


def tied_by_vllm(config: Mapping[str, Any], text: Mapping[str, Any], *, stored: bool) -> dict[str, bool]:
    """Whether vLLM replaces lm_head by the embedding, by version.

    0.26 ties whenever the text config says so (vLLM copies the top level's flag there for a multimodal class); 0.32 and
    newer first untie when the top level says tied and an lm_head.weight is stored (config/model.py
    `maybe_untie_word_embeddings`).

    Args:
        config: config.json.
        text: Its text config.
        stored: Whether `lm_head.weight` is in the checkpoint.
    """
    top, inner = bool(config.get("tie_word_embeddings", False)), bool(text.get("tie_word_embeddings", False))
    return {"0.26": top or inner, "0.32": (top or inner) and not (top and stored)}

"""How vLLM decides which module is quantized: its name mapping and its three `ignore` matchers, re-stated.

vLLM 0.33 model_executor/layers/quantization/modelopt.py: `apply_vllm_mapper`, `is_layer_excluded`;
quantization/utils/quant_utils.py `is_layer_skipped`; the prefix maps: models/qwen3_vl.py and models/qwen3_5.py
`hf_to_vllm_mapper`. The same in 0.26 and 0.32.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

from assemble.architecture import FUSED

WRAPPED_PREFIXES = (
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)
TEXT_PREFIXES = (("model.language_model.", "model."),)


class PartialGroupError(ValueError):
    """`ignore` names some members of a fused group and not the others; vLLM raises ValueError on it."""


class Resolution:
    """vLLM's view of an `ignore` list.

    Args:
        ignore: config.json's `ignore`.
        wrapped: True for the multimodal class, whose names vLLM rearranges.
    """

    def __init__(self, ignore: Sequence[str], *, wrapped: bool) -> None:
        self._prefixes = WRAPPED_PREFIXES if wrapped else TEXT_PREFIXES
        self.ignore = [self._rename(pattern) for entry in ignore for pattern in _split_wildcard(entry)]
        self._wrapped = wrapped

    def vllm_name(self, module: str) -> str:
        """The prefix under which vLLM builds a checkpoint's module; a fused member gets its fused module's name."""
        if module == "lm_head":
            return "language_model.lm_head" if self._wrapped else module
        parent, _, leaf = self._rename(module).rpartition(".")
        fused = next((name for name, members in FUSED.items() if leaf in members), leaf)
        return f"{parent}.{fused}" if parent else fused

    def excluded(self, module: str) -> bool:
        """Whether vLLM leaves a checkpoint's module unquantized because of `ignore`.

        Raises:
            PartialGroupError: vLLM would raise.
        """
        prefix = self.vllm_name(module)
        return self._exact(prefix) or self._substring(prefix) or any(fnmatch(prefix, p) for p in self.ignore)

    def hits(self, entry: str, modules: Iterable[str]) -> list[str]:
        """The modules that one entry of `ignore` excludes by itself."""
        alone = Resolution([entry], wrapped=self._wrapped)
        found = []
        for module in modules:
            try:
                if alone.excluded(module):
                    found.append(module)
            except PartialGroupError:
                if alone._rename(module) in alone.ignore:
                    found.append(module)
        return found

    def _rename(self, name: str) -> str:
        for old, new in self._prefixes:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def _exact(self, prefix: str) -> bool:
        parent, _, leaf = prefix.rpartition(".")
        if leaf not in FUSED or prefix in self.ignore:
            return prefix in self.ignore
        listed = [f"{parent}.{member}" in self.ignore for member in FUSED[leaf]]
        if any(listed) and not all(listed):
            raise PartialGroupError(prefix)
        return all(listed)

    def _substring(self, prefix: str) -> bool:
        bare = prefix.removeprefix("language_model.")
        return any(entry != prefix and (entry in prefix or entry in bare) for entry in self.ignore)


def _split_wildcard(entry: str) -> tuple[str, ...]:
    """vLLM rewrites a trailing `x*` to `x` and `x.*` before it maps names."""
    if len(entry) >= 2 and entry.endswith("*") and not entry.endswith(".*"):
        return entry[:-1], entry[:-1] + ".*"
    return (entry,)

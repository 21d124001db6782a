"""Reads ModelOpt's own recipe files, without importing ModelOpt (9 s), to know what they do to a module.

A ModelOpt recipe is YAML: `quantize.quant_cfg` is a list of entries, each a glob over quantizer names
(`MODULE.weight_quantizer`, `MODULE.input_quantizer`, `MODULE.k_bmm_quantizer`) with a configuration or `enable: false`;
the last entry that matches wins. `$import` splices another file: an entry, a list, or a quantizer's configuration.

Source: modelopt 0.47 modelopt_recipes/ and torch/opt/config_loader.py; a test holds this reader against
`modelopt.recipe.load_recipe`.
"""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from assemble.formats import BLOCK, FP8, W4A16_NVFP4
from recipes.yaml_text import parse_yaml_documents


class ModelOptRecipeError(InputError):
    """A ModelOpt recipe that is not there, or that asks for what this tool cannot write."""


@dataclass(frozen=True)
class ModelOptRecipe:
    """The table of a ModelOpt recipe.

    Attributes:
        name: As given to `modelopt.recipe.load_recipe`.
        method: The calibration algorithm, `max` or `mse`.
        entries: `quant_cfg`, with every import resolved.
    """

    name: str
    method: str
    entries: tuple[Mapping[str, Any], ...]

    def quantizer(self, name: str) -> Mapping[str, Any] | None:
        """The configuration of a Linear module's quantizer; None when it is disabled."""
        found: Mapping[str, Any] | None = None
        for entry in self.entries:
            if "parent_class" not in entry and fnmatchcase(name, str(entry.get("quantizer_name"))):
                found = None if entry.get("enable") is False else entry.get("cfg")
        return found

    def scheme(self, module: str) -> str | None:
        """What becomes of a Linear module: `FP8`, `W4A16_NVFP4`, or None for BF16.

        Raises:
            ModelOptRecipeError: another format than these two.
        """
        weight, inputs = self.quantizer(f"{module}.weight_quantizer"), self.quantizer(f"{module}.input_quantizer")
        if weight is None and inputs is None:
            return None
        if weight and inputs and _is_fp8(weight) and _is_fp8(inputs):
            return FP8
        if weight and inputs is None and _is_nvfp4(weight):
            return W4A16_NVFP4
        raise ModelOptRecipeError(
            f"ModelOpt recipe {self.name} gives {module} weights {weight} and inputs {inputs}. "
            f"Only {FP8} (per tensor) and {W4A16_NVFP4} can be written."
        )

    def check_kv_cache(self, attention: str) -> None:
        """Refuses any KV cache but FP8 with a constant scale (`kv_fp8_cast`), which needs no tensors.

        Raises:
            ModelOptRecipeError: another KV cache.
        """
        for side in "kv":
            config = self.quantizer(f"{attention}.{side}_bmm_quantizer")
            if not (config and _is_fp8(config) and config.get("use_constant_amax") is True):
                raise ModelOptRecipeError(
                    f"ModelOpt recipe {self.name} gives the KV cache {config}; expected kv_fp8_cast (FP8, constant scale)."
                )


def _is_fp8(config: Mapping[str, Any]) -> bool:
    return config.get("num_bits") == "e4m3" and config.get("axis") is None and not config.get("block_sizes")


def _is_nvfp4(config: Mapping[str, Any]) -> bool:
    blocks = config.get("block_sizes")
    return config.get("num_bits") == "e2m1" and isinstance(blocks, dict) and blocks.get(-1) == BLOCK


@functools.cache
def read_modelopt_recipe(name: str) -> ModelOptRecipe:
    """Reads one of ModelOpt's shipped recipes, or a recipe file by path.

    Raises:
        ModelOptRecipeError: ModelOpt is not installed, no such recipe, or not a PTQ recipe.
    """
    body = _resolve(_read(name), {})
    quantize = body.get("quantize") if isinstance(body, dict) else None
    if not isinstance(quantize, dict) or not isinstance(quantize.get("quant_cfg"), list):
        raise ModelOptRecipeError(f"{name} is not a ModelOpt PTQ recipe: it has no quantize.quant_cfg")
    algorithm = quantize.get("algorithm") or {}
    method = algorithm.get("method") if isinstance(algorithm, dict) else algorithm
    if method == "mse" and not (isinstance(algorithm, dict) and algorithm.get("fp8_scale_sweep") is True):
        method = "mse without fp8_scale_sweep"  # another search, with other results
    return ModelOptRecipe(name, str(method), tuple(quantize["quant_cfg"]))


def _library() -> Path:
    spec = importlib.util.find_spec("modelopt_recipes")
    if spec is None or not spec.submodule_search_locations:
        raise ModelOptRecipeError(
            "NVIDIA ModelOpt is not installed. Install the quantizer, in a checkout of this project: "
            "pip install -c constraints.txt '.[quantize]'"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _read(name: str) -> Any:
    """The content of a recipe or snippet; a header document before a list becomes its `imports`."""
    candidates = [root / (name + suffix) for root in (_library(), Path()) for suffix in ("", ".yaml", ".yml")]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise ModelOptRecipeError(f"ModelOpt has no recipe {name}. Its recipes lie in {_library()}.")
    documents = parse_yaml_documents(path.read_text(encoding="utf-8"))
    if len(documents) == 2 and isinstance(documents[0], dict):
        return {"imports": documents[0].get("imports", {}), "content": documents[1]}
    return documents[0] if documents else {}


def _resolve(node: Any, imports: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        imports = {**imports, **node.get("imports", {})}
        if "content" in node and isinstance(node["content"], list):
            return _resolve(node["content"], imports)
        rest = {key: _resolve(value, imports) for key, value in node.items() if key not in ("$import", "imports")}
        if "$import" not in node:
            return rest
        imported = _resolve(_read(imports[node["$import"]]), {})
        return {**imported, **rest} if isinstance(imported, dict) else imported
    if isinstance(node, list):
        resolved: list[Any] = []
        for item in node:
            value = _resolve(item, imports)
            resolved += value if isinstance(value, list) else [value]
        return resolved
    return node

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
from recipes.yaml_text import read_yaml

# Of a quantizer: modelopt/torch/quantization/config.py `QuantizerAttributeConfig`, 0.47. A default that is None is left out.
_DEFAULTS: dict[str, Any] = {
    "enable": True,
    "fake_quant": True,
    "unsigned": False,
    "narrow_range": False,
    "learn_amax": False,
    "type": "static",
    "calibrator": "max",
    "rotate": False,
    "use_constant_amax": False,
}
_ELSEWHERE = ("effective_bits", "trt_high_precision_dtype", "pass_through_bwd")  # AutoQuantize, ONNX, training
_FP8: dict[str, Any] = {"num_bits": "e4m3"}
_BLOCKS = {-1: BLOCK, "scale_bits": "e4m3"}
_STATIC, _DYNAMIC = ({"num_bits": "e2m1", "block_sizes": _BLOCKS | {"type": kind}} for kind in ("static", "dynamic"))
_NVFP4 = ((_STATIC, _DYNAMIC), (_STATIC,))  # without mse, and with: it searches for the scales of static blocks only


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
        """The configuration of a Linear module's quantizer; None when it is disabled.

        The last entry that matches counts; one without `cfg` turns on or off what an earlier one configured. {} stands for
        ModelOpt's defaults. Source: modelopt/torch/quantization/conversion.py `set_quantizer_by_cfg`, 0.47.
        """
        config: Mapping[str, Any] = {}
        enabled = False
        for entry in self.entries:
            if "parent_class" not in entry and fnmatchcase(name, entry["quantizer_name"]):
                config, enabled = entry.get("cfg") or config, entry.get("enable") is not False
        return config if enabled else None

    def scheme(self, module: str) -> str | None:
        """What becomes of a Linear module: `FP8`, `W4A16_NVFP4`, or None for BF16.

        Raises:
            ModelOptRecipeError: another format than these two.
        """
        weight, inputs = self.quantizer(f"{module}.weight_quantizer"), self.quantizer(f"{module}.input_quantizer")
        if weight is None and inputs is None:
            return None
        if weight and inputs and _asks_for(weight) == _asks_for(inputs) == _FP8:
            return FP8
        if weight and inputs is None and _asks_for(weight) in _NVFP4[self.method == "mse"]:
            return W4A16_NVFP4
        raise ModelOptRecipeError(
            f"ModelOpt recipe {self.name} gives {module} weights {weight} and inputs {inputs}. "
            f"Only {FP8} (per tensor) and {W4A16_NVFP4} can be written{' (with mse, static blocks)' * (self.method == 'mse')}."
        )

    def check_kv_cache(self, attention: str) -> None:
        """Refuses any KV cache but FP8 with a constant scale (`kv_fp8_cast`), which needs no tensors.

        Raises:
            ModelOptRecipeError: another KV cache.
        """
        for side in "kv":
            config = self.quantizer(f"{attention}.{side}_bmm_quantizer")
            if not config or _asks_for(config) != _FP8 | {"use_constant_amax": True}:
                raise ModelOptRecipeError(
                    f"ModelOpt recipe {self.name} gives the KV cache {config}; expected kv_fp8_cast (FP8, constant scale)."
                )
        for part in ("q_bmm", "softmax"):
            if (config := self.quantizer(f"{attention}.{part}_quantizer")) is not None:
                raise ModelOptRecipeError(f"ModelOpt recipe {self.name} gives {part} of attention {config}; expected none.")


def _asks_for(config: Any) -> dict[str, Any]:
    """What a quantizer's configuration asks for beside ModelOpt's defaults and what changes no number here."""
    if not isinstance(config, dict):
        return {"several quantizers": config}
    blocks = config.get("block_sizes")
    if isinstance(blocks, dict):
        blocks = {"type": "static"} | {key: value for key, value in blocks.items() if key != "four_over_six" or value}
    asked = config | {"block_sizes": blocks}
    return {key: value for key, value in asked.items() if key not in _ELSEWHERE and value != _DEFAULTS.get(key)}


@functools.cache
def read_modelopt_recipe(name: str) -> ModelOptRecipe:
    """Reads one of ModelOpt's shipped recipes, or a recipe file by path.

    Raises:
        ModelOptRecipeError: ModelOpt is not installed, no such recipe, or not a PTQ recipe that is understood here.
    """
    try:
        body = _resolve(_read(name), {})
    except RecursionError:
        raise ModelOptRecipeError(f"ModelOpt recipe {name} imports itself") from None
    quantize = body.get("quantize") if isinstance(body, dict) else None
    if not isinstance(quantize, dict) or not isinstance(quantize.get("quant_cfg"), list):
        raise ModelOptRecipeError(f"{name} is not a ModelOpt PTQ recipe: it has no quantize.quant_cfg")
    for entry in quantize["quant_cfg"]:
        _check_entry(name, entry)
    algorithm = quantize.get("algorithm") or {}
    method = algorithm.get("method") if isinstance(algorithm, dict) else algorithm
    if method == "mse" and not (isinstance(algorithm, dict) and algorithm.get("fp8_scale_sweep") is True):
        method = "mse without fp8_scale_sweep"  # another search, with other results
    return ModelOptRecipe(name, str(method), tuple(quantize["quant_cfg"]))


def _check_entry(name: str, entry: Any) -> None:
    """Refuses an entry that would be passed over here, and not by ModelOpt."""
    if not isinstance(entry, dict) or not isinstance(entry.get("quantizer_name"), str) or not {"cfg", "enable"} & entry.keys():
        raise ModelOptRecipeError(f"ModelOpt recipe {name}: {entry} has no quantizer_name, or neither cfg nor enable")
    if not entry.get("cfg") and "cfg" in entry and entry.get("enable") is not False:
        raise ModelOptRecipeError(f"ModelOpt recipe {name}: {entry} has an empty cfg")
    parent = str(entry.get("parent_class", "nn.Embedding"))
    if not parent.startswith("nn.") or parent == "nn.Linear":
        raise ModelOptRecipeError(f"ModelOpt recipe {name}: {entry} is for modules by class; name them instead")


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
    _, documents = read_yaml(path, "ModelOpt recipe", ModelOptRecipeError)
    if len(documents) == 2 and isinstance(documents[0], dict):
        return {"imports": documents[0].get("imports", {}), "content": documents[1]}
    return documents[0] if documents else {}


def _resolve(node: Any, imports: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        imports = {**imports, **(node.get("imports") or {})}
        if "content" in node and isinstance(node["content"], list):
            return _resolve(node["content"], imports)
        rest = {key: _resolve(value, imports) for key, value in node.items() if key not in ("$import", "imports")}
        if "$import" not in node:
            return rest
        if node["$import"] not in imports:
            raise ModelOptRecipeError(f"a ModelOpt recipe says $import: {node['$import']}; its imports: {', '.join(imports)}")
        imported = _resolve(_read(imports[node["$import"]]), {})
        return {**imported, **rest} if isinstance(imported, dict) else imported
    if isinstance(node, list):
        resolved: list[Any] = []
        for item in node:
            value = _resolve(item, imports)
            resolved += value if isinstance(value, list) else [value]
        return resolved
    return node

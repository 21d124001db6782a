"""Checks a LoRA adapter against a checkpoint, from its config and headers, before a server is started with it.

An adapter of PEFT is `adapter_config.json` and `adapter_model.safetensors`. For each adapted module with a weight [N, K] it
holds `base_model.model.MODULE.lora_A.weight` [r, K] and `….lora_B.weight` [N, r]. Routed experts come in two forms: one by
one, `….mlp.experts.3.gate_proj`, or fused, where PEFT adapts the 3-D parameters of a layer: `….mlp.experts.base_layer` is
gate_up_proj and `….mlp.experts` is down_proj, each with E r in place of r.

vLLM checks the last part of a module's name only. A name whose front does not fit the model is loaded and never applied, and
the server answers as the base model would (vLLM 0.33 lora/lora_model.py `from_local_checkpoint`, lora/model_manager.py
`_get_lora_layer_weights`). So names are compared whole here.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.architecture import LM_HEAD, MTP_PREFIX, VISION_PREFIX, Architecture, Shape
from assemble.checkpoint import CheckpointError, TensorInfo, read_json, read_shard
from assemble.errors import InputError
from assemble.jsonfile import JSONFileError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM 0.23 to 0.33 config/lora.py MaxLoRARanks
MATRIX = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# Other kinds of adapters that PEFT's config declares: vLLM 0.33 lora/peft_helper.py `_validate_features`.
UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias in its matrices",
    "modules_to_save": "whole modules beside the adapter",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


class AdapterError(InputError):
    """A LoRA adapter that the checkpoint cannot be served with."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that fits a checkpoint.

    Attributes:
        name: What a request calls it.
        root: Its directory.
        rank: Its largest rank.
        experts: How it names routed experts: `split`, `fused`, or None where it has none.
        modules: Number of modules it adapts.
        base: The model it was trained on, as it says.
        warnings: What does not stop the server, but should be known.
    """

    name: str
    root: Path
    rank: int
    experts: str | None
    modules: int
    base: str | None
    warnings: tuple[str, ...]

    @property
    def least_max_rank(self) -> int:
        """The smallest `--max-lora-rank` that takes it."""
        return next(rank for rank in RANKS if rank >= self.rank)


def check_adapter(name: str, root: Path, architecture: Architecture, known_as: tuple[str, ...]) -> Adapter:
    """Reads an adapter and compares it with a checkpoint.

    Args:
        name: What a request is to call it.
        root: Its directory.
        architecture: The checkpoint's.
        known_as: Names that the checkpoint or the model it was made from goes by.

    Raises:
        AdapterError: it cannot be read, is of a kind that vLLM does not serve, or does not fit.
    """
    config, tensors = _read(root)
    ranks = _check_config(root, config)
    pairs = _pairs(root, tensors)
    experts: set[str] = set()
    for module, sides in pairs.items():
        layout = _check_module(root, module, sides, ranks, architecture)
        experts |= {layout} if layout else set()
    if len(experts) > 1:
        raise AdapterError(f"{root} names some routed experts one by one and others fused; vLLM takes one form at a time.")
    base = config.get("base_model_name_or_path")
    warnings = [*_base_differs(base, known_as), *_targets_missing(config.get("target_modules"), architecture)]
    warnings += [f"adapter {name}: {text}" for text in _idle(pairs)]
    largest = max([_rank(ranks, module) for module in pairs], default=0)
    return Adapter(name, root, largest, next(iter(experts), None), len(pairs), str(base) if base else None, tuple(warnings))


def _read(root: Path) -> tuple[dict[str, Any], tuple[TensorInfo, ...]]:
    if not root.is_dir():
        raise AdapterError(f"adapter {root} is not a directory. Give the one that holds {CONFIG} and {WEIGHTS}.")
    try:
        config = read_json(root, CONFIG)
        if config is None:
            raise AdapterError(f"{root} has no {CONFIG}, so it is not an adapter's directory.")
        if not (root / WEIGHTS).is_file():
            pickled = next((p.name for p in sorted(root.glob("adapter_model.*"))), None)
            also = f" {pickled} would have to be unpickled, which can run code: save the adapter again." if pickled else ""
            raise AdapterError(f"{root} has no {WEIGHTS}.{also}")
        return config, read_shard(root / WEIGHTS).tensors
    except (JSONFileError, CheckpointError) as error:
        raise AdapterError(f"{root}: {error}") from error


def _check_config(root: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuses kinds of adapters that vLLM does not serve.

    Returns:
        `r` and `rank_pattern`.
    """
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise AdapterError(f"{root / CONFIG}: peft_type is {config['peft_type']!r}; only LORA can be served.")
    found = [what for key, what in UNSUPPORTED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        found.append("trained biases")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        found.append(f"init_lora_weights {init!r}, which changes the base model's weights")
    if found:
        raise AdapterError(f"{root / CONFIG}: {found[0]}; vLLM does not serve that. Merge it into the model, or retrain.")
    rank, pattern = config.get("r"), config.get("rank_pattern") or {}
    values = [rank, *pattern.values()] if isinstance(pattern, dict) else []
    ranks = [value for value in values if type(value) is int and value > 0]
    if not ranks or len(ranks) < len(values):
        raise AdapterError(f"{root / CONFIG}: r and rank_pattern must be positive integers, found {rank!r} and {pattern!r}.")
    try:
        [re.compile(name) for name in pattern]
    except re.error as error:
        raise AdapterError(f"{root / CONFIG}: rank_pattern has {error.pattern!r}, which is no pattern: {error}") from error
    if max(ranks) > RANKS[-1]:
        raise AdapterError(f"{root / CONFIG}: rank {max(ranks)}, vLLM serves {RANKS[-1]} at most.")
    return {"r": rank, "rank_pattern": pattern}


def _pairs(root: Path, tensors: tuple[TensorInfo, ...]) -> dict[str, dict[str, Shape]]:
    """Module -> its matrices `A` and `B`."""
    pairs: dict[str, dict[str, Shape]] = defaultdict(dict)
    for tensor in tensors:
        match = MATRIX.fullmatch(tensor.name)
        if not match:
            raise AdapterError(
                f"{root / WEIGHTS}: {tensor.name} is no matrix of an adapter (….lora_A.weight or ….lora_B.weight)."
            )
        if len(tensor.shape) != 2:
            raise AdapterError(f"{root / WEIGHTS}: {tensor.name} has shape {list(tensor.shape)}, expected two dimensions.")
        pairs[match["module"]][match["side"]] = tensor.shape
    for module, sides in pairs.items():
        if set(sides) != {"A", "B"}:
            raise AdapterError(f"{root / WEIGHTS}: {module} has lora_{next(iter(sides))} only, expected lora_A and lora_B.")
    if not pairs:
        raise AdapterError(f"{root / WEIGHTS} holds no tensor.")
    return pairs


def _check_module(
    root: Path, module: str, sides: Mapping[str, Shape], ranks: Mapping[str, Any], architecture: Architecture
) -> str | None:
    """Compares one module's matrices with the checkpoint's weight.

    Returns:
        How it names a routed expert, or None for another module.
    """
    if module.startswith((MTP_PREFIX, VISION_PREFIX)):
        return None
    plain, rank = _plain(module, architecture), _rank(ranks, module)
    layout, wanted = _shapes(plain, rank, architecture)
    if not wanted:
        why = _front(module, architecture)
        raise AdapterError(f"{root / WEIGHTS}: adapts {module}, which the checkpoint does not have. {why}")
    found = (sides["A"], sides["B"])
    if found not in wanted:
        a, b = (list(shape) for shape in wanted[0])
        raise AdapterError(
            f"{root / WEIGHTS}: {module} has lora_A {list(found[0])} and lora_B {list(found[1])}, "
            f"expected {a} and {b} (rank {rank}). The adapter was trained on a model of another size."
        )
    return layout


def _shapes(module: str, rank: int, architecture: Architecture) -> tuple[str | None, list[tuple[Shape, Shape]]]:
    """The shapes of lora_A and lora_B that fit a module; none for a module that the checkpoint does not have."""
    if architecture.moe and module.endswith((".mlp.experts", ".mlp.experts.base_layer")):
        gate_up = module.endswith(".base_layer")
        shape = architecture.linear_modules.get(f"{module.removesuffix('.base_layer')}.0.gate_proj")
        if shape is None:
            return None, []
        inner, hidden = shape
        one, other = (2 * inner, hidden) if gate_up else (hidden, inner)
        all_ranks = rank * architecture.num_experts
        ends = [(one, other), (other, one)]  # PEFT takes a 3-D parameter's last axis or its middle one as the input
        return "fused", [((all_ranks, k), (n, all_ranks)) for n, k in ends]
    shape = architecture.linear_modules.get(module)
    if module == LM_HEAD or module.endswith(".embed_tokens"):
        shape = architecture.body_tensors.get(f"{module}.weight")
    layout = "split" if ".mlp.experts." in module else None
    return layout, [((rank, shape[1]), (shape[0], rank))] if shape else []


def _plain(module: str, architecture: Architecture) -> str:
    """A text-only class takes both spellings of its prefix (vLLM 0.33 models/qwen3_5.py `hf_to_vllm_mapper`)."""
    inner = "model.language_model."
    if not architecture.wrapped and module.startswith("model."):
        return architecture.prefix + module.removeprefix(inner if module.startswith(inner) else "model.")
    return module


def _front(module: str, architecture: Architecture) -> str:
    """What to do about a module that the checkpoint does not have."""
    inner = "model.language_model."
    whole = module if module.startswith(inner) else module.replace("model.", inner, 1)
    if architecture.wrapped and whole in architecture.linear_modules:
        return (
            f"It does have {whole}: the adapter was trained on the text-only class. vLLM would "
            f"load it and never apply it. Rename its tensors from model. to {inner}, or train on the whole model."
        )
    return "The adapter was trained on another model."


def _rank(ranks: Mapping[str, Any], module: str) -> int:
    """A module's rank: PEFT takes the first pattern that its name ends with, from a dot on, else `r`."""
    for pattern, rank in ranks["rank_pattern"].items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return int(ranks["r"])


def _base_differs(base: Any, known_as: tuple[str, ...]) -> list[str]:
    """A word when the adapter names a base that the checkpoint does not go by; names prove little, shapes decide."""
    if not isinstance(base, str) or not base:
        return ["the adapter does not say what it was trained on; only its shapes were compared"]
    last = Path(base).name.lower()
    if any(last in name.lower() for name in known_as if name):
        return []
    names = " or ".join(sorted({Path(name).name for name in known_as if name}))
    return [f"the adapter was trained on {base}, and this checkpoint goes by {names}; its shapes fit"]


def _targets_missing(targets: Any, architecture: Architecture) -> list[str]:
    """Names of `target_modules` that no module ends with; PEFT trains without them in silence, as vLLM serves."""
    if not isinstance(targets, list):
        return []  # a pattern, or all-linear: the tensors say what was adapted
    there = [*architecture.linear_modules, "model.embed_tokens", *(["mlp.experts"] if architecture.moe else [])]
    missing = [t for t in targets if not any(module == t or module.endswith(f".{t}") for module in there)]
    return [f"target_modules names {t!r}, which the checkpoint does not have" for t in missing]


def _idle(pairs: Mapping[str, Any]) -> list[str]:
    """Parts of an adapter that the server does not use."""
    vision = sum(module.startswith(VISION_PREFIX) for module in pairs)
    head = sum(module.startswith(MTP_PREFIX) for module in pairs)
    found = [f"{vision} modules of the vision tower are not used, the server runs without it"] if vision else []
    return found + ([f"{head} modules of the MTP head are not used, drafts come from the base model"] if head else [])

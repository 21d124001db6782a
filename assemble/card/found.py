"""Facts for the card of a checkpoint whose making no record tells, or that was changed since: what its files say themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assemble.architecture import MTP_PREFIX, read_architecture
from assemble.checkpoint import Checkpoint, TensorInfo, read_json
from assemble.formats import COMPANIONS, FP8, W4A16_NVFP4
from assemble.verify import Report

MAKING = ("model", "head", "recipe", "command", "calibration", "quantize", "packages")  # stay true whatever was mended later


def found_facts(root: Path, report: Report, earlier: Mapping[str, Any], mended: list[Any]) -> dict[str, Any]:
    """The card's facts of a checkpoint as it lies there.

    Args:
        root: The checkpoint.
        report: What verifying it, values included, has just found.
        earlier: The card's facts before it was changed; empty where there are none.
        mended: What `repair` and `splice` noted.
    """
    checkpoint = Checkpoint.open(root)
    architecture = read_architecture(checkpoint.config, checkpoint)
    quantization = checkpoint.config.get("quantization_config") or {}
    twin = (read_json(root, "hf_quant_config.json") or {}).get("quantization") or {}
    plan: dict[str, Any] = {
        "counts": {},
        "sizes": _sizes(checkpoint),
        "config_changes": [],
        "model_type": architecture.model_type,
        "text_only": not architecture.wrapped,
        "source_bytes": (earlier.get("plan") or {}).get("source_bytes"),
        "kv_fp8": bool(quantization.get("kv_cache_scheme") or twin.get("kv_cache_quant_algo")),
    }
    warnings = [f"{f.rule}: {f.where}: {f.found}" for f in report.warnings]
    return {
        **{key: earlier.get(key) for key in MAKING},
        "plan": plan,
        "verify": {"deep": True, "rules": len(report.rules), "warnings": warnings},
        "mended": [{key: note[key] for key in ("repair", "where", "remedy")} for note in mended],
        "plots": [],
    }


def _sizes(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Tensors and bytes a kind, by how the weight of each tensor's module is stored."""
    sizes: dict[str, dict[str, int]] = {}
    for tensor in checkpoint.values():
        entry = sizes.setdefault(_kind(tensor, checkpoint), {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return dict(sorted(sizes.items()))


def _kind(tensor: TensorInfo, checkpoint: Checkpoint) -> str:
    if tensor.name.startswith(MTP_PREFIX):
        return "MTP head"
    module, _, leaf = tensor.name.rpartition(".")
    weight = checkpoint.get(f"{module}.weight")
    if leaf in ("weight", *COMPANIONS) and weight is not None:
        return {"U8": W4A16_NVFP4, "F8_E4M3": FP8}.get(weight.dtype, "other")
    return "other"

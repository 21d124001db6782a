"""Rules that need the source checkpoint: what is not quantized is the source's, byte for byte, and what is, is close to it."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from assemble.architecture import MTP_PREFIX, fused_experts
from assemble.checkpoint import Checkpoint, TensorInfo
from assemble.dequantize import dequantize_fp8, dequantize_nvfp4
from assemble.formats import COMPANIONS, NVFP4, SCHEMES
from assemble.rules.model import Detail, Mend, Severity
from assemble.rules.modules import KV_SCALE
from assemble.rules.scan import Files
from assemble.rules.subject import EXPERTS, Subject

LEAST_COSINE = 0.99  # a healthy NVFP4 weight has 0.995, an FP8 one 0.9996
SAMPLED = 65_536  # elements of a module's weight, in whole rows spread over it
SAMPLED_OF_EXPERT = 8_192  # of one of hundreds in a layer
# What may differ between a source's config.json and the quantized one's.
MAY_DIFFER = {"quantization_config", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "tie_word_embeddings"}


def unquantized_identical(subject: Subject) -> Iterator[Detail]:
    """Q-13b: every tensor outside quantized modules is the source's, dtype, shape and bytes; none is new."""
    if subject.source is None:
        return
    yield from _identical(subject, subject.source, subject.unquantized_names)
    known = subject.source.keys()
    for name in subject.tensors:
        module, _, leaf = name.rpartition(".")
        if name in known or name.startswith(MTP_PREFIX) or KV_SCALE.search(name):
            continue
        if module not in subject.modules or leaf not in ("weight", *COMPANIONS):
            yield Detail(name, "stored", "absent: the source has no such tensor", mend=Mend.REPAIR)


def head_identical(subject: Subject) -> Iterator[Detail]:
    """MTP-3: every tensor of the head is, byte for byte, the one it was taken from."""
    origin = subject.head or subject.source
    if origin is not None:
        yield from _identical(subject, origin, [n for n in origin if n.startswith(MTP_PREFIX)])


def _identical(subject: Subject, origin: Checkpoint, names: list[str]) -> Iterator[Detail]:
    for name in names:
        mine, theirs = subject.tensors.get(name), origin[name]
        expected = f"{theirs.dtype} {list(theirs.shape)}, as in the source"
        if mine is None:
            yield Detail(name, "absent", expected)
        elif (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            yield Detail(name, f"{mine.dtype} {list(mine.shape)}", expected)
        elif (place := subject.facts[name].differs_at) is not None:
            yield Detail(name, f"differs from byte {place} of {mine.nbytes} on", "the source's bytes")


def norms_as_the_source(subject: Subject) -> Iterator[Detail]:
    """MTP-4: norm weights are copied raw; the (1 + w) convention of the family is not applied to the file."""
    for name in (n for n, f in subject.facts.items() if f.differs_at is not None and n.endswith("norm.weight")):
        origin = (subject.head or subject.source) if name.startswith(MTP_PREFIX) else subject.source
        mine, theirs = subject.tensors[name], origin[name] if origin and name in origin else None
        if origin is None or theirs is None or mine.nbytes != theirs.nbytes:
            continue
        shift = _numbers(subject.read(name), mine.dtype) - _numbers(origin.read(name), theirs.dtype)
        if shift.size and abs(abs(float(shift.mean())) - 1) < 0.02 and float(shift.std()) < 0.02:
            yield Detail(name, f"the source's values {float(shift.mean()):+.2f}", "the source's values")


def _numbers(data: bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}.get(dtype, "<u1")).astype(np.float32)


def config_of_the_source(subject: Subject) -> Iterator[Detail]:
    """CFG-12: every field of config.json but the quantization's is the source's."""
    if subject.source is None:
        return
    for path, mine, theirs in _differences(subject.config, subject.source.config, ""):
        key = path.rpartition(".")[2]
        added_head = key == "mtp_num_hidden_layers" and subject.has_head and not theirs
        if key not in MAY_DIFFER and not added_head:
            served = Severity.WARNING if mine is not None and theirs is None else None
            yield Detail(f"config.json: {path}", _short(mine), f"{_short(theirs)}, as in the source", served)


def _short(value: Any) -> str:
    return "absent" if value is None else repr(value)[:80]


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    for key in [*theirs, *(k for k in mine if k not in theirs)]:
        one, other, where = mine.get(key), theirs.get(key), f"{path}{key}"
        if key in MAY_DIFFER:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{where}.")
        elif one != other:
            yield where, one, other


def close_to_the_source(subject: Subject) -> Iterator[Detail]:
    """VAL-6: sampled rows of every quantized weight, dequantized, have cosine above 0.99 with the source's, and its size."""
    if subject.source is None:
        return
    scalars = subject.scalars(f"{m}.{leaf}" for m in subject.modules for leaf in ("weight_scale", "weight_scale_2"))
    with Files() as files:
        for module, scheme in subject.modules.items():
            place = _source_place(subject.source, module)
            weight = subject.tensors.get(f"{module}.weight")
            if scheme not in (*SCHEMES, NVFP4) or place is None or weight is None or len(weight.shape) != 2:
                continue
            tensor, first, rows = place
            sampled = SAMPLED_OF_EXPERT if f"{EXPERTS}." in module else SAMPLED
            chosen = _spread(min(rows, weight.shape[0]), sampled // max(1, tensor.shape[-1]))
            mine = _dequantized(subject, module, chosen, scalars, files)
            if mine is None:
                continue
            there = files.rows(subject.source.root, tensor, [first + r for r in chosen])
            truth = _numbers(there.tobytes(), tensor.dtype)
            if mine.size != truth.size:
                continue  # another shape, Q-2's and Q-3's
            yield from _judge(f"{module}.weight", mine.ravel().astype(np.float64), truth.astype(np.float64))


def _judge(name: str, mine: npt.NDArray[np.float64], truth: npt.NDArray[np.float64]) -> Iterator[Detail]:
    sizes = float(np.linalg.norm(mine)), float(np.linalg.norm(truth))
    if sizes[1] == 0:
        if sizes[0] != 0:
            yield Detail(name, "not zero", "zeros, as in the source")
        return
    cosine = float(mine @ truth) / (sizes[0] * sizes[1]) if sizes[0] else 0.0
    ratio = sizes[0] / sizes[1]
    if not cosine > LEAST_COSINE:
        yield Detail(name, f"cosine {cosine:.4f} with the source's", f"above {LEAST_COSINE}")
    elif not 0.9 < ratio < 1.1:
        yield Detail(name, f"{ratio:.3f} times the source's size", "0.9 to 1.1 times")


def _source_place(source: Checkpoint, module: str) -> tuple[TensorInfo, int, int] | None:
    """Where the source has the module's weight: a tensor, its first row there, and the number of rows."""
    if tensor := source.tensors.get(f"{module}.weight"):
        return (tensor, 0, tensor.shape[0]) if len(tensor.shape) == 2 else None
    expert, _, projection = module.partition(f"{EXPERTS}.")[2].partition(".")
    fused = source.tensors.get(fused_experts(module) or "")
    if fused is None or len(fused.shape) != 3 or not expert.isdigit() or int(expert) >= fused.shape[0]:
        return None
    rows = fused.shape[1] if projection == "down_proj" else fused.shape[1] // 2
    return fused, int(expert) * fused.shape[1] + (rows if projection == "up_proj" else 0), rows


def _spread(rows: int, count: int) -> list[int]:
    """`count` row numbers, evenly spread; the first and the last among them. The same for the same arguments."""
    count = min(rows, max(4, count))
    return sorted({round(i * (rows - 1) / max(1, count - 1)) for i in range(count)})


def _dequantized(
    subject: Subject, module: str, rows: list[int], scalars: Mapping[str, float], files: Files
) -> npt.NDArray[np.float32] | None:
    """Rows of a quantized weight as numbers, or None when its tensors are not what Q-2 and Q-3 ask for."""
    weight, scale = subject.tensors[f"{module}.weight"], subject.tensors.get(f"{module}.weight_scale")
    if weight.dtype == "F8_E4M3" and f"{module}.weight_scale" in scalars:
        return dequantize_fp8(files.rows(subject.root, weight, rows), scalars[f"{module}.weight_scale"])
    if weight.dtype != "U8" or scale is None or f"{module}.weight_scale_2" not in scalars:
        return None
    if scale.dtype != "F8_E4M3" or scale.shape != (weight.shape[0], weight.shape[1] // 8):
        return None
    codes = files.rows(subject.root, weight, rows)
    return dequantize_nvfp4(codes, files.rows(subject.root, scale, rows), scalars[f"{module}.weight_scale_2"])

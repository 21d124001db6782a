"""Rules about scales that need no more than a few bytes each: those that fused modules share, and the KV cache's."""

import math
from collections.abc import Iterator

from assemble.architecture import MTP_PREFIX, fused_group
from assemble.formats import FP8, NVFP4, W4A16_NVFP4
from assemble.resolution import kv_cache_dtype
from assemble.rules.model import Detail, Mend, Served, Severity
from assemble.rules.modules import KV_SCALE
from assemble.rules.subject import EXPERTS, Subject

W, INFO = Severity.WARNING, Severity.INFO


def _groups(subject: Subject, schemes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The fused groups whose members all have one of `schemes`."""
    groups = []
    for module, scheme in subject.modules.items():
        group = fused_group(module) if scheme in schemes else ()
        if group and module == group[0] and all(subject.modules.get(m) in schemes for m in group):
            groups.append(group)
    return groups


def _unequal(subject: Subject, groups: list[tuple[str, ...]], leaf: str) -> Iterator[tuple[tuple[str, ...], list[float]]]:
    """The groups whose members' `leaf` scalars differ, with the values."""
    values = subject.scalars(f"{member}.{leaf}" for group in groups for member in group)
    for group in groups:
        found = [values[name] for member in group if (name := f"{member}.{leaf}") in values]
        same = all(v == found[0] or (math.isnan(v) and math.isnan(found[0])) for v in found)
        if len(found) == len(group) and not same:
            yield group, found


def gate_up_share_scale(subject: Subject) -> Iterator[Detail]:
    """Q-6: the members of a fused NVFP4 group (gate and up, of each expert too) have the same `weight_scale_2`, bit for bit."""
    groups = _groups(subject, (W4A16_NVFP4, NVFP4))
    for group, found in _unequal(subject, groups, "weight_scale_2"):
        yield Detail(f"{group[0]}.weight_scale_2", " and ".join(f"{v:.6g}" for v in found), "equal in the fused group")


def input_scales_agree(subject: Subject) -> Iterator[Detail]:
    """Q-7: the members of a fused FP8 group (q/k/v, in_proj_qkv/z) have the same `input_scale`; they see the same input.

    Their `weight_scale` may differ: vLLM requantizes the weights to the largest, and ModelOpt does not unify them.
    """
    groups = _groups(subject, (FP8,))
    for group, found in _unequal(subject, groups, "input_scale"):
        yield Detail(f"{group[0]}.input_scale", " and ".join(f"{v:.6g}" for v in found), "equal in the fused group")


def kv_scales(subject: Subject) -> Iterator[Detail]:
    """Q-15: a full-attention layer has a k_scale and a v_scale or neither, F32 scalars, and kv_cache_scheme says FP8."""
    found: dict[str, set[str]] = {}
    for name, tensor in subject.tensors.items():
        if not KV_SCALE.search(name):
            continue
        found.setdefault(name.partition(".self_attn.")[0], set()).add(name[-7:])
        if tensor.dtype not in ("F32", "BF16", "F16") or tensor.shape not in ((), (1,)):
            yield Detail(name, f"{tensor.dtype} {list(tensor.shape)}", "an F32 scalar", Severity.ERROR, Served.LOUD)
        elif name.startswith(MTP_PREFIX):
            yield Detail(name, "a KV scale for the MTP head", "none: its KV cache runs at 1.0", served=Served.LOUD)
    for layer, leaves in found.items():
        if len(leaves) == 1:
            yield Detail(f"{layer}.self_attn", f"only {leaves.pop()}", "k_scale and v_scale, or neither")
    if found and kv_cache_dtype(subject.quantization) != "fp8_e4m3":
        layer = next(iter(found))
        yield Detail(f"{layer}.self_attn", "KV scales, though kv_cache_scheme is absent", "a kv_cache_scheme, or no scales")


def shapes_suit_kernels(subject: Subject) -> Iterator[Detail]:
    """Q-14: the model can be split over the GPUs asked for, and its NVFP4 shapes need no padding in Marlin."""
    text, parts = subject.architecture.text, subject.tensor_parallel
    for key in ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"):
        value = text.get(key)
        if type(value) is int and value % parts:
            yield Detail(f"config.json: {key}", f"{value}, not divisible by {parts}", f"a multiple of --tp {parts}")
    heads = text.get("num_key_value_heads")
    if type(heads) is int and heads > 0 and heads % parts and parts % heads:
        yield Detail("config.json: num_key_value_heads", f"{heads}", f"one that divides --tp {parts}, or is divided by it")
    for module, shape in subject.architecture.linear_modules.items():
        rows, columns = shape
        if subject.modules.get(module) not in (W4A16_NVFP4, NVFP4):
            continue
        if module.endswith((".down_proj", ".o_proj", ".out_proj")):
            if columns % (16 * parts):
                yield Detail(f"{module}.weight", f"{columns} columns over {parts} GPUs", "a multiple of 16 each")
            columns //= parts
        else:
            rows = -(-rows // parts)
        padded = rows % 64 or columns % 64 or (rows % 128 and columns % 128)
        if padded and f"{EXPERTS}." not in module and module != "lm_head":
            text_ = f"[{rows}, {columns}] on a GPU"
            expected = "multiples of 64, one of them of 128: Marlin pads others"
            yield Detail(f"{module}.weight", text_, expected, INFO, Served.WORSE, Mend.NOTHING)

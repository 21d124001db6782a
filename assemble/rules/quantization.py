"""Rules about what the two config files say of the quantization."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from assemble.config import KV_FP8
from assemble.formats import BLOCK, FP8, NVFP4, W4A16_NVFP4
from assemble.resolution import algorithm, kv_cache_dtype, plain_algorithm
from assemble.rules.model import Detail, Mend, Served, Severity
from assemble.rules.subject import Subject

W, INFO = Severity.WARNING, Severity.INFO
TWIN = "hf_quant_config.json"
Q = "config.json: quantization_config"


def quantization_declared(subject: Subject) -> Iterator[Detail]:
    """CFG-6: config.json itself says how the checkpoint is quantized, in ModelOpt's words."""
    q = subject.quantization
    if subject.plainly_unquantized:
        text = "no quantization_config and no quantized tensor: a BF16 checkpoint"
        yield Detail("the checkpoint", text, "a quantized one", served=Served.WORSE, mend=Mend.MAKE)
        return
    plain, producer = plain_algorithm(q), q.get("producer")
    mixed = str(q.get("quant_algo")).upper() == "MIXED_PRECISION"
    layers = q.get("quantized_layers")
    for key, found, good, expected in (
        ("quant_method", q.get("quant_method"), str(q.get("quant_method")).lower().startswith("modelopt"), "'modelopt'"),
        ("quant_algo", q.get("quant_algo"), mixed or bool(plain), "'MIXED_PRECISION'"),
        (
            "quantized_layers",
            type(layers).__name__,
            bool(plain) or (isinstance(layers, dict) and bool(layers)),
            "a non-empty map",
        ),
        ("ignore", type(q.get("ignore")).__name__, q.get("ignore") is None or isinstance(q.get("ignore"), list), "a list"),
        ("producer", producer, isinstance(producer, dict) and producer.get("name") == "modelopt", "{'name': 'modelopt', …}"),
    ):
        if not good:
            spare = key == "producer" or (key == "quantized_layers" and bool(subject.effective.get(key)))
            yield Detail(f"{Q}.{key}", repr(found)[:80], expected, served=Served.WORSE if spare and q else None)
    if q and q.get("ignore") is None:
        yield Detail(f"{Q}.ignore", "absent", "a list, be it empty", W, Served.WORSE)


def twins_agree(subject: Subject) -> Iterator[Detail]:
    """CFG-7: hf_quant_config.json says exactly what config.json says."""
    if TWIN in subject.unread:
        yield Detail(TWIN, subject.unread[TWIN], "a JSON object")
        return
    if subject.plainly_unquantized:
        return  # CFG-6's
    twin, q = subject.hf_quant_config, subject.quantization
    if twin is None:
        yield Detail(TWIN, "absent", "the twin of config.json's quantization_config", W)
        return
    inner = twin.get("quantization")
    if not isinstance(inner, dict):
        yield Detail(f"{TWIN}: quantization", type(inner).__name__, "an object")
        return
    for key in ("quant_algo", "quantized_layers"):
        if q.get(key) != inner.get(key):
            yield Detail(f"{TWIN}: quantization.{key}", _difference(inner.get(key), q.get(key)), "equal to config.json's")
    mine, theirs = q.get("ignore"), inner.get("exclude_modules")
    if _as_set(mine) != _as_set(theirs):
        yield Detail(f"{TWIN}: quantization.exclude_modules", _difference(theirs, mine), "config.json's ignore")
    kv = inner.get("kv_cache_quant_algo")
    if kv_cache_dtype(q) == "fp8_e4m3" and kv != "FP8":
        yield Detail(f"{TWIN}: quantization.kv_cache_quant_algo", repr(kv)[:80], "'FP8', as in config.json", W)


def _as_set(value: Any) -> set[str]:
    return {str(v) for v in value} if isinstance(value, list) else set()


def _difference(found: Any, other: Any) -> str:
    if isinstance(found, dict) and isinstance(other, dict):
        keys = sorted(k for k in found.keys() | other.keys() if found.get(k) != other.get(k))
        return f"{len(keys)} entries differ, {keys[0]} among them" if keys else "equal"
    if isinstance(found, list) and isinstance(other, list):
        odd = sorted(_as_set(found) ^ _as_set(other))
        return f"{len(odd)} entries differ, {odd[0]} among them" if odd else "equal"
    return repr(found)[:80]


def kv_cache_scheme(subject: Subject) -> Iterator[Detail]:
    """CFG-8: an FP8 KV cache is declared in config.json, the one way that vLLM understands."""
    q = subject.quantization
    found, inner = q.get("kv_cache_scheme"), (subject.hf_quant_config or {}).get("quantization")
    where, expected = f"{Q}.kv_cache_scheme", repr(KV_FP8)
    if found is None and q:
        twin = inner.get("kv_cache_quant_algo") if isinstance(inner, dict) else None
        if twin:
            yield Detail(where, f"absent, though {TWIN} says {twin!r:.40}", expected, W)
        else:
            yield Detail(where, "absent in both config files: the KV cache is BF16", expected, INFO)
    elif found is not None and (kv_cache_dtype(q) != "fp8_e4m3" or not isinstance(found, Mapping)):
        yield Detail(where, repr(found)[:120], expected)


def known_schemes(subject: Subject) -> Iterator[Detail]:
    """CFG-9: every entry of quantized_layers has an algorithm of this recipe, and block size 16."""
    if subject.plain:
        size = subject.quantization.get("group_size", BLOCK)
        if size not in (BLOCK, str(BLOCK)):
            yield Detail(f"{Q}.group_size", repr(size)[:80], str(BLOCK))
        if subject.plain not in (FP8, NVFP4, W4A16_NVFP4):
            yield Detail(f"{Q}.quant_algo", subject.plain, "FP8, NVFP4 or W4A16_NVFP4: this book does not know the others", W)
        return
    layers = subject.effective.get("quantized_layers")
    for module, entry in layers.items() if isinstance(layers, dict) else ():
        algo, where = algorithm(entry), f"quantized_layers[{module}]"
        if not isinstance(entry, dict) or algo not in (FP8, W4A16_NVFP4, NVFP4):
            yield Detail(where, repr(entry)[:80], f"{FP8} or {W4A16_NVFP4}")
        elif algo == NVFP4:
            yield Detail(where, "NVFP4: activations in four bits too", f"{W4A16_NVFP4}, of this recipe", W, Served.WORSE)
        if isinstance(entry, dict) and algo in (NVFP4, W4A16_NVFP4) and entry.get("group_size", BLOCK) != BLOCK:
            found = repr(entry.get("group_size"))[:80]
            yield Detail(f"{where}.group_size", found, str(BLOCK), served=Served.SILENT)


def config_groups_agree(subject: Subject) -> Iterator[Detail]:
    """CFG-10: the targets of config_groups are the keys of quantized_layers, each once, under the right number of bits."""
    groups = subject.quantization.get("config_groups")
    if subject.plain or groups is None:
        return
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        yield Detail(f"{Q}.config_groups", type(groups).__name__, "an object of groups")
        return
    seen: Counter[str] = Counter()
    for name, group in groups.items():
        targets = [str(t) for t in group.get("targets", [])] if isinstance(group.get("targets", []), list) else []
        seen.update(targets)
        yield from _group(subject, f"{Q}.config_groups.{name:.40}", group, targets)
    wrong = sorted((seen.keys() ^ subject.listed.keys()) | {t for t, count in seen.items() if count > 1})
    if wrong:
        yield Detail(
            f"{Q}.config_groups", f"{len(wrong)} targets absent, extra or doubled, {wrong[0]} among them", "quantized_layers"
        )


def _group(subject: Subject, where: str, group: Mapping[str, Any], targets: list[str]) -> Iterator[Detail]:
    weights = group.get("weights")
    bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
    wrong = [t for t in targets if t in subject.listed and bits != (8 if subject.listed[t] == FP8 else 4)]
    if wrong:
        yield Detail(f"{where}.weights", f"{bits!r:.40} bits for {wrong[0]}", f"what {subject.listed[wrong[0]]} has")
    if group.get("input_activations") is not None and any(subject.listed.get(t) == W4A16_NVFP4 for t in targets):
        yield Detail(f"{where}.input_activations", "given for a weight-only format", "absent", INFO, mend=Mend.NOTHING)

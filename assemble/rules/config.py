"""Rules about config.json and hf_quant_config.json."""

from collections.abc import Iterator, Mapping
from typing import Any

from assemble.architecture import LM_HEAD, MTP_PREFIX
from assemble.config import KV_FP8
from assemble.formats import BLOCK, FP8, W4A16_NVFP4
from assemble.rules.model import Detail, Subject


def dtype_bfloat16(subject: Subject) -> Iterator[Detail]:
    """CFG-2: dtype bfloat16 at the top or in text_config."""
    places = (subject.config, subject.architecture.text)
    stated = [p[k] for p in places for k in ("dtype", "torch_dtype") if k in p]
    if not stated or any(value != "bfloat16" for value in stated):
        yield "config.json: dtype", repr(stated[0]) if stated else "absent", "'bfloat16'"


def untied(subject: Subject) -> Iterator[Detail]:
    """CFG-3: a stored lm_head and tie_word_embeddings exclude each other."""
    stored = any(name.startswith(f"{LM_HEAD}.") for name in subject.tensors)
    if stored and subject.architecture.tied:
        yield "config.json: tie_word_embeddings", "true", "false at the top and in text_config (lm_head is stored)"
    if not stored and not subject.architecture.tied:
        yield f"{LM_HEAD}.weight", "absent", "present (tie_word_embeddings is false)"


def mtp_declared(subject: Subject) -> Iterator[Detail]:
    """CFG-4: text_config declares the head that is stored."""
    stored = any(name.startswith(MTP_PREFIX) for name in subject.tensors)
    if stored and subject.architecture.num_mtp_layers < 1:
        value = subject.architecture.text.get("mtp_num_hidden_layers")
        where = "text_config.mtp_num_hidden_layers" if subject.architecture.wrapped else "mtp_num_hidden_layers"
        yield f"config.json: {where}", repr(value), "1"


def quantization_declared(subject: Subject) -> Iterator[Detail]:
    """CFG-6: config.json itself says how the checkpoint is quantized."""
    q = subject.quantization
    producer = q.get("producer")
    for key, found, good in (
        ("quant_method", q.get("quant_method"), q.get("quant_method") == "modelopt"),
        ("quant_algo", q.get("quant_algo"), q.get("quant_algo") == "MIXED_PRECISION"),
        ("quantized_layers", type(q.get("quantized_layers")).__name__, bool(subject.schemes)),
        ("ignore", type(q.get("ignore")).__name__, isinstance(q.get("ignore"), list)),
        ("producer", producer, isinstance(producer, dict) and producer.get("name") == "modelopt"),
    ):
        if not good:
            yield f"config.json: quantization_config.{key}", repr(found), "as the recipe's checkpoints have it"


def twins_agree(subject: Subject) -> Iterator[Detail]:
    """CFG-7: hf_quant_config.json says exactly what config.json says."""
    file = "hf_quant_config.json"
    twin = subject.hf_quant_config
    if twin is None:
        yield file, "absent", "the twin of config.json's quantization_config"
        return
    inner, q = twin.get("quantization"), subject.quantization
    if not isinstance(inner, dict):
        yield f"{file}: quantization", type(inner).__name__, "an object"
        return
    for mine, theirs in (("quant_algo", "quant_algo"), ("quantized_layers", "quantized_layers")):
        if q.get(mine) != inner.get(theirs):
            yield (
                f"{file}: quantization.{theirs}",
                _difference(inner.get(theirs), q.get(mine)),
                "equal to config.json's",
            )
    excluded = inner.get("exclude_modules")
    if sorted(map(str, excluded if isinstance(excluded, list) else [])) != sorted(subject.ignore):
        yield f"{file}: quantization.exclude_modules", _difference(excluded, q.get("ignore")), "config.json's ignore"
    kv = inner.get("kv_cache_quant_algo")
    if (kv == "FP8") != (q.get("kv_cache_scheme") == KV_FP8):
        yield (
            f"{file}: quantization.kv_cache_quant_algo",
            repr(kv),
            f"what config.json says: {q.get('kv_cache_scheme')}",
        )


def _difference(found: Any, other: Any) -> str:
    if isinstance(found, dict) and isinstance(other, dict):
        keys = sorted(k for k in found.keys() | other.keys() if found.get(k) != other.get(k))
        return f"{len(keys)} entries differ, {keys[0]} among them" if keys else "equal"
    if isinstance(found, list) and isinstance(other, list):
        return f"{len(found)} entries against {len(other)}"
    return repr(found)


def kv_cache_scheme(subject: Subject) -> Iterator[Detail]:
    """CFG-8: the FP8 KV cache is declared the one way that vLLM understands."""
    found = subject.quantization.get("kv_cache_scheme")
    dynamic = found.get("dynamic") if isinstance(found, Mapping) else None
    if found != KV_FP8 or dynamic is not False:
        yield "config.json: quantization_config.kv_cache_scheme", repr(found), repr(KV_FP8)


def known_schemes(subject: Subject) -> Iterator[Detail]:
    """CFG-9: every listed algorithm is one of the recipe's, with block size 16."""
    layers = subject.quantization.get("quantized_layers")
    for module, entry in layers.items() if isinstance(layers, dict) else ():
        scheme = subject.schemes[module]
        if scheme not in (FP8, W4A16_NVFP4):
            yield f"quantized_layers[{module}]", repr(entry), f"{FP8} or {W4A16_NVFP4}"
        elif scheme == W4A16_NVFP4 and entry.get("group_size") != BLOCK:
            yield f"quantized_layers[{module}].group_size", repr(entry.get("group_size")), str(BLOCK)

"""Repairs of config.json and hf_quant_config.json: the two say what is stored, and the same thing."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from assemble.architecture import LM_HEAD, experts_container
from assemble.config import hf_quant_config, quantization_config
from assemble.errors import InputError
from assemble.mend.draft import Draft
from assemble.mend.found import CONFIG, TWIN
from assemble.plan import module_order, natural

QUANTIZATION = "quantization_config"
FREE = (
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "mtp_num_hidden_layers",
    QUANTIZATION,
)
UNKNOWN_VERSION = "unknown"


class OtherRecipeError(InputError):
    """A checkpoint that is not of this recipe: there is nothing to compare it with."""


def readable(draft: Draft) -> None:
    """config.json can be read, or the source's takes its place.

    Raises:
        InputError: it cannot, and there is no source.
    """
    if draft.found.config is None:
        why = draft.found.broken.get(CONFIG, "absent")
        if draft.source is None:
            raise InputError(f"{draft.found.root}: {CONFIG}: {why}. Give --source, whose config.json can take its place.")
        draft.config = copy.deepcopy(dict(draft.source.config))
        draft.mend(CONFIG, why, "the source's, with quantization_config")
    if TWIN in draft.found.broken:
        draft.mend(TWIN, draft.found.broken[TWIN], "made anew from config.json")


def this_recipe(draft: Draft) -> None:
    """Refuses a checkpoint of another recipe, whose config would have to say something else.

    Raises:
        OtherRecipeError: both configs agree on another `quant_algo` than MIXED_PRECISION; or nothing is quantized.
    """
    places = (draft.quantization, draft.twin_quantization)
    stated = {str(place["quant_algo"]) for place in places if place.get("quant_algo")}
    if stated and "MIXED_PRECISION" not in stated and not any(place.get("quantized_layers") for place in places):
        raise OtherRecipeError(
            f"{draft.found.root} is quantized by another recipe (quant_algo {', '.join(sorted(stated))}); "
            "only MIXED_PRECISION checkpoints of W4A16_NVFP4 and FP8 modules can be repaired. `splice` works on any."
        )
    if not any(t.dtype in ("U8", "F8_E4M3") for copies in draft.found.copies.values() for t in copies):
        raise OtherRecipeError(f"{draft.found.root} holds no quantized weight: it is a BF16 checkpoint. Quantize it instead.")


def source_fields(draft: Draft) -> None:
    """Every field that is not about quantization is the source's."""
    if draft.source is None or draft.found.config is None:
        return
    free = FREE if f"{LM_HEAD}.weight" in draft.tensors else tuple(k for k in FREE if k != "tie_word_embeddings")
    for path, mine, theirs in list(_differences(draft.config, draft.source.config, free)):
        place = draft.config
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = copy.deepcopy(theirs)
        draft.mend(f"{CONFIG}: {'.'.join(path)}", "absent" if mine is _ABSENT else repr(mine), "the source's value")
    draft.settle()


_ABSENT = object()


def _differences(
    mine: Mapping[str, Any], source: Mapping[str, Any], free: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Fields of the source that are absent or different here, one level into `text_config` and its like."""
    for key, theirs in source.items():
        value = mine.get(key, _ABSENT)
        if key in free or value == theirs:
            continue
        if isinstance(theirs, dict) and isinstance(value, dict):
            for inner, good in theirs.items():
                found = value.get(inner, _ABSENT)
                if inner not in free and found != good:
                    yield (key, inner), found, good
        else:
            yield (key,), value, theirs


def bfloat16(draft: Draft) -> None:
    """Dtype is bfloat16 wherever it is stated, and it is stated."""
    stated = [(p, k) for p in (draft.config, draft.text) for k in ("dtype", "torch_dtype") if p.get(k) is not None]
    for place, key in stated:
        if place[key] != "bfloat16":
            draft.mend(f"{CONFIG}: {key}", repr(place[key]), "'bfloat16'")
            place[key] = "bfloat16"
    if not stated:
        draft.config["dtype"] = "bfloat16"
        draft.mend(f"{CONFIG}: dtype", "absent", "'bfloat16'")


def untied(draft: Draft) -> None:
    """With an lm_head of its own, no flag ties it to the embedding."""
    if f"{LM_HEAD}.weight" not in draft.tensors:
        return
    for where, place in (("tie_word_embeddings", draft.config), ("text_config.tie_word_embeddings", draft.text)):
        if place.get("tie_word_embeddings"):
            place["tie_word_embeddings"] = False
            draft.mend(f"{CONFIG}: {where}", "true, though lm_head is stored", "false")
    draft.settle()


def stored_schemes(draft: Draft) -> dict[str, str]:
    """What is stored packed, by the names `quantized_layers` uses: a layer's experts are one entry."""
    schemes: dict[str, str] = {}
    for module in sorted(draft.modules, key=module_order):
        scheme, key = draft.scheme(module), experts_container(module)
        if scheme is not None and schemes.setdefault(key, scheme) != scheme:
            draft.cannot(key, "experts of one layer stored in different formats", "one format")
    return schemes


def quantization_declared(draft: Draft) -> None:
    """config.json has a `quantization_config` that lists what is stored packed, and nothing else, with FP8 KV."""
    schemes = stored_schemes(draft)
    version = _version(draft)
    good = quantization_config(schemes, [], version)
    found = draft.config.get(QUANTIZATION)
    q = dict(draft.quantization)
    if not isinstance(found, dict):
        draft.mend(f"{CONFIG}: {QUANTIZATION}", "absent" if found is None else repr(found), "made from what is stored")
    for key in ("quant_method", "quant_algo", "kv_cache_scheme"):
        if q.get(key) != good[key] or (key == "kv_cache_scheme" and q[key].get("dynamic") is not False):
            _field(draft, q, key, good[key], isinstance(found, dict))
    producer = q.get("producer")
    if not isinstance(producer, dict) or producer.get("name") != "modelopt":
        _field(draft, q, "producer", good["producer"], isinstance(found, dict))
    _listing(draft, q, "quantized_layers", good["quantized_layers"], CONFIG)
    if _targets(q.get("config_groups")) != schemes.keys():
        _field(draft, q, "config_groups", good["config_groups"], isinstance(found, dict))
    if q != found:
        q = {key: q[key] for key in (*good, *q) if key in q}
        draft.config[QUANTIZATION] = q


def _field(draft: Draft, q: dict[str, Any], key: str, good: Any, noted: bool) -> None:
    if noted:
        old = "absent" if key not in q else repr(q[key]) if len(repr(q[key])) < 80 else "something else"
        draft.mend(f"{CONFIG}: {QUANTIZATION}.{key}", old, repr(good) if len(repr(good)) < 80 else "made anew")
    q[key] = good


def _listing(draft: Draft, place: dict[str, Any], key: str, good: dict[str, Any], file: str) -> None:
    layers = place.get(key)
    old = layers if isinstance(layers, dict) else {}
    if layers == good:
        return
    place[key] = good
    if not old:
        draft.mend(f"{file}: {key}", "absent or empty", f"{len(good)} entries, from what is stored")
    for module in sorted(old.keys() | good.keys(), key=natural) if old else ():
        if old.get(module) != good.get(module):
            what = f"listed as {old[module]!r}" if module in old else "not listed"
            draft.mend(f"{file}: {key}[{module}]", what, _stored(good.get(module)))


def _stored(entry: Any) -> str:
    return f"{entry['quant_algo']}, as it is stored" if entry else "unlisted: it is not stored packed"


def _targets(groups: Any) -> set[str]:
    """Every target of `config_groups`; with an empty name in it where the groups cannot be read."""
    if not isinstance(groups, dict):
        return {""}
    lists = [g.get("targets") if isinstance(g, dict) else None for g in groups.values()]
    return {str(t) for targets in lists for t in (targets if isinstance(targets, list) else [""])}


def _version(draft: Draft) -> str:
    for place in (draft.quantization, draft.twin):
        producer = place.get("producer")
        if isinstance(producer, dict) and isinstance(producer.get("version"), str):
            return str(producer["version"])
    return UNKNOWN_VERSION


def twins_agree(draft: Draft) -> None:
    """hf_quant_config.json says what config.json says, in its own words."""
    q = draft.config[QUANTIZATION]
    schemes = {m: str(e["quant_algo"]) for m, e in q["quantized_layers"].items()}
    good = hf_quant_config(schemes, q["ignore"], _version(draft))
    if not draft.twin_quantization:
        draft.twin = good
        draft.mend(TWIN, "absent" if draft.found.twin is None else "no object `quantization` in it", "made from config.json")
        return
    inner = draft.twin["quantization"]
    for key, value in good["quantization"].items():
        if key == "quantized_layers":
            _listing(draft, inner, key, value, TWIN)
        elif _meaning(inner.get(key)) != _meaning(value):
            draft.mend(f"{TWIN}: {key}", _short(inner.get(key)), f"{_short(value)}, as config.json says")
            inner[key] = value
    if not isinstance(draft.twin.get("producer"), dict):
        draft.twin["producer"] = good["producer"]
        draft.mend(f"{TWIN}: producer", "absent", "modelopt")


def _meaning(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, list) else value


def _short(value: Any) -> str:
    return "absent" if value is None else f"{len(value)} entries" if isinstance(value, list) else repr(value)

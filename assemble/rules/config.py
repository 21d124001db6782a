"""Rules about what config.json says of the model."""

from collections.abc import Iterator, Mapping
from typing import Any

from assemble.architecture import LM_HEAD, ConfigError
from assemble.resolution import tied_by_vllm
from assemble.rules.model import Detail, Mend, Served, Severity
from assemble.rules.subject import Subject

E, W = Severity.ERROR, Severity.WARNING


def family(subject: Subject) -> Iterator[Detail]:
    """CFG-1: architectures and all model_type fields name the same member of the Qwen3.5 family."""
    if "config.json" in subject.unread:
        yield Detail("config.json", subject.unread["config.json"], "a config of this family", mend=Mend.FETCH)
        return
    if isinstance(subject.known, ConfigError):
        if subject.known.rule == "CFG-1":
            yield Detail("config.json", str(subject.known), "a config of this family")
        return
    kind, text, vision = subject.known.model_type, subject.known.text, subject.config.get("vision_config")
    inner = text.get("model_type")
    if inner != f"{kind}_text" and (subject.known.wrapped or inner != kind):
        yield Detail("config.json: text_config.model_type", repr(inner)[:80], repr(f"{kind}_text"))
    if not subject.known.wrapped:
        needs = "vLLM 0.27 or newer (0.32 and 0.33 have the class, 0.22 to 0.26 do not)"
        yield Detail(
            "config.json: architectures", f"the text-only {subject.config['architectures'][0]}", needs, W, mend=Mend.NOTHING
        )
    elif not isinstance(vision, Mapping):
        yield Detail("config.json: vision_config", "absent", "the source's, since the class has a vision tower")
    elif vision.get("model_type") not in (kind, f"{kind}_vision"):
        yield Detail(
            "config.json: vision_config.model_type",
            repr(vision.get("model_type"))[:80],
            repr(f"{kind}_vision"),
            served=Served.WORSE,
        )


def dtype_bfloat16(subject: Subject) -> Iterator[Detail]:
    """CFG-2: dtype (or torch_dtype) is bfloat16, at the top or in text_config, and nothing else is said beside it."""
    places = (subject.config, subject.architecture.text)
    stated = [p[k] for p in places for k in ("dtype", "torch_dtype") if k in p]
    if not stated or any(value != "bfloat16" for value in stated):
        yield Detail("config.json: dtype", repr(stated)[:80] if stated else "absent", "'bfloat16'")


def untied(subject: Subject) -> Iterator[Detail]:
    """CFG-3: lm_head is stored exactly when tie_word_embeddings is false, at the top and in text_config."""
    stored = any(name.startswith(f"{LM_HEAD}.") for name in subject.tensors)
    tied = tied_by_vllm(subject.config, subject.architecture.text, stored=f"{LM_HEAD}.weight" in subject.tensors)
    if tied["0.26"] and (stored or LM_HEAD in subject.listed):
        places = {"at the top": subject.config, "in text_config": subject.architecture.text}
        where = " and ".join(place for place, config in places.items() if config.get("tie_word_embeddings"))
        ties = "every vLLM ties" if tied["0.32"] else "vLLM 0.26 and older tie"
        served = Served.SILENT if tied["0.32"] else Served.LOUD
        yield Detail("config.json: tie_word_embeddings", f"true {where}: {ties}", "false: lm_head is stored", served=served)
    if not stored and not subject.architecture.tied:
        yield Detail(f"{LM_HEAD}.weight", "absent", "present (tie_word_embeddings is false)", mend=Mend.REPAIR_FROM_SOURCE)


def mtp_declared(subject: Subject) -> Iterator[Detail]:
    """CFG-4: text_config.mtp_num_hidden_layers declares the MTP head that is stored, there and nowhere else."""
    architecture = subject.architecture
    inner, top = architecture.text.get("mtp_num_hidden_layers"), subject.config.get("mtp_num_hidden_layers")
    where = f"config.json: {'text_config.' if architecture.wrapped else ''}mtp_num_hidden_layers"
    if subject.has_head and architecture.num_mtp_layers < 1:
        yield Detail(where, repr(inner)[:80], "the number of layers of the stored head (1 in this family)")
    elif inner is not None and (type(inner) is not int or inner < 0):
        yield Detail(where, repr(inner)[:80], "an integer")
    if architecture.wrapped and top is not None:
        yield Detail(
            "config.json: mtp_num_hidden_layers", f"{top!r:.80} at the top level", "only in text_config", W, Served.WORSE
        )


def mtp_stored(subject: Subject) -> Iterator[Detail]:
    """CFG-5: an MTP head that is declared is stored; with --require-mtp a head is declared and stored."""
    if subject.has_head:
        return
    if subject.architecture.num_mtp_layers >= 1 or subject.require_mtp:
        severity = E if subject.require_mtp else W
        yield Detail("mtp.*", "no tensor of an MTP head", "the head that mtp_num_hidden_layers declares", severity)


def consistent_sizes(subject: Subject) -> Iterator[Detail]:
    """CFG-11: layer_types, vocab_size, the vision tower's output and the head counts fit each other and the tensors."""
    if isinstance(subject.known, ConfigError):
        if subject.known.rule == "CFG-11":
            yield Detail("config.json", str(subject.known), "the source's value")
        return
    text, vocab = subject.known.text, subject.known.text.get("vocab_size")
    for name in (f"{subject.known.prefix}embed_tokens.weight", f"{LM_HEAD}.weight"):
        tensor = subject.tensors.get(name)
        if tensor and tensor.shape[:1] != (vocab,):
            yield Detail(name, f"{tensor.shape[0] if tensor.shape else 'no'} rows", f"{vocab}, config.json's vocab_size")
    yield from _vision(subject)
    if text.get("mamba_ssm_dtype", "float32") != "float32":
        yield Detail("config.json: mamba_ssm_dtype", repr(text["mamba_ssm_dtype"])[:80], "'float32'", W, Served.SILENT)
    for part, whole in (
        ("num_key_value_heads", "num_attention_heads"),
        ("linear_num_key_heads", "linear_num_value_heads"),
        *([("num_experts_per_tok", "num_experts")] if subject.known.moe else []),
    ):
        if not _fits(text.get(part), text.get(whole), divides=part != "num_experts_per_tok"):
            yield Detail(f"config.json: {part}", repr(text.get(part))[:80], f"one that fits {whole}, {text.get(whole)!r:.80}")


def _vision(subject: Subject) -> Iterator[Detail]:
    vision = subject.config.get("vision_config")
    if not isinstance(vision, Mapping) or not subject.architecture.wrapped:
        return
    hidden, out = subject.architecture.text.get("hidden_size"), vision.get("out_hidden_size")
    if out != hidden:
        yield Detail("config.json: vision_config.out_hidden_size", repr(out)[:80], f"{hidden}, hidden_size")
    for key in ("image_token_id", "video_token_id"):
        if type(subject.config.get(key)) is not int:
            yield Detail(f"config.json: {key}", repr(subject.config.get(key))[:80], "the token's number, at the top level")


def _fits(part: Any, whole: Any, *, divides: bool) -> bool:
    if type(part) is not int or type(whole) is not int or not 0 < part <= whole:
        return False
    return whole % part == 0 if divides else True

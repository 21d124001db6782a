"""What a config.json implies: the decoder's modules and shapes, the groups vLLM fuses, the MTP head's tensors.

The family: three of four decoder layers are Gated DeltaNet ("linear_attention"), one is full attention with an output
gate (so q_proj has twice the rows). A published checkpoint wraps the decoder with a vision tower
(`Qwen3_5ForConditionalGeneration`, names under `model.language_model.`); a text-only one does not
(`Qwen3_5ForCausalLM`, names under `model.`, or still under `model.language_model.`).

A mixture of experts (`qwen3_5_moe`) replaces each MLP by a router (`mlp.gate`), E routed experts, one shared expert and its
gate. The routed experts are stored in one of two layouts: fused, two 3-D tensors a layer (as published), or split, three
2-D tensors an expert (as transformers 5 saves them, and as every quantized checkpoint has them). The MTP head has a layout
of its own.

Shapes: transformers 5.14 models/qwen3_5/modeling_qwen3_5.py, models/qwen3_5_moe/modeling_qwen3_5_moe.py; the head's:
vLLM 0.33 models/qwen3_5_mtp.py.
"""

import dataclasses
import functools
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from assemble.errors import InputError

DENSE = "qwen3_5"
MOE = "qwen3_5_moe"
WRAPPED_CLASS = {DENSE: "Qwen3_5ForConditionalGeneration", MOE: "Qwen3_5MoeForConditionalGeneration"}
TEXT_CLASS = {DENSE: "Qwen3_5ForCausalLM", MOE: "Qwen3_5MoeForCausalLM"}
VISION_PREFIX = "model.visual."
MTP_PREFIX = "mtp."
LM_HEAD = "lm_head"

# vLLM 0.33 models/qwen3_5.py and models/qwen3_vl.py, packed_modules_mapping: one parameter in vLLM, several modules here.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_GROUP = {member: members for members in FUSED.values() for member in members}

# What no model of the family comes near; a config.json beyond it is refused before its tensors are listed.
LIMITS = {"num_hidden_layers": 1000, "num_experts": 8192, "mtp_num_hidden_layers": 16}
TENSOR_LIMIT = 1_000_000
EXPERT = re.compile(r"\.mlp\.experts\.\d")

Shape = tuple[int, ...]


class ConfigError(InputError):
    """A config.json that does not describe a model of this family. `rule` is the law that it breaks."""

    def __init__(self, text: str, rule: str = "CFG-1") -> None:
        super().__init__(text)
        self.rule = rule


@dataclass(frozen=True)
class Architecture:
    """A Qwen3.5 model, as its config.json describes it.

    Attributes:
        model_type: `qwen3_5` or `qwen3_5_moe`.
        wrapped: True when the decoder is wrapped with a vision tower.
        prefix: What the decoder's tensor names start with.
        text: The text config (the whole config.json of a text-only checkpoint).
        tied: True when lm_head shares the embedding's weight.
        split_experts: True when the decoder's routed experts are stored as 2-D tensors, one set an expert.
        split_head_experts: The same for the MTP head.
    """

    model_type: str
    wrapped: bool
    prefix: str
    text: Mapping[str, Any]
    tied: bool
    split_experts: bool = False
    split_head_experts: bool = False

    @property
    def moe(self) -> bool:
        """Whether it is a mixture of experts."""
        return self.model_type == MOE

    @property
    def num_experts(self) -> int:
        """Routed experts a layer; 0 for a dense model."""
        return self._int("num_experts") if self.moe else 0

    @property
    def num_layers(self) -> int:
        """Decoder layers, the MTP head's not counted."""
        return self._int("num_hidden_layers")

    @property
    def num_mtp_layers(self) -> int:
        """Decoder layers of the MTP head; 0 when the config declares none."""
        value = self.text.get("mtp_num_hidden_layers", 0)
        return value if type(value) is int and value <= LIMITS["mtp_num_hidden_layers"] else 0

    @property
    def layer_types(self) -> list[str]:
        """`linear_attention` or `full_attention` for each decoder layer.

        Raises:
            ConfigError: a list of the wrong length, or another word.
        """
        types = self.text.get("layer_types")
        if types is None:
            interval = self._int("full_attention_interval") if "full_attention_interval" in self.text else 4
            types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(self.num_layers)]
        if not isinstance(types, list) or len(types) != self.num_layers:
            found = len(types) if isinstance(types, list) else type(types).__name__
            text = f"config.json: layer_types has {found} entries, num_hidden_layers is {self.num_layers}"
            raise ConfigError(text, "CFG-11")
        unknown = [kind for kind in types if kind not in ("linear_attention", "full_attention")]
        if unknown:
            text = f"config.json: layer_types holds {str(unknown[0])[:80]!r}, which this family does not have"
            raise ConfigError(text, "CFG-11")
        return types

    @functools.cached_property
    def body_tensors(self) -> dict[str, Shape]:
        """Name and shape of every decoder tensor, embedding, final norm and (untied) lm_head."""
        hidden, vocab = self._int("hidden_size"), self._int("vocab_size")
        tensors: dict[str, Shape] = {
            f"{self.prefix}embed_tokens.weight": (vocab, hidden),
            f"{self.prefix}norm.weight": (hidden,),
        }
        for i, kind in enumerate(self.layer_types):
            layer = f"{self.prefix}layers.{i}."
            mixer = self._full_attention() if kind == "full_attention" else self._linear_attention()
            parts = mixer | self._norms() | self._mlp(split=self.split_experts)
            tensors |= {layer + name: shape for name, shape in parts.items()}
        if not self.tied:
            tensors[f"{LM_HEAD}.weight"] = (vocab, hidden)
        return tensors

    @functools.cached_property
    def common_modules(self) -> dict[str, Shape]:
        """`linear_modules` without the routed experts: a few hundred, where a mixture of experts has 30,000 in all."""
        return _matrices(dataclasses.replace(self, split_experts=False).body_tensors)

    @functools.cached_property
    def linear_modules(self) -> dict[str, Shape]:
        """Module name and weight shape [N, K] of every matrix product in the decoder, lm_head included.

        Routed experts are counted one by one, `mlp.experts.3.gate_proj`, whichever layout they are stored in.
        """
        split = self if self.split_experts or not self.moe else dataclasses.replace(self, split_experts=True)
        return _matrices(split.body_tensors)

    @functools.cached_property
    def mtp_linear_modules(self) -> dict[str, Shape]:
        """The same for the MTP head, `mtp.fc` included."""
        split = self if self.split_head_experts or not self.moe else dataclasses.replace(self, split_head_experts=True)
        return _matrices(split.mtp_tensors)

    @functools.cached_property
    def mtp_tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor of the MTP head.

        4, and a layer (one at least): 11 dense; 15 with fused experts, 13 + 3 E with split ones.
        """
        hidden = self._int("hidden_size")
        tensors: dict[str, Shape] = {
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.norm.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
        }
        for i in range(max(1, self.num_mtp_layers)):
            layer = self._full_attention() | self._norms() | self._mlp(split=self.split_head_experts)
            tensors |= {f"mtp.layers.{i}.{name}": shape for name, shape in layer.items()}
        return tensors

    def _int(self, key: str) -> int:
        value = self.text.get(key)
        if type(value) is not int or not 0 < value <= LIMITS.get(key, 2**31):
            found = "nothing" if value is None else str(value)[:80]
            raise ConfigError(f"config.json: {key} must be a positive integer of a real model's size, found {found}", "CFG-11")
        return value

    def _norms(self) -> dict[str, Shape]:
        hidden = self._int("hidden_size")
        return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}

    def _mlp(self, *, split: bool) -> dict[str, Shape]:
        hidden = self._int("hidden_size")
        if not self.moe:
            return _gated("mlp", hidden, self._int("intermediate_size"))
        experts, inner = self.num_experts, self._int("moe_intermediate_size")
        tensors: dict[str, Shape] = {
            "mlp.gate.weight": (experts, hidden),
            "mlp.shared_expert_gate.weight": (1, hidden),
            **_gated("mlp.shared_expert", hidden, self._int("shared_expert_intermediate_size")),
        }
        if not split:
            fused = {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}
            return tensors | {f"mlp.experts.{name}": shape for name, shape in fused.items()}
        for e in range(experts):
            tensors |= _gated(f"mlp.experts.{e}", hidden, inner)
        return tensors

    def _full_attention(self) -> dict[str, Shape]:
        hidden, head = self._int("hidden_size"), self._int("head_dim")
        queries, keys = self._int("num_attention_heads") * head, self._int("num_key_value_heads") * head
        gate = 2 if self.text.get("attn_output_gate", True) else 1
        return {
            "self_attn.q_proj.weight": (queries * gate, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
        }

    def _linear_attention(self) -> dict[str, Shape]:
        hidden, heads = self._int("hidden_size"), self._int("linear_num_value_heads")
        keys = self._int("linear_num_key_heads") * self._int("linear_key_head_dim")
        values = heads * self._int("linear_value_head_dim")
        return {
            "linear_attn.in_proj_qkv.weight": (2 * keys + values, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.out_proj.weight": (hidden, values),
            "linear_attn.conv1d.weight": (2 * keys + values, 1, self._int("linear_conv_kernel_dim")),
            "linear_attn.norm.weight": (self._int("linear_value_head_dim"),),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
        }


def _matrices(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    return {
        name.removesuffix(".weight"): shape
        for name, shape in tensors.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith(".embed_tokens.weight")
    }


def _gated(module: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{module}.gate_proj.weight": (inner, hidden),
        f"{module}.up_proj.weight": (inner, hidden),
        f"{module}.down_proj.weight": (hidden, inner),
    }


def read_architecture(config: Mapping[str, Any], names: Iterable[str]) -> Architecture:
    """Reads a config.json of this family.

    Args:
        config: The parsed config.json.
        names: The checkpoint's tensor names: they tell the decoder's prefix and the layout of the experts.

    Raises:
        ConfigError: not this family, or a field absent or malformed.
    """
    wrapped = isinstance(config.get("text_config"), Mapping)
    text: Mapping[str, Any] = config["text_config"] if wrapped else config
    model_type = str(config.get("model_type", "")).removesuffix("_text")
    if model_type not in (DENSE, MOE):
        raise ConfigError(
            f"config.json: model_type {config.get('model_type')!r} is not supported. This tool is for the Qwen3.5 "
            f"family: {DENSE} and {MOE}, and their text-only forms {DENSE}_text and {MOE}_text."
        )
    expected = (WRAPPED_CLASS if wrapped else TEXT_CLASS)[model_type]
    if config.get("architectures") != [expected]:
        raise ConfigError(f"config.json: architectures is {config.get('architectures')!r}, expected [{expected!r}]")
    names = list(names)
    inner = "model.language_model."
    prefix = inner if wrapped or any(name.startswith(inner) for name in names) else "model."
    tied = bool(config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False))
    moe = model_type == MOE
    split, split_head = (moe and any(n.startswith(p) and EXPERT.search(n) for n in names) for p in (prefix, MTP_PREFIX))
    architecture = Architecture(model_type, wrapped, prefix, text, tied, bool(split), bool(split_head))
    if architecture.num_layers * (14 + 3 * architecture.num_experts) > TENSOR_LIMIT:
        raise ConfigError(f"config.json: {architecture.num_layers} layers of {architecture.num_experts} experts", "CFG-11")
    plain = dataclasses.replace(architecture, split_experts=False, split_head_experts=False)
    _ = plain.body_tensors, plain.mtp_tensors  # a field that is absent or malformed raises here; no expert has one of its own
    return architecture


def fused_group(module: str) -> tuple[str, ...]:
    """The modules that vLLM loads into one parameter with `module`, itself included; () when there are none."""
    parent, _, leaf = module.rpartition(".")
    return tuple([f"{parent}.{member}" for member in _GROUP.get(leaf, ())])


def source_tensor(module: str, names: Container[str]) -> str:
    """The name of the BF16 tensor that holds a module's weight: its own, or its layer's fused experts'.

    Args:
        module: A matrix of the decoder, such as `….mlp.experts.3.up_proj`.
        names: The tensor names that there are.
    """
    own = f"{module}.weight"
    return own if own in names else fused_experts(module) or own


def fused_experts(module: str) -> str | None:
    """The name of the 3-D tensor that holds a routed expert's projection where experts are fused; None for others."""
    container = experts_container(module)
    if container == module:
        return None
    return f"{container}.{'down_proj' if module.endswith('.down_proj') else 'gate_up_proj'}"


def experts_container(module: str) -> str:
    """The module that quantized_layers lists for `module`: the layer's `mlp.experts` for a routed expert's projection.

    ModelOpt lists the container once a layer, and vLLM looks for it by prefix.
    """
    head, found, tail = module.partition(".mlp.experts.")
    return f"{head}.mlp.experts" if found and tail else module

"""What a config.json implies: the decoder's modules and shapes, the groups vLLM fuses, the MTP head's tensors.

The family: three of four decoder layers are Gated DeltaNet ("linear_attention"), one is full attention with an output
gate (so q_proj has twice the rows). A published checkpoint wraps the decoder with a vision tower
(`Qwen3_5ForConditionalGeneration`, names under `model.language_model.`); a text-only one does not
(`Qwen3_5ForCausalLM`, names under `model.`, or still under `model.language_model.`).

Shapes: transformers 5.14 models/qwen3_5/modeling_qwen3_5.py; the head's: vLLM 0.33 models/qwen3_5_mtp.py.
"""

from collections.abc import Mapping
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

Shape = tuple[int, ...]


class ConfigError(InputError):
    """A config.json that does not describe a model of this family."""


@dataclass(frozen=True)
class Architecture:
    """A dense Qwen3.5 model, as its config.json describes it.

    Attributes:
        model_type: `qwen3_5`.
        wrapped: True when the decoder is wrapped with a vision tower.
        prefix: What the decoder's tensor names start with.
        text: The text config (the whole config.json of a text-only checkpoint).
        tied: True when lm_head shares the embedding's weight.
    """

    model_type: str
    wrapped: bool
    prefix: str
    text: Mapping[str, Any]
    tied: bool

    @property
    def num_layers(self) -> int:
        """Decoder layers, the MTP head's not counted."""
        return self._int("num_hidden_layers")

    @property
    def num_mtp_layers(self) -> int:
        """Decoder layers of the MTP head; 0 when the config declares none."""
        value = self.text.get("mtp_num_hidden_layers", 0)
        return value if type(value) is int else 0

    @property
    def layer_types(self) -> list[str]:
        """`linear_attention` or `full_attention` for each decoder layer.

        Raises:
            ConfigError: a list of the wrong length, or another word.
        """
        types = self.text.get("layer_types")
        if types is None:
            interval = self.text.get("full_attention_interval", 4)
            types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(self.num_layers)]
        if not isinstance(types, list) or len(types) != self.num_layers:
            found = len(types) if isinstance(types, list) else type(types).__name__
            raise ConfigError(f"config.json: layer_types has {found} entries, num_hidden_layers is {self.num_layers}")
        unknown = set(types) - {"linear_attention", "full_attention"}
        if unknown:
            raise ConfigError(f"config.json: layer_types holds {sorted(map(str, unknown))}, which this family does not have")
        return types

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
            tensors |= {layer + name: shape for name, shape in (mixer | self._norms() | self._mlp()).items()}
        if not self.tied:
            tensors[f"{LM_HEAD}.weight"] = (vocab, hidden)
        return tensors

    def linear_modules(self) -> dict[str, Shape]:
        """Module name and weight shape [N, K] of every matrix product in the decoder, lm_head included."""
        not_linear = (".embed_tokens.weight",)
        return {
            name.removesuffix(".weight"): shape
            for name, shape in self.body_tensors().items()
            if len(shape) == 2 and name.endswith(".weight") and not name.endswith(not_linear)
        }

    def mtp_tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor of the MTP head: 4 + 11 a layer (at least one layer)."""
        hidden = self._int("hidden_size")
        tensors: dict[str, Shape] = {
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.norm.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
        }
        for i in range(max(1, self.num_mtp_layers)):
            layer = self._full_attention() | self._norms() | self._mlp()
            tensors |= {f"mtp.layers.{i}.{name}": shape for name, shape in layer.items()}
        return tensors

    def _int(self, key: str) -> int:
        value = self.text.get(key)
        if type(value) is not int or value <= 0:
            raise ConfigError(f"config.json: {key} must be a positive integer, found {value!r}")
        return value

    def _norms(self) -> dict[str, Shape]:
        hidden = self._int("hidden_size")
        return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}

    def _mlp(self) -> dict[str, Shape]:
        hidden, inner = self._int("hidden_size"), self._int("intermediate_size")
        return {
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }

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


def read_architecture(config: Mapping[str, Any], names: Mapping[str, Any]) -> Architecture:
    """Reads a config.json of this family.

    Args:
        config: The parsed config.json.
        names: The checkpoint's tensor names (any container): they tell which prefix the decoder has.

    Raises:
        ConfigError: not this family, or a mixture of experts (not supported yet).
    """
    wrapped = isinstance(config.get("text_config"), dict)
    text: Mapping[str, Any] = config["text_config"] if wrapped else config
    model_type = str(config.get("model_type", "")).removesuffix("_text")
    if model_type not in (DENSE, MOE):
        raise ConfigError(
            f"config.json: model_type {config.get('model_type')!r} is not supported. This tool is for the Qwen3.5 "
            f"family: {DENSE} and its text-only form {DENSE}_text."
        )
    if model_type == MOE:
        raise ConfigError("config.json: mixture-of-experts models (qwen3_5_moe) are not supported yet; dense qwen3_5 is.")
    expected = (WRAPPED_CLASS if wrapped else TEXT_CLASS)[model_type]
    if config.get("architectures") != [expected]:
        raise ConfigError(f"config.json: architectures is {config.get('architectures')!r}, expected [{expected!r}]")
    inner = "model.language_model."
    prefix = inner if wrapped or any(name.startswith(inner) for name in names) else "model."
    tied = bool(config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False))
    return Architecture(model_type, wrapped, prefix, text, tied)


def fused_group(module: str) -> tuple[str, ...]:
    """The modules that vLLM loads into one parameter together with `module`, itself included; () when there are none."""
    parent, _, leaf = module.rpartition(".")
    for members in FUSED.values():
        if leaf in members:
            return tuple(f"{parent}.{member}" for member in members)
    return ()

"""Checkpoints and settings that a real vLLM refuses, each with what the explanation must say. Run on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assemble.checkpoint import Checkpoint
from quantize.smoke.failures import Kind
from quantize.smoke.settings import MTP, PLAIN, Ask
from recipes.schema import Smoke
from tests.assemble.checkpoints import Copy, link_tree
from tests.assemble.mutations.tools import MLP, unlink

CPU = {"VLLM_CPU_KVCACHE_SPACE": "1"}
FIRST = "model-00001-of-00002.safetensors"


@dataclass(frozen=True)
class Case:
    """One failure.

    Attributes:
        name: Also its recording's.
        base: `bf16` or `quantized`.
        kind: Whose fault the explanation must say it is.
        word: What its message must hold.
        change: What is done to the copy.
        engine: Engine arguments.
        mtp: Whether the pass has the head.
        rule: A rule that the law book must find broken, or nothing.
    """

    name: str
    base: str
    kind: Kind
    word: str
    change: Callable[[Copy], Any] = lambda _: None
    engine: dict[str, Any] = field(default_factory=dict)
    mtp: bool = False
    rule: str = ""


def truncate(copy: Copy) -> None:
    copy.raw(FIRST, lambda data: data[:-1000])


def misshapen(copy: Copy) -> None:
    dtype, shape, data = copy.get(f"{MLP}.down_proj.weight")
    copy.put(f"{MLP}.down_proj.weight", dtype, (shape[1], shape[0]), data)


def head_with_scales(copy: Copy) -> None:
    copy.scalar("mtp.layers.0.mlp.down_proj.weight_scale", 0.01)


def index_of_more(copy: Copy) -> None:
    copy.index(lambda i: i["weight_map"].update({"mtp.norm.weight": "model-00003-of-00003.safetensors"}))


def only_the_twin(copy: Copy) -> None:
    copy.config(lambda c: c.pop("quantization_config"))


def no_layers(copy: Copy) -> None:
    copy.text(lambda c: c.update(mtp_num_hidden_layers=0))


def other_class(copy: Copy) -> None:
    copy.config(lambda c: c.update(architectures=["Qwen3_5ForSomething"]))


CASES = (
    Case("a stray tensor", "bf16", Kind.CHECKPOINT, "no module or parameter", lambda c: c.scalar(f"{MLP}.down_proj.amax", 1.0)),
    Case("a tensor of another shape", "bf16", Kind.CHECKPOINT, "", misshapen),
    Case("a shard cut short", "bf16", Kind.CHECKPOINT, "", truncate),
    Case("a shard is not there", "bf16", Kind.CHECKPOINT, "missing", index_of_more),
    Case("no tokenizer", "bf16", Kind.CHECKPOINT, "empty", unlink("tokenizer.json", "tokenizer_config.json")),
    Case("no chat template", "bf16", Kind.CHECKPOINT, "chat_template", unlink("chat_template.jinja")),
    Case("an unknown class", "bf16", Kind.VERSION, "not supported", other_class),
    Case("no layers of the head", "bf16", Kind.CHECKPOINT, "zero", no_layers, mtp=True),
    Case("scales in the head", "bf16", Kind.CHECKPOINT, "weight_scale", head_with_scales, mtp=True),
    Case("a longer context than the model's", "bf16", Kind.SETTINGS, "max_model_len", engine={"max_model_len": 10**6}),
    Case("an unknown engine argument", "bf16", Kind.SETTINGS, "unexpected", engine={"warp_drive": True}),
    Case("too many GPUs", "bf16", Kind.SETTINGS, "divisible", engine={"tensor_parallel_size": 3}),
    Case("only hf_quant_config.json", "quantized", Kind.VERSION, "MIXED_PRECISION", only_the_twin, rule="CFG-6"),
    Case("no kernel on a CPU", "quantized", Kind.UNSUPPORTED_GPU, "NVFP4"),
)


def make(case: Case, base: Path, source: Path, root: Path) -> Path:
    """The case's checkpoint."""
    copy = Copy(link_tree(base, root), Checkpoint.open(source))
    case.change(copy)
    copy.save()
    return root


def settings_of(case: Case, root: Path) -> dict[str, Any]:
    """What the runner is asked: hardly anything, since it does not come to that."""
    prompts = [{"prompt_token_ids": list(range(10, 42)), "ignore_eos": True}]
    settings = Ask(root, Smoke(max_new_tokens=16), prompts, engine=case.engine).settings(MTP if case.mtp else PLAIN)
    return settings | {"environment": settings["environment"] | CPU}

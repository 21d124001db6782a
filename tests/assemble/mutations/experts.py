"""Faults of a mixture of experts."""

from tests.assemble.checkpoints import EXPERTS, Copy
from tests.assemble.mutations.tools import (
    ALL_EXPERTS,
    EMBEDDING,
    EVERY_EXPERT,
    EXPERT,
    FP8,
    HEAD,
    W4,
    L,
    Table,
    entry,
    flip,
    fp8_stored,
    same_tensor,
    sparse_blocks,
    unlink,
    unlist,
)


def empty_of_experts(c: Copy) -> None:
    """Experts left BF16 and fused, unlisted, beside a quantized shared expert."""
    c.drop(*[n for n in c.names(f"{L}.") if ".mlp.experts." in n])
    for i in range(4):
        for leaf in ("gate_up_proj", "down_proj"):
            tensor = c.source[f"{L}.{i}.mlp.experts.{leaf}"]
            c.put(tensor.name, tensor.dtype, tensor.shape, c.source.read(tensor.name))
    c.layers(lambda q: [q.pop(f"{L}.{i}.mlp.experts") for i in range(4)])


MOE: Table = {
    "an expert is lost": ("Q-9", lambda c: c.drop(*c.names(f"{EXPERT}."))),
    "a projection of an expert is lost": ("Q-9", lambda c: c.drop(*c.names(f"{EXPERT}.up_proj."))),
    "an expert's tensor scale is lost": ("Q-9", lambda c: c.drop(f"{EXPERT}.up_proj.weight_scale_2")),
    "an expert's block scales are lost": ("Q-9", lambda c: c.drop(f"{EXPERT}.down_proj.weight_scale")),
    "all experts of a layer are lost": ("Q-9", lambda c: c.drop(*c.names(f"{L}.1.mlp.experts."))),
    "tensor scales of all experts are lost": (
        "Q-9",
        lambda c: c.drop(*[n for n in c.names(".experts.") if n.endswith("_scale_2")]),
    ),
    "the first expert is lost": ("Q-9", lambda c: c.drop(*c.names(f"{L}.0.mlp.experts.0."))),
    "an expert too many": (
        "Q-9",
        lambda c: [c.put(n.replace("experts.5", f"experts.{EXPERTS}"), *c.get(n)) for n in c.names(f"{EXPERT}.")],
    ),
    "more experts declared": ("Q-9", lambda c: c.text(lambda d: d.update(num_experts=2 * EXPERTS))),
    "fewer experts declared": ("Q-9", lambda c: c.text(lambda d: d.update(num_experts=EXPERTS - 1))),
    "a fused leftover": ("Q-9", lambda c: c.put(f"{L}.0.mlp.experts.down_proj", "BF16", ALL_EXPERTS, EVERY_EXPERT)),
    "fused and split experts": ("Q-17", lambda c: c.put(f"{L}.0.mlp.experts.down_proj", "BF16", ALL_EXPERTS, EVERY_EXPERT)),
    "experts not listed, BF16": ("Q-10", empty_of_experts),
    "experts not listed, quantized": ("Q-10", unlist(*(f"{L}.{i}.mlp.experts" for i in range(4)))),
    "one layer's experts not listed": ("Q-4", unlist(f"{L}.2.mlp.experts")),
    "one layer's experts not listed, inherit": ("Q-10", unlist(f"{L}.2.mlp.experts")),
    "experts listed one by one, one not": (
        "Q-5",
        lambda c: c.layers(
            lambda q: (
                q.pop(f"{L}.2.mlp.experts"),
                q.update(
                    {f"{L}.2.mlp.experts.{e}.{p}_proj": W4 for e in range(EXPERTS) for p in ("gate", "up", "down") if e != 5}
                ),
            )
        ),
    ),
    "experts of two algorithms": (
        "Q-5",
        lambda c: c.layers(
            lambda q: (
                q.pop(f"{L}.2.mlp.experts"),
                q.update(
                    {
                        f"{L}.2.mlp.experts.{e}.{p}_proj": FP8 if e == 5 else W4
                        for e in range(EXPERTS)
                        for p in ("gate", "up", "down")
                    }
                ),
            )
        ),
    ),
    "experts listed FP8, stored NVFP4": ("Q-3", entry(f"{L}.2.mlp.experts", FP8)),
    "experts listed under a wrong name": (
        "Q-1",
        lambda c: c.layers(lambda q: q.update({f"{L}.2.mlp.moe": q.pop(f"{L}.2.mlp.experts")})),
    ),
    "experts of an unknown algorithm": ("CFG-9", entry(f"{L}.2.mlp.experts", {"quant_algo": "INT4_AWQ"})),
    "an expert's gate and up apart": ("Q-6", lambda c: c.scale(f"{EXPERT}.gate_proj.weight_scale_2", 3)),
    "all experts' gate and up apart": (
        "Q-6",
        lambda c: [c.scale(n, 3) for n in c.names(".gate_proj.weight_scale_2") if ".experts." in n],
    ),
    "the shared expert's gate and up apart": ("Q-6", lambda c: c.scale(f"{L}.2.mlp.shared_expert.up_proj.weight_scale_2", 3)),
    "the shared expert's up not listed": ("Q-5", unlist(f"{L}.2.mlp.shared_expert.up_proj")),
    "an expert of another shape": (
        "Q-2",
        lambda c: c.put(f"{EXPERT}.down_proj.weight", "U8", (128, 128), c.get(f"{EXPERT}.down_proj.weight")[2]),
    ),
    "an expert stored BF16": ("Q-2", lambda c: c.put(f"{EXPERT}.down_proj.weight", "BF16", (256, 128), bytes(2**16))),
    "the router listed": ("Q-11", entry(f"{L}.2.mlp.gate", FP8)),
    "the router stored in FP8": ("Q-4", lambda c: fp8_stored(c, f"{L}.2.mlp.gate")),
    "the router in F32": ("Q-11", lambda c: c.cast(f"{L}.2.mlp.gate.weight", "F32")),
    "the shared expert's gate listed": ("Q-11", entry(f"{L}.2.mlp.shared_expert_gate", W4)),
    "the router is lost": ("Q-13", lambda c: c.drop(f"{L}.2.mlp.gate.weight")),
    "the shared expert's gate is lost": ("Q-13", lambda c: c.drop(f"{L}.2.mlp.shared_expert_gate.weight")),
    "the shared expert's down is lost": ("Q-1", lambda c: c.drop(*c.names(f"{L}.2.mlp.shared_expert.down_proj."))),
    "a quantizer's leftover in an expert": ("Q-12", lambda c: c.scalar(f"{EXPERT}.up_proj.input_quantizer._amax", 1)),
    "more experts a token than there are": ("CFG-11", lambda c: c.text(lambda d: d.update(num_experts_per_tok=EXPERTS + 1))),
    "no number of experts": ("CFG-11", lambda c: c.text(lambda d: d.pop("num_experts"))),
    "the dense class": ("CFG-1", lambda c: c.config(lambda d: d.update(architectures=["Qwen3_5ForConditionalGeneration"]))),
    "ignore takes out the experts": ("IGN-2", lambda c: c.ignore(f"{L}.2.mlp.experts")),
    "ignore takes out one expert, so all": ("IGN-2", lambda c: c.ignore(f"{EXPERT}.gate_proj")),
    "ignore takes out the shared expert": ("IGN-2", lambda c: c.ignore(f"{L}.2.mlp.shared_expert*")),
    "ignore takes out every expert": ("IGN-2", lambda c: c.ignore("*.experts*")),
    "ignore names a router by a fragment": (
        "IGN-4",
        lambda c: c.ignore("shared_expert_g", drop=[f"{L}.2.mlp.shared_expert_gate"]),
    ),
    "the head's router is lost": ("MTP-1", lambda c: c.drop(f"{HEAD}.mlp.gate.weight")),
    "the head's experts are lost": ("MTP-1", lambda c: c.drop(*c.names(f"{HEAD}.mlp.experts."))),
    "the head has too few experts": (
        "MTP-1",
        lambda c: c.put(f"{HEAD}.mlp.experts.down_proj", "BF16", (EXPERTS - 1, 256, 128), bytes(2 * (EXPERTS - 1) * 256 * 128)),
    ),
    "the head's experts listed": ("MTP-2", entry(f"{HEAD}.mlp.experts", W4)),
    "the head's experts in both layouts": (
        "Q-17",
        lambda c: c.put(f"{HEAD}.mlp.experts.0.up_proj.weight", "BF16", (128, 256), bytes(2**16)),
    ),
}

MOE_AT_DEPTH: Table = {
    "an expert's block scale is NaN": (
        "Q-8",
        lambda c: c.change(f"{EXPERT}.up_proj.weight_scale", lambda a: a.__setitem__(3, 0x7F)),
    ),
    "an expert's tensor scale is zero": ("Q-8", lambda c: c.scalar(f"{EXPERT}.down_proj.weight_scale_2", 0)),
    "an expert that saw no token": ("VAL-1", lambda c: c.change(f"{EXPERT}.down_proj.weight_scale", sparse_blocks(1))),
    "the embedding is all zeros": ("VAL-4", lambda c: c.change(EMBEDDING, sparse_blocks(1))),
    "the head's experts are all zeros": ("MTP-3b", lambda c: c.change(f"{HEAD}.mlp.experts.gate_up_proj", sparse_blocks(1))),
}

MOE_AGAINST_SOURCE: Table = {
    "an expert is another": (
        "VAL-6",
        lambda c: [
            same_tensor(c, f"{L}.2.mlp.experts.4.down_proj.{x}", f"{EXPERT}.down_proj.{x}")
            for x in ("weight", "weight_scale", "weight_scale_2")
        ],
    ),
    "gate and up exchanged": (
        "VAL-6",
        lambda c: (
            c.rename(f"{EXPERT}.gate_proj.weight", "x"),
            c.rename(f"{EXPERT}.up_proj.weight", f"{EXPERT}.gate_proj.weight"),
            c.rename("x", f"{EXPERT}.up_proj.weight"),
        ),
    ),
    "the last expert is garbage": (
        "VAL-6",
        lambda c: c.change(f"{L}.3.mlp.experts.7.up_proj.weight", lambda a: a[::-1].copy()),
    ),
    "a bit of a router": ("Q-13b", flip(f"{L}.2.mlp.gate.weight", 5)),
    "a bit of the head's experts": ("MTP-3", flip(f"{HEAD}.mlp.experts.down_proj", 5)),
    "fewer experts a token": ("CFG-12", lambda c: c.text(lambda d: d.update(num_experts_per_tok=1))),
    "an image processor file is lost": ("CFG-13b", unlink("preprocessor_config.json", "video_preprocessor_config.json")),
}

SPLIT: Table = {
    "an expert of the head is lost": ("MTP-1", lambda c: c.drop(*c.names(f"{HEAD}.mlp.experts.3."))),
    "a projection of the head's first expert is lost": ("MTP-1", lambda c: c.drop(f"{HEAD}.mlp.experts.0.gate_proj.weight")),
    "the head has an expert too many": (
        "MTP-1",
        lambda c: c.put(f"{HEAD}.mlp.experts.8.up_proj.weight", "BF16", (128, 256), bytes(2**16)),
    ),
    "the head's experts quantized": (
        "MTP-2",
        lambda c: c.put(f"{HEAD}.mlp.experts.3.up_proj.weight", "U8", (128, 128), bytes(2**14)),
    ),
    "the head's experts in both layouts": (
        "Q-17",
        lambda c: c.put(f"{HEAD}.mlp.experts.down_proj", "BF16", ALL_EXPERTS, EVERY_EXPERT),
    ),
}

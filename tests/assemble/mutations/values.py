"""Faults that only tensor values show: by themselves, or beside the source."""

import numpy as np

from tests.assemble.mutations.tools import (
    ATT,
    GDN,
    MLP,
    L,
    Table,
    flip,
    put_nan,
    same_tensor,
    shift,
    sparse_blocks,
    unlink,
    write,
)

AT_DEPTH: Table = {
    "a tensor scale is NaN": ("Q-8", lambda c: c.scalar("lm_head.weight_scale_2", np.nan)),
    "a tensor scale is infinite": ("Q-8", lambda c: c.scalar("lm_head.weight_scale_2", np.inf)),
    "a tensor scale is zero": ("Q-8", lambda c: c.scalar("lm_head.weight_scale_2", 0)),
    "a tensor scale is negative": ("Q-8", lambda c: c.scale("lm_head.weight_scale_2", -1)),
    "an input scale was never written": ("Q-8", lambda c: c.scalar(f"{ATT}.o_proj.input_scale", np.finfo(np.float32).min)),
    "an FP8 scale is zero": ("Q-8", lambda c: c.scalar(f"{ATT}.o_proj.weight_scale", 0)),
    "a block scale is NaN": ("Q-8", lambda c: c.change("lm_head.weight_scale", lambda a: a.__setitem__(7, 0x7F))),
    "a block scale is negative": ("Q-8", lambda c: c.change("lm_head.weight_scale", lambda a: a.__setitem__(7, 0xB0))),
    "input scales were not calibrated": ("Q-8", lambda c: [c.scalar(n, 1.0) for n in c.names(".input_scale")]),
    "a part of the block scales underflowed": ("VAL-1", lambda c: c.change("lm_head.weight_scale", sparse_blocks(0.05))),
    "all block scales are zero": ("VAL-1", lambda c: c.change(f"{MLP}.down_proj.weight_scale", sparse_blocks(1))),
    "a layer's MLP is another's": ("VAL-2", lambda c: same_tensor(c, f"{L}.0.mlp.down_proj.weight", f"{MLP}.down_proj.weight")),
    "a norm holds a NaN": ("VAL-3", lambda c: c.change(f"{L}.0.input_layernorm.weight", put_nan)),
    "an infinity in the embedding": (
        "VAL-3",
        lambda c: c.change(
            "model.language_model.embed_tokens.weight", lambda a: a.__setitem__(slice(4000, 4002), [0x80, 0xFF])
        ),
    ),
    "a NaN in an FP8 weight": ("VAL-3", lambda c: c.change(f"{ATT}.o_proj.weight", lambda a: a.__setitem__(99, 0xFF))),
    "a NaN in the head": ("VAL-3", lambda c: c.change("mtp.fc.weight", put_nan)),
    "lm_head is all zeros": ("VAL-4", lambda c: c.change("lm_head.weight", sparse_blocks(1))),
    "an FP8 weight is all zeros": ("VAL-4", lambda c: c.change(f"{ATT}.o_proj.weight", sparse_blocks(1))),
    "a tensor scale beyond reason": ("VAL-5", lambda c: c.scalar("lm_head.weight_scale_2", 1e9)),
    "the head's fc is all zeros": ("MTP-3b", lambda c: c.change("mtp.fc.weight", sparse_blocks(1))),
}


AGAINST_SOURCE: Table = {
    "another rope_theta": ("CFG-12", lambda c: c.text(lambda d: d["rope_parameters"].update(rope_theta=5000.0))),
    "a field is lost": ("CFG-12", lambda c: c.text(lambda d: d.pop("rms_norm_eps"))),
    "a field is new": ("CFG-12", lambda c: c.text(lambda d: d.update(attention_sink=True))),
    "another token id": ("CFG-12", lambda c: c.config(lambda d: d.update(image_token_id=1))),
    "the chat template is lost": ("CFG-13b", unlink("chat_template.jinja")),
    "the generation config is another": ("CFG-13b", write("generation_config.json", '{"temperature": 0.5}')),
    "a bit of a norm": ("Q-13b", flip(f"{L}.0.input_layernorm.weight")),
    "a bit of the embedding": ("Q-13b", flip("model.language_model.embed_tokens.weight", 1_000_000)),
    "a bit of the vision tower": ("Q-13b", flip("model.visual.patch_embed.proj.weight", 77)),
    "A_log was cast": ("Q-13b", lambda c: c.cast(f"{GDN}.A_log", "F32")),
    "a tensor that the source does not have": ("Q-13b", lambda c: c.put(f"{GDN}.in_proj_a.bias", "BF16", (4,), bytes(8))),
    "a bit of the head": ("MTP-3", flip("mtp.fc.weight", 12345)),
    "another head": ("MTP-3", lambda c: c.change("mtp.fc.weight", lambda a: a[::-1].copy())),
    "a tensor of the head is lost": ("MTP-3", lambda c: c.drop("mtp.norm.weight")),
    "the head's norms were re-centred": (
        "MTP-4",
        lambda c: [shift(c, n, 1) for n in c.names("mtp.") if n.endswith("norm.weight")],
    ),
    "another layer's weight": (
        "VAL-6",
        lambda c: [
            same_tensor(c, f"{L}.0.mlp.down_proj.{x}", f"{MLP}.down_proj.{x}")
            for x in ("weight", "weight_scale", "weight_scale_2")
        ],
    ),
    "nibbles swapped": ("VAL-6", lambda c: c.change(f"{MLP}.down_proj.weight", lambda a: (a << 4) | (a >> 4))),
    "scales of half the size": ("VAL-6", lambda c: c.scale(f"{MLP}.down_proj.weight_scale_2", 0.5)),
    "an FP8 weight of garbage": ("VAL-6", lambda c: c.change(f"{ATT}.o_proj.weight", lambda a: a[::-1].copy())),
    "block scales in another order": ("VAL-6", lambda c: c.change(f"{MLP}.down_proj.weight_scale", lambda a: a[::-1].copy())),
}

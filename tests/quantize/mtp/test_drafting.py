"""The head, the body and the greedy text, against transformers' whole model and the trainer's head."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from assemble.checkpoint import Checkpoint
from quantize.evaluate import mtp, mtp_greedy
from quantize.evaluate.mtp_body import LayerwiseBody
from quantize.evaluate.mtp_draft import draft
from quantize.evaluate.mtp_greedy import continue_greedily
from quantize.evaluate.mtp_head import Head, HeadError
from quantize.evaluate.weights import Weights
from quantize.runner import Outcome
from quantize.streaming.decoder import Decoder
from tests.quantize.mtp.oracle import draft_one_by_one, trained_head

DEPTH = 4


def whole_model(root: Path) -> torch.nn.Module:
    model_class = getattr(transformers, Checkpoint.open(root).config["architectures"][0])
    model = model_class.from_pretrained(root, dtype=torch.bfloat16, local_files_only=True).eval()
    model.config.get_text_config()._experts_implementation = "eager"
    return model


def states(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return getattr(model.model, "language_model", model.model)(input_ids=ids, use_cache=False).last_hidden_state


def nothing(_done: int) -> None:
    pass


@pytest.mark.parametrize("variant", [{}, {"moe": True}, {"moe": True, "split": True}, {"text_only": True}])
def test_drafts_are_those_of_the_head_run_position_by_position(
    variant: dict, make_variant: Callable[..., Path], code_rows: list[list[int]]
) -> None:
    """Dense, mixture with both layouts of experts, text only: every position and draft, side by side, equals one at a time."""
    root = make_variant(**variant)
    weights = Weights(Checkpoint.open(root))
    model = whole_model(root)
    body = mtp.open_body(weights, "cpu")
    tensors = weights.mtp_tensors()
    head, oracle = Head(weights.architecture, tensors, "cpu"), trained_head(weights.architecture, tensors)
    tokens = torch.tensor([row[:33] for row in code_rows[:2]])
    hidden = states(model, tokens[:, :-1])
    positions = torch.tensor([[3, 11, 12, 30], [0, 5, 29, 31]])
    drafts = draft(head, body, tokens, hidden, positions, DEPTH)
    expected = [
        [draft_one_by_one(oracle, model, tokens[row], hidden[row], int(p), DEPTH) for p in positions[row]] for row in range(2)
    ]
    assert drafts.tolist() == expected
    assert len({token for row in expected for one in row for token in one}) > 8  # not a constant


@pytest.mark.parametrize("moe", [False, True])
def test_the_body_reads_and_extends_as_the_whole_model(
    moe: bool, tiny: Path, tiny_moe: Path, code_rows: list[list[int]]
) -> None:
    """What was forgotten or only tried leaves nothing behind. Resident or loaded again for each pass: equal."""
    root = tiny_moe if moe else tiny
    weights = Weights(Checkpoint.open(root))
    ids = torch.tensor([row[:96] for row in code_rows[:2]])
    expected = states(whole_model(root), ids)
    found = {}
    for name, room in (("resident", 10**9), ("streamed", 0), ("half", 3_000_000)):
        decoder = Decoder(weights.architecture, "cpu")
        parts = weights.embedding(), weights.final_norm(), weights.lm_head()
        body = LayerwiseBody(weights.architecture, decoder, lambda i, d=decoder: weights.layer(d, i), *parts, keep_bytes=room)
        body.read(ids[:, 30:40])
        body.start()
        read = body.read(ids[:, :50])
        body.extend(ids[:, 20:90])
        read = torch.cat([read, body.read(ids[:, 50:60])], dim=1)
        found[name] = torch.cat([read, body.extend(ids[:, 60:])], dim=1)
        assert body.resident_layers == {"resident": 4, "streamed": 0}.get(name, body.resident_layers)
    assert 0 < body.resident_layers < 4
    assert torch.equal(found["resident"], found["streamed"])
    assert torch.equal(found["resident"], found["half"])
    distance = (found["resident"] - expected).float().norm() / expected.float().norm()
    assert distance < 0.02  # BF16, other shapes


def test_a_quantized_body_extends_as_it_runs_in_one_go(quantized: Outcome, code_rows: list[list[int]]) -> None:
    """FP8 activations and the FP8 KV cache are simulated in what is cached of the prompt, too."""
    weights = Weights(Checkpoint.open(quantized.out))
    assert weights.kv_fp8
    ids = torch.tensor([row[:80] for row in code_rows[:2]])
    body = mtp.open_body(weights, "cpu")
    body.start()
    found = torch.cat([body.read(ids[:, :60]), body.extend(ids[:, 60:])], dim=1)
    decoder = Decoder(weights.architecture, "cpu")
    hidden = decoder.embed(weights.embedding(), ids)
    for index in range(decoder.num_layers):
        hidden = decoder.forward(weights.layer(decoder, index), hidden)
    expected = decoder.final_norm(weights.final_norm(), hidden)
    assert (found - expected).float().norm() / expected.float().norm() < 0.02


def test_the_text_is_the_models_own_greedy_text(
    tiny: Path, body: LayerwiseBody, code_rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the head's help, without, and by transformers' `generate`; and the states are those of the text."""
    weights = Weights(Checkpoint.open(tiny))
    prompts = [row[:40] for row in code_rows[:3]]
    monkeypatch.setattr(mtp_greedy, "READ_ON_AFTER", 8)
    head = Head(weights.architecture, weights.mtp_tensors(), "cpu")
    helped = continue_greedily(body, prompts, 24, head, DEPTH, nothing)
    alone = continue_greedily(body, prompts, 24, None, DEPTH, nothing)
    model = whole_model(tiny)
    model.generation_config.eos_token_id = None
    generated = model.generate(
        torch.tensor(prompts), do_sample=False, max_new_tokens=24, top_p=None, top_k=None, temperature=None
    )
    assert helped.tokens.tolist() == alone.tokens.tolist() == generated.tolist()
    assert alone.passes == 24 + 2  # a token a pass, and two to read on
    assert helped.passes < 0.7 * alone.passes
    expected = states(model, helped.tokens)[:, :-1]
    assert helped.hidden.shape == expected.shape
    assert (helped.hidden - expected).float().norm() / expected.float().norm() < 0.02


def test_matches_count_the_drafts_that_are_the_text(tiny: Path, body: LayerwiseBody, code_rows: list[list[int]]) -> None:
    weights = Weights(Checkpoint.open(tiny))
    head = Head(weights.architecture, weights.mtp_tensors(), "cpu")
    settings = mtp.Settings(new_tokens=10, max_drafts=3)
    text = continue_greedily(body, [row[:30] for row in code_rows[:2]], 12, head, 3, nothing)
    matches = mtp.match(head, body, text, settings, nothing)
    assert matches.shape == (2, 9)
    for row, first in ((0, 0), (1, 8)):
        position = torch.tensor([[30 - 1 + first]])
        drafts = draft(head, body, text.tokens[row : row + 1], text.hidden[row : row + 1], position, 3)[0, 0]
        right = (drafts == text.tokens[row, 31 + first : 34 + first]).long().cumprod(0).sum()
        assert matches[row, first] == right
    assert 0 < np.mean(matches) < 3


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.0.self_attn.k_norm.weight"])
def test_a_head_that_is_not_whole_is_refused(name: str, tiny: Path) -> None:
    weights = Weights(Checkpoint.open(tiny))
    tensors = weights.mtp_tensors()
    with pytest.raises(HeadError, match=f"mtp.{name} missing"):
        Head(weights.architecture, {n: t for n, t in tensors.items() if n != name}, "cpu")
    with pytest.raises(HeadError, match=rf"mtp.{name} is \[.*\], expected \["):
        Head(weights.architecture, tensors | {name: tensors[name][:-1]}, "cpu")
    with pytest.raises(HeadError, match="there is no MTP head"):
        Head(weights.architecture, {}, "cpu")


def test_a_gap_among_the_experts_is_named(tiny_moe: Path) -> None:
    weights = Weights(Checkpoint.open(tiny_moe))
    tensors = weights.mtp_tensors()
    gap = {"layers.0.mlp.experts.gate_up_proj": tensors["layers.0.mlp.experts.gate_up_proj"][:7]}
    with pytest.raises(HeadError, match=r"experts.gate_up_proj is \[7, .*expected \[8, "):
        Head(weights.architecture, tensors | gap, "cpu")

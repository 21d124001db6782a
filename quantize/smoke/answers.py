"""Checks of what was generated: is it text, is it the same with the head, are the prompts as likely as they should be?"""

import math
from collections.abc import Iterator, Sequence

from quantize.smoke import blame, texts
from quantize.smoke.divergence import Difference, compare
from quantize.smoke.evidence import Evidence
from quantize.smoke.facts import scores
from quantize.smoke.report import FAIL, NOTE, PASS, SKIP, WARN, Check

Checks = Iterator[Check]
# Of a mixture of experts' prompts. Seen: one of 16 (1.38 nats; tiny model in BF16, vLLM 0.32 on a CPU). There a router's second
# and third expert lie 0.001 apart (the median is 0.33), and transformers gives one run's numbers in FP32, the other's in BF16.
ROUTED_SHARE = 1 / 8
LOOPING_SHARE = 0.5  # of the prompts: a model whose texts mostly loop is worth a look


def text(evidence: Evidence) -> Checks:
    """The canary, numbers that are none, repetition."""
    for one in evidence.passes.values():
        if one.result.get("canary") and one is next(iter(evidence.passes.values())):
            answer = str(one.result["canary"]["text"]).strip()
            bad = not answer or texts.stuck(one.result["canary"]["token_ids"])
            said = answer.replace("\n", " ")[:120] or "nothing"
            yield Check("canary", WARN if bad else NOTE, repr(said), "an answer")
        if not one.outputs:
            continue
        name = "text" if one.name == "plain" else f"text, {one.name}"
        nans, stuck = texts.num_not_numbers(one.outputs), sum(texts.stuck(o.tokens) for o in one.outputs)
        looping, total = sum(texts.loops(o.tokens) for o in one.outputs), len(one.outputs)
        if nans or stuck * 2 > total:
            found = f"{nans} log probabilities are NaN; " if nans else ""
            found += f"{stuck} of {total} texts repeat one token, such as {one.outputs[0].text[:24]!r}"
            yield Check(name, FAIL, found, "text", *blame.for_garbage(evidence))
        elif looping > LOOPING_SHARE * total:
            why = "small and base models do this by nature; compare with the source's own text"
            yield Check(name, WARN, f"{looping} of {total} texts end in a loop", "text that goes on", why)
        else:
            yield Check(name, PASS, f"{total} texts, {looping} end in a loop, no NaN")


def tokens(evidence: Evidence) -> Checks:
    """vLLM makes the same tokens of a text as the checkpoint's tokenizer.json.

    transformers 5.19 builds its own Qwen3_5Tokenizer for this model type, whatever tokenizer_config.json says, and with it
    its own rules for splitting text (models/auto/tokenization_auto.py): a model that was trained with other rules reads
    misspelt text, and nothing says so.
    """
    probe = next((p.result["probe"] for p in evidence.passes.values() if p.result.get("probe")), None)
    if probe is None or evidence.tokenize is None:
        return
    made, expected = list(probe["ids"]), list(evidence.tokenize(probe["text"]))
    if made == expected:
        yield Check("tokens", PASS, f"{len(made)} of a text with code, digits and accents, as tokenizer.json makes them")
    else:
        at = next((i for i, (a, b) in enumerate(zip(made, expected, strict=False)) if a != b), min(len(made), len(expected)))
        found = f"{made[at : at + 3]} where tokenizer.json makes {expected[at : at + 3]} of the same text (token {at})"
        why = "vLLM's transformers puts a tokenizer class of its own around the vocabulary, with other rules for splitting text"
        remedy = "use a transformers in vLLM's environment that honours tokenizer_config.json, or give token ids to the server"
        yield Check("tokens", WARN, found, "the same tokens", why, remedy)


def same_text(evidence: Evidence) -> Checks:
    """The head changes no text, but for near-ties."""
    limit = evidence.recipe.max_margin_millinats / 1000
    for other in (evidence.drafted, evidence.graphs):
        if evidence.plain is None or other is None or not evidence.plain.outputs or not other.outputs:
            continue
        comparison = compare(evidence.plain.outputs, other.outputs)
        diverged = comparison.diverged(limit)
        near = len(comparison.differences) - len(diverged)
        name = "same text" if other.name == "mtp" else f"same text, {other.name}"
        largest = max((d.disagreement for d in comparison.differences), default=0.0)
        found = f"{comparison.same} of {comparison.prompts} to the last token, {near} part at a near-tie"
        found += f", {len(diverged)} diverge; they disagree by at most {largest:.2f} nats (mean {comparison.noise:.3f})"
        if not diverged:
            yield Check(name, PASS, found)
            continue
        worst = max(diverged, key=lambda d: d.disagreement)
        found += f"; prompt {worst.prompt}, token {worst.position}: {worst.plain} without, {worst.drafted} with"
        if evidence.expectation.experts and _routed(diverged, comparison.prompts):
            why = "a router's near-tie sends a token to other experts, and its numbers jump; a wrong state shows in most texts"
            yield Check(name, WARN, found, f"at most {limit} nats, but for {ROUTED_SHARE:.0%} of the prompts", why)
            continue
        why = "the body itself was in another state: a rejected draft was kept (vllm#43559, #47194), or a kernel is wrong"
        remedy = "try another vLLM release, or other kernels; a checkpoint whose text is right without the head is not at fault"
        yield Check(name, FAIL, found, f"at most {limit} nats", why, remedy)


def _routed(diverged: Sequence[Difference], prompts: int) -> bool:
    """Whether so few prompts diverge, and by numbers, that a router's near-ties explain it."""
    return len(diverged) <= ROUTED_SHARE * prompts and all(math.isfinite(d.disagreement) for d in diverged)


def likelihood(evidence: Evidence) -> Checks:
    """The prompts are as likely as evaluate predicts."""
    one, scored = evidence.scored, scores(evidence)
    if one is None or scored is None:
        yield Check(
            "likelihood",
            SKIP,
            str(one.result["prompt_logprobs"].get("error")) if one else "no pass came to scoring the prompts",
        )
        return
    nll, tokens, predicted = scored["nll"], scored["tokens"], scored["predicted_nll"]
    found = f"{nll:.4f} nats a token over {tokens}"
    chance = math.log(one.result.get("vocabulary") or 1)
    if not math.isfinite(nll) or (chance > 1 and nll > 0.9 * chance):
        yield Check("likelihood", FAIL, found, f"well below chance ({chance:.2f})", *blame.for_garbage(evidence))
    elif predicted is None:
        yield Check("likelihood", NOTE, found + "; no prediction to compare with")
    else:
        limit = evidence.recipe.max_nll_increase_millinats / 1000
        good = scored["increase"] <= limit
        found += f"; predicted {predicted:.4f}"
        blamed = () if good else blame.for_garbage(evidence)
        yield Check("likelihood", PASS if good else FAIL, found, f"at most {limit} more than predicted", *blamed)

"""From drafts to tokens a step, and to the number of drafts that pays. Counting only: no model, no torch.

A step of speculative decoding with K drafts costs one pass of the body, which verifies them, and K passes of the head. It
yields the drafts up to the first wrong one, and the body's own token there: `1 + accepted` tokens. So

    tokens a step(K) = 1 + accepted drafts / steps
    speedup(K)       = tokens a step(K) / (1 + K * (draft + verify))

where 1 is a pass of the body for one token, `draft` is what a pass of the head costs beside it, and `verify` what each
further token in the body's pass costs. When one request is served, time goes to reading weights: then `draft` is the bytes
the head and lm_head have beside those of the body and lm_head, and `verify` is nothing for a dense model; in a mixture of
experts each token reads experts of its own. `costs` computes them so. Measured times are better; both can be given.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from assemble.architecture import LM_HEAD, MTP_PREFIX, VISION_PREFIX, Architecture
from assemble.checkpoint import TensorInfo

RESAMPLES = 2000
EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class Costs:
    """What a pass of the head, and one more token in a pass of the body, cost beside a pass of the body for one token."""

    draft: float
    verify: float = 0.0
    how: str = "given"

    def speedup(self, tokens_per_step: float, num_drafts: int) -> float:
        """How much faster than without drafts."""
        return tokens_per_step / (1 + num_drafts * (self.draft + self.verify))


@dataclass(frozen=True)
class Acceptance:
    """What K drafts a step came to, over all prompts.

    Attributes:
        num_drafts: K.
        steps: Steps that drafted; `steps * K` tokens were drafted.
        accepted_by_position: How many steps accepted the first draft, the second, and so on.
        tokens_per_step: `1 + accepted / steps`.
        low: Lower end of its 95 % interval: bootstrap over prompts.
        high: Upper end.
    """

    num_drafts: int
    steps: int
    accepted_by_position: tuple[int, ...]
    tokens_per_step: float
    low: float
    high: float

    @property
    def drafted(self) -> int:
        """Tokens drafted."""
        return self.steps * self.num_drafts

    @property
    def accepted(self) -> int:
        """Drafted tokens accepted."""
        return sum(self.accepted_by_position)

    @property
    def rates(self) -> list[float]:
        """The share of steps that accepted the draft at each position."""
        return [count / self.steps if self.steps else 0.0 for count in self.accepted_by_position]


def leading_matches(drafts: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many drafts are right before the first wrong one: [..., depth] and [..., depth] -> [...]."""
    matches: npt.NDArray[np.int64] = (drafts == targets).cumprod(axis=-1).sum(axis=-1)
    return matches


def count(matches: npt.NDArray[np.int64], num_drafts: int) -> Acceptance:
    """Walks over each prompt's continuation as a server does: draft, accept, draft again after what was accepted.

    Args:
        matches: Right drafts before the first wrong one, [B, N - 1], where entry m is drafted once m + 1 of the N tokens
            are there. Drafts do not depend on how many are made, so one array serves every K.
        num_drafts: K.
    """
    steps = np.zeros(len(matches), np.int64)
    accepted = np.zeros((len(matches), num_drafts), np.int64)
    for prompt, row in enumerate(matches):
        emitted = 1  # the prompt's own pass yields the first token
        while emitted <= len(row):
            right = min(int(row[emitted - 1]), num_drafts)
            steps[prompt] += 1
            accepted[prompt, :right] += 1
            emitted += right + 1
    total = int(steps.sum())
    each = accepted.sum(axis=1)
    low, high = _interval(steps, each)
    return Acceptance(num_drafts, total, tuple(accepted.sum(axis=0).tolist()), 1 + _ratio(int(each.sum()), total), low, high)


def _interval(steps: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64]) -> tuple[float, float]:
    if not steps.sum():
        return 1.0, 1.0
    drawn = np.random.default_rng(0).integers(0, len(steps), (RESAMPLES, len(steps)))
    means = 1 + accepted[drawn].sum(axis=1) / np.maximum(1, steps[drawn].sum(axis=1))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def best(acceptances: Mapping[int, Acceptance], costs: Costs) -> tuple[int, float]:
    """The number of drafts that pays most, and its speedup; (0, 1.0) when none is faster than not drafting."""
    speedups = {k: costs.speedup(a.tokens_per_step, k) for k, a in acceptances.items()}
    k = max(speedups, key=lambda n: speedups[n], default=0)
    return (k, speedups[k]) if k and speedups[k] > 1 else (0, 1.0)


def costs(tensors: Mapping[str, TensorInfo], architecture: Architecture, head_share: float = 1.0) -> Costs:
    """The costs of one request at a time, from the bytes that each pass reads.

    A pass of the body reads every layer, lm_head and, of the routed experts, those that a token is sent to; the vision tower
    and the embedding (a row a token) are left out. A pass of the head reads the head and lm_head. Activations, the KV cache
    and kernel launches are not counted, so a small model's head costs more than this says.

    Args:
        tensors: Of the checkpoint that the body is.
        architecture: Of that checkpoint.
        head_share: The head's bytes in another format, beside those it has here.
    """
    share = 1.0
    if architecture.moe:
        share = min(1.0, float(architecture.text.get("num_experts_per_tok", 1)) / architecture.num_experts)
    read = dict.fromkeys(("layers", "experts", "head", "lm_head", "nothing"), 0.0)
    for name, tensor in tensors.items():
        read[_part(name, architecture)] += tensor.nbytes * (share if EXPERTS in name else 1.0)
    body = read["layers"] + read["experts"] + read["lm_head"]
    draft = (read["head"] * head_share + read["lm_head"]) / body
    return Costs(draft, read["experts"] / body, "bytes read a pass, one request at a time")


def _part(name: str, architecture: Architecture) -> str:
    """What a tensor belongs to, for `costs`."""
    if name.startswith(f"{LM_HEAD}."):
        return "lm_head"
    if name.startswith(MTP_PREFIX):
        return "head"
    if name.startswith(f"{architecture.prefix}embed_tokens."):
        return "lm_head" if architecture.tied else "nothing"
    if name.startswith(VISION_PREFIX):
        return "nothing"
    return "experts" if EXPERTS in name else "layers"

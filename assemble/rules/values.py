"""Rules about tensor values. All of them are answered from one pass over the files; see `assemble.rules.scan`."""

import math
from collections.abc import Iterator

from assemble.architecture import LM_HEAD, MTP_PREFIX
from assemble.formats import FP8, NVFP4, SCHEMES, W4A16_NVFP4
from assemble.rules.model import Detail, Mend, Served, Severity
from assemble.rules.scan import LARGE, Facts, same_bytes
from assemble.rules.subject import Subject

W, INFO = Severity.WARNING, Severity.INFO
ZERO_BLOCKS = 0.01  # share of a tensor's blocks; real weights have next to none
FP8_LEAST = -3.3e38  # vLLM fills scales that were not loaded with the least float32


def scales_are_sound(subject: Subject) -> Iterator[Detail]:
    """Q-8: every scale is finite and positive; block scales neither NaN (0x7f) nor negative; input scales calibrated."""
    inputs: dict[str, float] = {}
    for module, scheme in subject.modules.items():
        if scheme not in (*SCHEMES, NVFP4):
            continue
        for leaf in ("weight_scale", "weight_scale_2", "input_scale"):
            name = f"{module}.{leaf}"
            facts = subject.facts.get(name)
            if facts is None:
                continue
            if facts.value is not None:
                if not math.isfinite(facts.value) or facts.value <= 0:
                    text = f"{facts.value:g}" + (": never written" if facts.value < FP8_LEAST else "")
                    yield Detail(name, text, "finite and positive")
                elif leaf == "input_scale":
                    inputs[name] = facts.value
            elif facts.high_codes:
                total = subject.tensors[name].nbytes
                yield Detail(name, f"{facts.high_codes} of {total} block scales NaN or negative", "E4M3 from 0 to 448")
    if len(inputs) > 1 and set(inputs.values()) == {1.0}:
        name = next(iter(inputs))
        yield Detail(name, f"1.0, as all {len(inputs)} input scales: not calibrated", "measured scales", W, mend=Mend.QUANTIZE)


def few_zero_blocks(subject: Subject) -> Iterator[Detail]:
    """VAL-1: next to no block of an NVFP4 weight has scale 0 (its 16 weights are lost)."""
    for module, scheme in subject.modules.items():
        name = f"{module}.weight_scale"
        facts, tensor = subject.facts.get(name), subject.tensors.get(name)
        if facts is None or tensor is None or scheme not in (W4A16_NVFP4, NVFP4) or not tensor.nbytes:
            continue
        share = facts.zero_codes / tensor.nbytes
        if share > ZERO_BLOCKS:
            severity = Severity.ERROR if share == 1 else None
            yield Detail(name, f"{share:.1%} of the blocks have scale 0", f"at most {ZERO_BLOCKS:.0%}", severity)


def no_equal_tensors(subject: Subject) -> Iterator[Detail]:
    """VAL-2: no two large tensors have the same content (but an untied lm_head may equal the embedding)."""
    seen: dict[bytes, str] = {}
    tied = {f"{LM_HEAD}.weight", f"{subject.architecture.prefix}embed_tokens.weight"}
    for name, facts in subject.facts.items():
        if facts.sample is None or facts.zero or subject.tensors[name].nbytes < LARGE:
            continue
        other = seen.setdefault(facts.sample.digest(), name)
        if other == name or {name, other} == tied or _constant(subject, name):
            continue
        if same_bytes(subject.root, subject.tensors[other], subject.tensors[name]):
            yield Detail(name, f"the same bytes as {other}", "content of its own")


def _constant(subject: Subject, name: str) -> bool:
    """Whether a tensor starts with one byte repeated: norms of ones, biases of a fresh layer."""
    tensor = subject.tensors[name]
    with (subject.root / tensor.shard).open("rb") as file:
        file.seek(tensor.start)
        start = file.read(256)
    return start == start[:2] * (len(start) // 2)


def weights_are_finite(subject: Subject) -> Iterator[Detail]:
    """VAL-3: no weight, norm or other stored number is NaN or infinite."""
    for name, facts in subject.facts.items():
        if facts.special and facts.value is None:
            yield Detail(name, "NaN or infinite values", "finite numbers")


def matrices_are_not_zero(subject: Subject) -> Iterator[Detail]:
    """VAL-4: no matrix is all zeros."""
    for name, facts in subject.facts.items():
        if _zero_matrix(subject, name, facts) and not name.startswith(MTP_PREFIX):
            important = name == f"{LM_HEAD}.weight" or name.endswith(".embed_tokens.weight")
            yield Detail(name, "all zeros", "numbers", Severity.ERROR if important else None)


def head_is_alive(subject: Subject) -> Iterator[Detail]:
    """MTP-3b: no matrix of the MTP head is all zeros."""
    for name, facts in subject.facts.items():
        if name.startswith(MTP_PREFIX) and _zero_matrix(subject, name, facts):
            yield Detail(name, "all zeros", "the source's numbers", served=Served.SILENT)


def _zero_matrix(subject: Subject, name: str, facts: Facts) -> bool:
    tensor = subject.tensors[name]
    return facts.zero and len(tensor.shape) >= 2 and tensor.nbytes > 0 and not name.endswith("_scale")


def scales_of_real_weights(subject: Subject) -> Iterator[Detail]:
    """VAL-5: scales have the size that weights of a model give them: weight_scale_2 and weight_scale from 1e-12 to 1e3."""
    for module, scheme in subject.modules.items():
        leaf = "weight_scale" if scheme == FP8 else "weight_scale_2"
        facts = subject.facts.get(f"{module}.{leaf}")
        if facts is None or facts.value is None or not math.isfinite(facts.value) or facts.value <= 0:
            continue
        if not 1e-12 < facts.value < 1e3:
            yield Detail(f"{module}.{leaf}", f"{facts.value:g}", "the weight's largest magnitude / 448 (/ 6 for NVFP4)")

"""Checks of what vLLM made of the checkpoint: does it load, as what, on which kernels, with which KV cache?"""

import textwrap
from collections.abc import Iterator

from quantize.smoke import blame, failures, logs
from quantize.smoke.evidence import Evidence
from quantize.smoke.facts import kernels_of
from quantize.smoke.report import FAIL, NOTE, PASS, SKIP, WARN, Check
from quantize.smoke.settings import PLAIN

Checks = Iterator[Check]


def loads(evidence: Evidence) -> Checks:
    """Each pass: vLLM takes the checkpoint (`loads`) and comes to the end (`finishes`)."""
    before = ""
    for one in evidence.passes.values():
        pass_name = "" if one.name == PLAIN else f", {one.name}"
        if one.finished:
            seconds = one.result.get("seconds", {}).get("load")
            yield Check(f"loads{pass_name}", PASS, f"vLLM {one.result.get('vllm')}" + (f", {seconds:.0f} s" if seconds else ""))
            continue
        why = failures.explain(one)
        name = ("finishes" if one.loaded or why.kind is failures.Kind.UNFINISHED else "loads") + pass_name
        if why.message == before:
            yield Check(name, FAIL, f"{why.kind.value}: the same again")
            continue
        before = why.message
        culprits = evidence.broken(*why.rules) if why.rules else []
        cause = why.cause + (f" ({blame.named(culprits)})" if culprits else "")
        remedy = culprits[0].mend if culprits else why.remedy
        yield Check(
            name,
            FAIL,
            f"{why.kind.value}: {why.message}",
            "loads and generates" if not one.loaded else "comes to the end",
            cause,
            remedy,
        )


def resolution(evidence: Evidence) -> Checks:
    """What vLLM made of config.json."""
    one = next((p for p in evidence.passes.values() if p.loaded), None)
    if one is None:
        return
    found, want = one.result["resolved"], evidence.expectation
    if "architectures" not in found:  # a server does not say
        return
    if want.method is not None or not want.quantized:
        good = found.get("quantization") == want.method
        yield Check(
            "quantization",
            PASS if good else FAIL,
            str(found.get("quantization")),
            str(want.method),
            *(
                ()
                if good
                else blame.for_rules(evidence, ("CFG-6", "CFG-9"), "config.json does not declare it as vLLM reads it")
            ),
        )
    same = list(found.get("architectures") or []) == list(want.architectures)
    yield Check(
        "architecture", PASS if same else FAIL, ", ".join(found.get("architectures") or []), ", ".join(want.architectures)
    )
    drafted = evidence.drafted
    draft = (drafted.result["resolved"].get("draft") or {}) if drafted is not None and drafted.loaded else None
    if draft:
        good = want.draft in draft["architectures"]
        yield Check("draft", PASS if good else FAIL, ", ".join(draft["architectures"]), want.draft)


def kernels(evidence: Evidence) -> Checks:
    """Each listed scheme is computed by a kernel of its own, and not by emulation."""
    loaded = [p for p in evidence.passes.values() if p.loaded]
    if not loaded:
        return
    chosen = kernels_of(loaded[0])
    if not loaded[0].log:
        yield Check("kernels", SKIP, "a server does not say")
        return
    counts = logs.num_quantized((loaded[0].result.get("inside") or {}).get("target") or {})
    for scheme in evidence.expectation.schemes:
        names = chosen.get(scheme, [])
        if names:
            layers = f", {counts[scheme]} layers" if counts.get(scheme) else ""
            slow = any("emulat" in name.lower() for name in names)
            yield Check(f"kernel, {scheme}", WARN if slow else PASS, ", ".join(names) + layers, "a real kernel" if slow else "")
        else:
            yield Check(f"kernel, {scheme}", WARN, "neither the log nor the layers name one", "a kernel for the listed layers")
    for sign, line in failures.signs(loaded[0].log):
        found = evidence.broken(*sign.rules)
        cause = sign.meaning + (f" ({blame.named(found)})" if found else "")
        yield Check("log", WARN, textwrap.shorten(line, 240, placeholder=" ..."), "", cause, found[0].mend if found else "")


def kv_cache(evidence: Evidence) -> Checks:
    """An FP8 KV cache, in the config that vLLM resolved and in each attention layer that it built."""
    loaded = [p for p in evidence.passes.values() if p.loaded]
    if not loaded:
        return
    declared = str(loaded[0].result["resolved"].get("kv_cache_dtype") or "unknown")
    built = dict((loaded[-1].result.get("inside") or {}).get("kv_cache") or {})
    wrong = {entry: count for entry, count in built.items() if not entry.startswith("fp8")}
    found = declared + (f" ({', '.join(f'{count} x {entry}' for entry, count in built.items())})" if built else "")
    if not evidence.expectation.quantized or declared == "unknown":
        yield Check("KV cache", NOTE if built else SKIP, found)
    elif declared.startswith("fp8") and not wrong:
        yield Check("KV cache", PASS, found)
    else:
        text = "the KV cache is served in BF16, at twice the size: config.json does not declare it"
        yield Check("KV cache", FAIL, found, "fp8", *blame.for_rules(evidence, ("CFG-8",), text))
    tokens = logs.pool_tokens(loaded[-1].log) or loaded[-1].result.get("kv_cache_tokens")
    yield Check("KV pool", NOTE if tokens else SKIP, f"{tokens:,} tokens" if tokens else "the log does not say")

"""What only vLLM's log tells: the kernels that were chosen, and the room for keys and values.

The wording differs by release; each pattern names where it was read. What a log does not say is absent here, never guessed.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime

NVFP4, FP8, ATTENTION, EXPERTS = "NVFP4", "FP8", "attention", "experts"
_KERNELS: tuple[tuple[str, str], ...] = (
    # vLLM 0.26 and 0.32 kernels/linear/__init__.py init_nvfp4_linear_kernel
    (NVFP4, r"Using (\w+) for NVFP4 GEMM"),
    # vLLM 0.26 and 0.32 kernels/linear/__init__.py init_fp8_linear_kernel: the kernel, for the class that asks
    (FP8, r"Selected (\w*F[pP]8\w*) for \w+"),
    # vLLM 0.26 and 0.32 platforms/cuda.py get_attn_backend_cls, both wordings
    (ATTENTION, r"Using (?:AttentionBackendEnum\.)?(\w+) attention backend"),
    (ATTENTION, r"Using (?:AttentionBackendEnum\.)?(\w+) backend\."),
    # vLLM 0.26 and 0.32 fused_moe/oracle/nvfp4.py, unquantized.py
    (EXPERTS, r"Using '?(\w+)'? NvFp4 MoE backend"),
    (EXPERTS, r"Using '?(\w+)'? Unquantized MoE backend"),
)
_POOL = re.compile(r"KV cache size: ([\d,]+) tokens")  # vLLM 0.26 and 0.32 v1/core/kv_cache_utils.py get_kv_cache_configs
# vLLM 0.26 logging_utils/formatter.py: `(EngineCore pid=7) INFO 11-29 23:15:27 [file.py:1] text`; glog: `[W1129 23:15:10.86`
_PREFIX = r"(?:\([^)]*\)\s*)*"
_CHATTER = re.compile(_PREFIX + r"(?:(?:DEBUG|INFO|WARNING)\b|\[[IW]\d{4} )")
_ERROR = re.compile(_PREFIX + r"(?:ERROR|CRITICAL)\b[^\]]*\]\s*(.*)")
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?$")  # the last line of a traceback
_TIME = re.compile(_PREFIX + r"[A-Z]+ (\d\d-\d\d \d\d:\d\d:\d\d) ")
_METHODS: tuple[tuple[str, str], ...] = ((NVFP4, "nvfp4"), (FP8, "fp8"))  # in the name of a method, or of its weight's scheme


def kernels(log: str) -> dict[str, list[str]]:
    """Kind of computation -> the kernels that the log says were chosen, in the order of first mention."""
    found: dict[str, list[str]] = {}
    for kind, pattern in _KERNELS:
        for name in re.findall(pattern, log):
            if name not in found.setdefault(kind, []):
                found[kind].append(name)
    return {kind: names for kind, names in found.items() if names}


def kernels_of_layers(layers: Mapping[str, int]) -> dict[str, list[str]]:
    """The same from the layers themselves, as the runner counted them: `class: method: kernel` -> how many."""
    found: dict[str, list[str]] = {}
    for kind, kernel in _kinds(layers):
        if kernel != "-" and kernel not in found.setdefault(kind, []):
            found[kind].append(kernel)
    return {kind: names for kind, names in found.items() if names}


def num_quantized(layers: Mapping[str, int]) -> dict[str, int]:
    """How many layers have an NVFP4 and how many an FP8 method."""
    counts = dict.fromkeys((NVFP4, FP8), 0)
    for entry, count in layers.items():
        kind = _kind(entry.split(": ")[1])
        if kind:
            counts[kind] += count
    return counts


def pool_tokens(log: str) -> int | None:
    """The tokens that the KV pool holds, all requests together; the smallest of the workers'."""
    sizes = [int(size.replace(",", "")) for size in _POOL.findall(log)]
    return min(sizes) if sizes else None


def without_chatter(log: str) -> str:
    """The lines that are neither information nor a warning: what may say why vLLM stopped."""
    return "\n".join(line for line in log.splitlines() if not _CHATTER.match(line))


def last_error(log: str) -> str:
    """The last exception in a log, else the last line of level ERROR; empty when there is neither."""
    exception = error = ""
    for line in log.splitlines():
        leveled = _ERROR.match(line)
        text = leveled[1].strip() if leveled else re.sub("^" + _PREFIX, "", line).rstrip()
        if leveled and text:
            error = text
        if _EXCEPTION.match(text) and "See root cause above" not in text:
            exception = text
    return (exception or error)[:400]


def span(log: str) -> float:
    """Seconds between a log's first line with a time and its last."""
    found = (match for match in map(_TIME.match, log.splitlines()) if match)
    times = [datetime.strptime(f"2000-{match[1]}", "%Y-%m-%d %H:%M:%S") for match in found]
    return max(0.0, (times[-1] - times[0]).total_seconds()) if times else 0.0


def _kinds(layers: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for entry in layers:
        _, method, kernel = entry.split(": ", 2)
        kind = _kind(method)
        if kind:
            yield kind, kernel


def _kind(method: str) -> str | None:
    return next((kind for kind, part in _METHODS if part in method.lower()), None)

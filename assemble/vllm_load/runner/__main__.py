"""Loads checkpoints with vLLM's own code, but without their weights, and prints what was written where.

This folder is not imported. `assemble/vllm_load/client.py` runs it with the interpreter of an environment that has vLLM's
CPU build, so it may use torch, vllm and the standard library, and nothing of this project. It reads a JSON object on stdin,

    {"loads": [[PATH, N], ...]}

(a checkpoint and a tensor-parallel size each) and prints JSON lines on stdout: first {"vllm": version}, then one object a
load, as soon as it is known.

vLLM resolves the config, picks each layer's quantization method, builds target and draft, and runs their loaders; no
kernel runs. Every parameter and every tensor is on torch's "meta" device: it has a dtype, a shape and strides, but no
memory, so the size of a checkpoint does not matter, and its shards may hold headers alone.

vLLM checks that nothing is missing for unquantized checkpoints only. In a quantized one, a parameter that no tensor fills
keeps whatever was in memory. So each write into a parameter is recorded, and the sum is compared with its size.

`stand_ins.py` holds what is replaced in vLLM, and `recorder.py` what sees the writes.
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

os.environ |= {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}

import torch
import vllm
from recorder import Recorder, Written, word
from stand_ins import OpenHeader, put_in_place, take_rank
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

TOWER = "visual."
SHARED = ("model.embed_tokens.", "lm_head.")  # of the draft: vLLM fills them, then puts the target's in their place
KV_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
EXPERT_INPUT_SCALES = ("w13_input_scale", "w2_input_scale")

Problem = dict[str, str]


def optional(model: torch.nn.Module, name: str) -> bool:
    """Whether a good checkpoint may leave out a parameter: vLLM makes it as a place-holder.

    Absent KV-cache scales count as 1.0; weight-only layers have an `input_scale` that is dropped after loading.
    """
    parent, _, leaf = name.rpartition(".")
    method = getattr(model.get_submodule(parent), "quant_method", None)
    if leaf in KV_SCALES:
        return type(method).__name__.endswith("KVCacheMethod") or parent.endswith(".attn")
    if leaf == "input_scale":
        spec = getattr(method, "spec", None)
        return spec is not None and spec.activation is None
    return leaf in EXPERT_INPUT_SCALES and bool(getattr(method, "use_a16", False))


def unfilled(model: torch.nn.Module, recorder: Recorder, part: str) -> Iterator[Problem]:
    """Every parameter that was not written exactly once, from tensors of its own kind."""
    parameters = dict(model.named_parameters())
    tower = [name for name in parameters if name.startswith(TOWER)]
    towerless = bool(tower) and not any(recorder.written[name].regions for name in tower)
    if towerless:
        yield problem("TOWER", "visual", f"nothing was written into any of its {len(tower)} parameters")
    for name, parameter in parameters.items():
        if not (towerless and name.startswith(TOWER)) and not (part == "draft" and name.startswith(SHARED)):
            yield from _judge(name, parameter, recorder.written[name], may_be_absent=optional(model, name))


def _judge(name: str, parameter: torch.nn.Parameter, written: Written, *, may_be_absent: bool) -> Iterator[Problem]:
    shape, numel = tuple(parameter.shape), parameter.numel()
    coverage = written.coverage(numel)
    what = f"{word(parameter.dtype)} {list(shape)}"
    if coverage.once < numel and not may_be_absent:
        if not coverage.once:
            yield problem("MISSING", name, f"{what}: nothing was written")
        else:
            place = "" if coverage.gap is None else f", none at {_index(coverage.gap, shape)}"
            yield problem("PARTIAL", name, f"{what}: {coverage.once} of {numel} elements were written{place}")
    if coverage.again:
        yield problem("TWICE", name, f"{what}: {coverage.again} elements were written again")
    for cast in sorted(written.casts):
        yield problem("CAST", name, cast)


def half_used(recorder: Recorder) -> Iterator[Problem]:
    """Every checkpoint tensor of which a part was used and the rest dropped: its shape does not fit."""
    for name, tensor in recorder.tensors:
        used, numel = recorder.used[name], tensor.numel()
        if 0 < used < numel:
            yield problem("CUT", name, f"{word(tensor.dtype)} {list(tensor.shape)}: {used} of {numel} elements were used")


def refusal(error: Exception, during: str) -> Problem:
    """The error and the line that raised it, since vLLM's assertions have no message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split()).partition(" [type=")[0][:600]  # what follows in pydantic's texts is its own affair
    where = f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
    return problem("ERROR", during, f"{type(error).__name__}: {text} [{where}]")


def problem(kind: str, name: str, detail: str) -> Problem:
    """One thing that is wrong: `name` is a parameter, a checkpoint tensor (CUT), or what was read when it came up (ERROR)."""
    return {"kind": kind, "name": name, "detail": detail}


def _index(element: int, shape: tuple[int, ...]) -> list[int]:
    return [element // math.prod(shape[i + 1 :]) % shape[i] for i in range(len(shape))]


def engine_config(checkpoint: str, tp: int) -> VllmConfig:
    """What `vllm serve` with one drafted token makes of the checkpoint's config; images enabled, so the tower is built too."""
    return EngineArgs(
        model=checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        safetensors_load_strategy="lazy",  # never read a shard through beforehand, as is done on network file systems
        use_tqdm_on_load=False,
        tensor_parallel_size=tp,
        distributed_executor_backend="mp" if tp > 1 else None,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()


def load_part(part: str, config: VllmConfig, model_config: ModelConfig, tp: int) -> tuple[dict[str, Any], Recorder | None]:
    """Builds one model and loads it.

    Returns:
        How many of its parameters were filled, and what is wrong; and what was recorded, unless vLLM refused.
    """
    recorder = None
    try:
        with set_default_torch_dtype(model_config.dtype), set_current_vllm_config(config):
            with torch.device("meta"):
                model = initialize_model(vllm_config=config, model_config=model_config)
            recorder = Recorder(model)
            OpenHeader.recorder = recorder
            with recorder:
                get_model_loader(config.load_config).load_weights(model, model_config)
    except Exception as error:
        return {"problems": [refusal(error, recorder.reading if recorder else "config.json")]}, None
    result = {
        "class": type(model).__name__,
        "parameters": len(recorder.written),
        "written": sum(bool(written.regions) for written in recorder.written.values()),
        "problems": [*unfilled(model, recorder, part), *(half_used(recorder) if tp == 1 else ())],
    }
    return result, recorder


def load_rank(config: VllmConfig, rank: int, tp: int) -> Iterator[dict[str, Any]]:
    """Loads target and draft as one rank; then says which tensors neither of them took."""
    recorders = []
    for part, model_config in (("target", config.model_config), ("draft", config.speculative_config.draft_model_config)):
        result, recorder = load_part(part, config, model_config, tp)
        recorders.append(recorder)
        yield {"part": part, "rank": rank} | result
    if None not in recorders:
        dropped = [n for n, _ in recorders[0].tensors if not any(recorder.used[n] for recorder in recorders)]
        problems = [problem("UNUSED", name, "neither target nor draft has a place for it") for name in dropped]
        yield {"part": "files", "rank": rank, "problems": problems}


def check(checkpoint: str, tp: int) -> dict[str, Any]:
    """Loads a checkpoint as the first and as the last of `tp` ranks."""
    started = time.monotonic()
    result: dict[str, Any] = {"checkpoint": checkpoint, "tp": tp, "parts": []}
    for rank in sorted({0, tp - 1}):
        take_rank(rank, tp)
        try:
            config = engine_config(checkpoint, tp)  # a new one each time: vLLM's layers enter their names into it
        except Exception as error:
            result["parts"].append({"part": "config", "rank": rank, "problems": [refusal(error, "config.json")]})
            break
        result |= {"architecture": config.model_config.architecture, "quantization": config.model_config.quantization}
        result["kv_cache"] = str(config.cache_config.cache_dtype)
        result["parts"] += load_rank(config, rank, tp)
    result["seconds"] = round(time.monotonic() - started, 2)
    return result


@contextlib.contextmanager
def results_stream() -> Iterator[TextIO]:
    """Keeps stdout for the results: what vLLM or a library prints there goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)
        yield stream


def main() -> None:
    """Answers the job on stdin."""
    job = json.load(sys.stdin)
    logging.disable(logging.WARNING)
    put_in_place()
    with results_stream() as stream:
        print(json.dumps({"vllm": vllm.__version__}), file=stream, flush=True)
        for checkpoint, tp in job["loads"]:
            print(json.dumps(check(checkpoint, tp)), file=stream, flush=True)
    os._exit(0)  # the process group's threads need no tidy end


if __name__ == "__main__":
    main()

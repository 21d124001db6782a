"""Loads a checkpoint in vLLM once, generates, and writes down what happened as JSON. It judges nothing.

    python smoke_runner.py SETTINGS.json RESULT.json [--model DIR]

This file is not imported. The interpreter of an environment that has vLLM runs it, on this machine, in a container or on
another machine, so it uses vLLM and the standard library and nothing of this project. What vLLM prints goes to RESULT.log
beside the result. The result is rewritten after every phase, so a process that is killed leaves what was known by then.

SETTINGS holds (`quantize/smoke/settings.py` writes it):

    protocol      1
    model         the checkpoint's directory (--model replaces it)
    engine        arguments of vllm.LLM that must be understood
    optional      further arguments, dropped where this vLLM has no such field; the result names them
    marlin_from   for a mixture of experts: from this vLLM on, ask for Marlin experts, and Triton's in the BF16 head; else null.
                  A model without a quantization_config is left alone
    environment   environment variables, set unless they are set already
    speculative   vLLM's speculative_config, or null for a run without the MTP head
    canary        chat messages, rendered through the checkpoint's own template
    probe         a text that is only tokenized
    prompts       each {"text", "cut_tokens"}, {"prompt_token_ids"} or {"messages"}; optionally "ignore_eos" and "max_tokens"
    max_tokens    new tokens a prompt
    logprobs      candidates kept a generated token
    nll           whether to score the prompts' own tokens
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import platform
import sys
import time
import traceback
from pathlib import Path

PROTOCOL = 1


def main():
    """Runs one pass; exit code 0 when it was finished, 1 when vLLM failed (the result says how)."""
    parser = argparse.ArgumentParser(description="Load a checkpoint in vLLM once, generate, and write down what happened.")
    parser.add_argument("settings", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--model", help="the checkpoint's directory, in place of the one in the settings")
    args = parser.parse_args()
    settings = json.loads(args.settings.read_text(encoding="utf-8"))
    if settings["protocol"] != PROTOCOL:
        sys.exit(f"smoke_runner.py speaks protocol {PROTOCOL}, and {args.settings} is of protocol {settings['protocol']}")
    for name, value in settings["environment"].items():
        os.environ.setdefault(name, value)
    log_to(args.result.with_suffix(".log"))
    run = Run(settings, args.model or settings["model"], args.result)
    try:
        run.all()
    except BaseException as error:  # the reason is what is wanted, whatever it is
        traceback.print_exc()
        run.note(
            error={"type": type(error).__name__, "message": str(error)[:4000], "traceback": traceback.format_exc()[-8000:]}
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if run.result["ok"] else 1)  # vLLM's threads can hang at the interpreter's end


def log_to(path):
    """Sends what this process and its children print to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)


class Run:
    """One load and what is done with it. `result` is what is written."""

    def __init__(self, settings, model, path):
        self.settings, self.model, self.path = settings, model, path
        self.started = time.monotonic()
        self.result = {
            "protocol": PROTOCOL,
            "ok": False,
            "mtp": settings["speculative"] is not None,
            "phase": "import",
            "seconds": {},
            "error": None,
            "python": platform.python_version(),
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("VLLM_", "CUDA_VISIBLE"))},
        }

    def note(self, **facts):
        """Adds facts and writes the file anew: first beside it, then renamed, so that no reader meets half of it."""
        self.result.update(facts)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(plain(self.result), allow_nan=False), encoding="utf-8")
        part.replace(self.path)

    def phase(self, name):
        """Ends the phase that was running and begins another."""
        now = time.monotonic()
        self.result["seconds"][self.result["phase"]] = round(now - self.started, 2)
        self.started = now
        self.note(phase=name)

    def all(self):
        """Import, load, look inside, canary, prompts, likelihood: in the order of what is most worth knowing."""
        self.note()
        import vllm

        self.note(vllm=vllm.__version__, platform=machine())
        self.phase("load")
        self.note(**chosen_arguments(self.settings, vllm.__version__, self.model))
        llm = vllm.LLM(model=self.model, **self.result["engine"])
        self.phase("inspect")
        self.note(resolved=resolved(llm.llm_engine.vllm_config), inside=look_inside(llm))
        self.phase("canary")
        tokenizer = llm.get_tokenizer()
        probe = {
            "text": self.settings["probe"],
            "ids": list(tokenizer.encode(self.settings["probe"], add_special_tokens=False)),
        }
        self.note(
            vocabulary=len(tokenizer), probe=probe, canary=self.generate(llm, [self.ids(tokenizer, self.settings["canary"])])[0]
        )
        self.phase("generate")
        entries = [self.ids(tokenizer, entry) for entry in self.settings["prompts"]]
        before = speculation(llm)
        begun = time.monotonic()
        outputs = self.generate(llm, entries)
        seconds = round(time.monotonic() - begun, 3)
        self.note(outputs=outputs, generate_seconds=seconds, speculation=difference(before, speculation(llm)))
        if self.settings["nll"]:
            self.phase("nll")
            self.note(prompt_logprobs=likelihood(llm, entries))
        self.phase("done")
        self.note(ok=True)

    def ids(self, tokenizer, entry):
        """An entry with its token ids, cut where it asks for it."""
        if "prompt_token_ids" in entry:
            return entry
        if "messages" in entry:
            text = tokenizer.apply_chat_template(entry["messages"], tokenize=False, add_generation_prompt=True)
            return {**entry, "rendered": text, "prompt_token_ids": list(tokenizer.encode(text, add_special_tokens=False))}
        tokens = list(tokenizer.encode(entry["text"], add_special_tokens=False))
        return {**entry, "prompt_token_ids": tokens[: entry.get("cut_tokens")]}

    def generate(self, llm, entries):
        """Greedy continuations, with the candidates' log probabilities."""
        from vllm import SamplingParams

        most = self.settings["max_tokens"]
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=entry.get("max_tokens", most),
                ignore_eos=entry.get("ignore_eos", False),
                logprobs=self.settings["logprobs"],
            )
            for entry in entries
        ]
        prompts = [{"prompt_token_ids": entry["prompt_token_ids"]} for entry in entries]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [row(entry, output) for entry, output in zip(entries, outputs, strict=True)]


def chosen_arguments(settings, version, model):
    """The arguments that vllm.LLM is given, and the optional ones that this version does not have."""
    from vllm.engine.arg_utils import EngineArgs

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    engine = dict(settings["engine"])
    dropped = []
    for name, value in settings["optional"].items():
        if name in fields:
            engine.setdefault(name, value)
        else:
            dropped.append(name)
    speculative = dict(settings["speculative"]) if settings["speculative"] else None
    since = settings["marlin_from"]
    if since and "moe_backend" in fields and numbers(version) >= numbers(since) and quantized(model):
        engine.setdefault("moe_backend", "marlin")
        if speculative is not None and engine["moe_backend"] == "marlin":
            speculative.setdefault("moe_backend", "triton")
    if speculative is not None:
        engine.setdefault("speculative_config", speculative)
    return {"engine": engine, "dropped": dropped}


def quantized(model):
    """Whether config.json says so: the settings of a quantized checkpoint may be used for its source, too."""
    return "quantization_config" in json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))


def numbers(version):
    """The release as numbers that compare: `0.27.2rc1.dev110` is (0, 27)."""
    return tuple(int(part) for part in version.split(".")[:2])


def machine():
    """The device that vLLM sees: kind, names, compute capability, memory."""
    from vllm.platforms import current_platform

    facts = {"device": current_platform.device_type, "gpus": []}
    if facts["device"] != "cuda":
        return facts
    for index in range(current_platform.device_count()):
        capability = current_platform.get_device_capability(index)
        facts["gpus"].append(
            {
                "name": current_platform.get_device_name(index),
                "capability": [capability.major, capability.minor] if capability else None,
                "memory_bytes": current_platform.get_device_total_memory(index),
            }
        )
    return facts


def resolved(config):
    """What vLLM made of config.json, for the target and for the draft."""
    facts = {
        "architectures": list(config.model_config.architectures),
        "quantization": config.model_config.quantization,
        "dtype": str(config.model_config.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "max_model_len": config.model_config.max_model_len,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "draft": None,
    }
    if config.speculative_config is not None:
        draft = config.speculative_config.draft_model_config
        facts["draft"] = {
            "method": config.speculative_config.method,
            "num_speculative_tokens": config.speculative_config.num_speculative_tokens,
            "architectures": list(draft.architectures),
            "quantization": draft.quantization,
        }
    return facts


def look_inside(llm):
    """Layers and KV cache of the first worker, or why they cannot be told."""
    try:
        return llm.collective_rpc(inspect_worker)[0]
    except Exception as error:  # an engine in a process of its own takes no functions by default
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def inspect_worker(worker):
    """Counts layers by quantization method and kernel, and the attention layers by the dtype of their KV cache."""

    def layers(model):
        counts = collections.Counter()
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is None:
                continue
            found = (getattr(method, name, None) for name in ("kernel", "fp8_linear", "experts_cls"))
            kernel = next((k for k in found if k is not None), None)
            kernel = getattr(kernel, "__name__", type(kernel).__name__) if kernel is not None else "-"
            scheme = getattr(method, "wkey", None)  # from 0.32 on one class does all linear methods; its weight's scheme tells
            name = type(method).__name__ + (f"[{type(scheme).__name__}]" if scheme is not None else "")
            counts[f"{type(module).__name__}: {name}: {kernel}"] += 1
        return dict(counts)

    runner = worker.model_runner
    facts = {"target": layers(worker.get_model()), "draft": None, "kv_cache": {}}
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    if getattr(drafter, "model", None) is not None:
        facts["draft"] = layers(drafter.model)
    counts = collections.Counter()
    for layer in runner.vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if hasattr(layer, "kv_cache_dtype") and cache is not None:
            tensor = cache[0] if isinstance(cache, (list, tuple)) and cache else cache
            counts[f"{layer.kv_cache_dtype}: {getattr(tensor, 'dtype', None)}"] += 1
    facts["kv_cache"] = dict(counts)
    return facts


def row(entry, output):
    """One prompt's continuation: ids, text, and for each token the best candidates as [id, log probability]."""
    made = output.outputs[0]
    steps = []
    for token, candidates in zip(made.token_ids, made.logprobs or [], strict=False):
        best = sorted(((c.logprob, int(i)) for i, c in candidates.items()), key=lambda pair: -order(pair[0]))
        steps.append({"id": int(token), "logprob": candidates[token].logprob, "top": [[i, lp] for lp, i in best]})
    return {
        "prompt_token_ids": list(entry["prompt_token_ids"]),
        "rendered": entry.get("rendered"),
        "token_ids": [int(token) for token in made.token_ids],
        "text": made.text,
        "finish_reason": made.finish_reason,
        "steps": steps,
    }


def order(number):
    """A key that sorts NaN last."""
    return -math.inf if math.isnan(number) else number


def speculation(llm):
    """vLLM's own counters of the draft so far; None without one."""
    values = {}
    for metric in llm.get_metrics():
        if "spec_decode_num_" in metric.name:
            values[metric.name.split("spec_decode_num_")[-1]] = getattr(metric, "values", getattr(metric, "value", None))
    if not values:
        return None
    return {
        "drafts": values.get("drafts") or 0,
        "draft_tokens": values.get("draft_tokens") or 0,
        "accepted_tokens": values.get("accepted_tokens") or 0,
        "accepted_by_position": list(values.get("accepted_tokens_per_pos") or []),
    }


def difference(before, after):
    """What was counted between two readings."""
    if after is None or before is None:
        return after
    positions = after["accepted_by_position"]
    earlier = before["accepted_by_position"] or [0] * len(positions)
    counts = {key: after[key] - before[key] for key in ("drafts", "draft_tokens", "accepted_tokens")}
    return {**counts, "accepted_by_position": [a - b for a, b in zip(positions, earlier, strict=True)]}


def likelihood(llm, entries):
    """For each prompt, the log probability of every token but the first; or why it could not be had."""
    from vllm import SamplingParams

    rows = []
    for entry in entries:  # one at a time: the scores of a whole prompt take room that was not set aside
        ids = entry["prompt_token_ids"]
        try:
            sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
            scored = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0].prompt_logprobs
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}
        rows.append([scored[i][ids[i]].logprob for i in range(1, len(ids))])
    return {"prompts": rows}


def plain(value):
    """A value that JSON has: NaN and infinities become words, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


if __name__ == "__main__":  # the engine's own processes start this file again
    main()

"""What vLLM is asked to do in a smoke test: settings that are safe for this family, each for a reason.

A smoke test is two passes over the same prompts, each a vLLM of its own: `plain`, without the MTP head, and `mtp`, with it.
A third, `graphs`, is `mtp` once more with compilation and CUDA graphs, where it is asked for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from assemble.jsonfile import read_object
from recipes.schema import Smoke

PROTOCOL = 1  # of runner/smoke_runner.py
PLAIN, MTP, GRAPHS = "plain", "mtp", "graphs"
RUNNER = Path(__file__).parent / "runner" / "smoke_runner.py"

MAX_MODEL_LEN = 2048  # prompts are short; the KV pool is for nothing else
ENGINE: Mapping[str, Any] = {
    "seed": 0,
    "enforce_eager": True,  # compilation hides which layer failed, and takes a minute more
    "enable_prefix_caching": False,  # with MTP it corrupts the output of hybrid models (vllm#43559, #47194, #53912)
    "max_num_seqs": 8,  # 'max_num_seqs exceeds available Mamba cache blocks' with the default of 1024 (recipes#831)
    # A hybrid model's attention block is as large as a layer's recurrent state: 2,096 tokens with 35B-A3B and an FP8 KV
    # cache, and vLLM 0.26 config/vllm.py validate_block_size wants the batch to hold one. Its default of 2,048 does not.
    "max_num_batched_tokens": 4096,
    "disable_log_stats": False,  # else vLLM counts no drafts
}
OPTIONAL: Mapping[str, Any] = {
    "language_model_only": True,  # no vision tower: with it, CUDA graphs and MTP, vLLM 0.26's prompt_logprobs are near uniform
}
# Weight-only experts: newer releases prefer Humming on sm_90 (vLLM 0.33 fused_moe/oracle/nvfp4.py); sm_120 runs Marlin, so
# Marlin is what is to be tried. The head's BF16 experts refuse that name (oracle/unquantized.py map_unquantized_backend);
# the runner gives them "triton". Releases up to 0.26 take Marlin by themselves, and naming it there would stop the head.
MARLIN_FROM = "0.27"
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: layers can be looked into
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # kernels and the KV pool are told in the log alone
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRITON_CACHE_AUTOTUNING": "1",  # else the GDN kernels are tuned anew in each pass: 95 s on an H200
    "TOKENIZERS_PARALLELISM": "false",
}
LOGPROBS = 5
# What tokenizers split differently: indentation, digits, apostrophes, accents, line ends.
PROBE = "def f(x):\n        return x + 1234  # it's 10:30, caf\u00e9, \u4f60\u597d\n\n\n\tdon't\r\n"
CANARY = {
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    "max_tokens": 64,
}


@dataclass(frozen=True)
class Ask:
    """What a smoke test is to do, and with what.

    Attributes:
        checkpoint: The checkpoint's directory.
        recipe: Limits and lengths.
        prompts: What is generated from; see `prompts.py`.
        tensor_parallel_size: The number of GPUs.
        cuda_graphs: Whether to add the `graphs` pass.
        engine: Engine arguments of the user's, on top of ours. A value of None takes ours away.
    """

    checkpoint: Path
    recipe: Smoke
    prompts: Sequence[Mapping[str, Any]]
    tensor_parallel_size: int = 1
    cuda_graphs: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pass_names(self) -> tuple[str, ...]:
        """The passes, in the order they run."""
        return (PLAIN, MTP, GRAPHS) if self.cuda_graphs else (PLAIN, MTP)

    def settings(self, name: str, model: str | None = None) -> dict[str, Any]:
        """One pass's settings, as the runner reads them.

        Args:
            name: `plain`, `mtp` or `graphs`.
            model: Where the runner finds the checkpoint, when that is not where we find it.
        """
        config = read_object(self.checkpoint / "config.json")
        engine = dict(ENGINE) | {"max_model_len": _max_model_len(config)}
        if self.tensor_parallel_size > 1:
            engine["tensor_parallel_size"] = self.tensor_parallel_size
        if name == GRAPHS:
            engine["enforce_eager"] = False
        optional = {key: value for key, value in OPTIONAL.items() if key not in self.engine}
        engine = {key: value for key, value in (engine | dict(self.engine)).items() if value is not None}
        speculative = {"method": "mtp", "num_speculative_tokens": self.recipe.num_speculative_tokens}
        return {
            "protocol": PROTOCOL,
            "model": model or str(self.checkpoint.absolute()),
            "engine": engine,
            "optional": optional,
            "marlin_from": MARLIN_FROM if _quantized_experts(config) else None,
            "environment": dict(ENVIRONMENT),
            "speculative": None if name == PLAIN else speculative,
            "canary": CANARY,
            "probe": PROBE,
            "prompts": [dict(prompt) for prompt in self.prompts],
            "max_tokens": self.recipe.max_new_tokens,
            "logprobs": LOGPROBS,
            "nll": name == PLAIN,
        }


def _max_model_len(config: Mapping[str, Any]) -> int:
    most = config.get("text_config", config).get("max_position_embeddings", MAX_MODEL_LEN)
    return min(MAX_MODEL_LEN, most) if isinstance(most, int) else MAX_MODEL_LEN


def _quantized_experts(config: Mapping[str, Any]) -> bool:
    return "quantization_config" in config and "num_experts" in config.get("text_config", config)


def parse_engine_arguments(text: str, option: str = "--engine-args") -> dict[str, Any]:
    """Engine arguments given as a JSON object, in vLLM's Python spelling.

    Args:
        text: The object.
        option: Where it was given.

    Raises:
        InputError: it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{option} is not JSON ({error}). Give an object, such as '{{\"max_num_seqs\": 4}}'.") from error
    if not isinstance(value, dict):
        raise InputError(f"{option} must be a JSON object of vLLM's engine arguments, found {text[:80]!r}.")
    return {str(key).replace("-", "_"): item for key, item in value.items()}

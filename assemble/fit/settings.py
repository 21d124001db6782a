"""The flags of `vllm serve` that decide how memory is spent, and what vLLM fills in where they are not given."""

import dataclasses
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from assemble.errors import InputError
from assemble.fit.cards import Card

GIB = 1024**3
BIG_CARD_BYTES = 70 * GIB
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM 0.32 config/lora.py `MaxLoRARanks`
KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "bfloat16")
STATE_DTYPES = ("auto", "float32", "bfloat16", "float16")
GRAPH_MODES = ("FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "NONE")
WORKSPACE_BYTES = 394 * 1024 * 1024  # vLLM 0.20 to 0.32 envs.py VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE


class SettingError(InputError):
    """A setting that vLLM would refuse."""


@dataclass(frozen=True)
class Behaviour:
    """What differs between versions of vLLM, as far as memory goes.

    Attributes:
        counts_graphs: CUDA graphs are measured at startup and taken from the budget. True in the wheels of 0.20, 0.25, 0.27
            and 0.32 (envs.py VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS), though 0.27's log says "since v0.21.0".
        caches_prefixes: Prefix caching is on by default for hybrid models. False in 0.20 and 0.25.1 (config/model.py
            `is_prefix_caching_supported`), and in 0.26 and 0.27.1 (engine/arg_utils.py, "opt-in for now"); pull request 50991
            took that away: True in the nightlies called 0.27.2rc1, 0.28 and 0.32.
        reserves_null_block: One block of the pool is held back when the longest request is checked. False in 0.27.1, True
            in 0.32 (v1/core/kv_cache_utils.py `get_kv_cache_configs`); 0.28 to 0.31 were not read.
    """

    counts_graphs: bool
    caches_prefixes: bool
    reserves_null_block: bool


@dataclass(frozen=True)
class ServeSettings:
    """`vllm serve`'s flags by their names, with `-` as `_`; None is "not given".

    Attributes:
        gpu_memory_utilization: Share of a card's memory that vLLM budgets with (0.92: vLLM 0.20 to 0.32 config/cache.py).
        max_model_len: Longest request in tokens; None for the model's own maximum.
        max_num_seqs: Requests a step; None for 256, or 1024 on a card of 70 GiB or more.
        max_num_batched_tokens: Tokens a step; None for 2048, or 8192 on a card of 70 GiB or more.
        kv_cache_dtype: `auto` is the checkpoint's own declaration, BF16 without one.
        mamba_cache_dtype: Of the convolution's state; `auto` is the model's dtype.
        mamba_ssm_cache_dtype: Of the recurrent state; `auto` is config.json's `mamba_ssm_dtype` (float32 as published).
        max_lora_rank: 0 without --enable-lora.
        max_loras: Adapters in one batch.
        num_speculative_tokens: K of the MTP head; 0 when it does not draft.
        cudagraph_mode: `NONE` is --enforce-eager.
        max_cudagraph_capture_size: None for vLLM's own.
        language_model_only: The vision tower is not built.
        enable_prefix_caching: None for the version's default.
        flashinfer_workspace_bytes: VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE; None for 394 MiB.
        vllm: The version whose behaviour is meant.
    """

    gpu_memory_utilization: float = 0.92
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    max_lora_rank: int = 0
    max_loras: int = 1
    num_speculative_tokens: int = 0
    cudagraph_mode: str = "FULL_AND_PIECEWISE"
    max_cudagraph_capture_size: int | None = None
    language_model_only: bool = False
    enable_prefix_caching: bool | None = None
    flashinfer_workspace_bytes: int | None = None
    vllm: str = "0.32"

    def __post_init__(self) -> None:
        positive = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_loras", "max_cudagraph_capture_size")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{_flag(name)} must be at least 1, found {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SettingError(f"--gpu-memory-utilization is a share of the card, 0 to 1, found {self.gpu_memory_utilization}")
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES)
        _one_of("mamba_cache_dtype", self.mamba_cache_dtype, STATE_DTYPES)
        _one_of("mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, STATE_DTYPES)
        _one_of("cudagraph_mode", self.cudagraph_mode, GRAPH_MODES)
        if self.max_lora_rank and self.max_lora_rank not in LORA_RANKS:
            ranks = ", ".join(map(str, LORA_RANKS))
            raise SettingError(f"--max-lora-rank {self.max_lora_rank}: vLLM takes {ranks}. Give the next larger one.")
        if not 0 <= self.num_speculative_tokens <= 32:
            raise SettingError(f"num_speculative_tokens must be 0 to 32, found {self.num_speculative_tokens}")
        self.behaviour  # noqa: B018 - a version that cannot be read raises here

    @property
    def behaviour(self) -> Behaviour:
        """What this version of vLLM does."""
        try:
            version = Version(self.vllm)
        except InvalidVersion as error:
            raise SettingError(f"a vLLM version looks like 0.32, found {self.vllm!r}") from error
        return Behaviour(version >= Version("0.20"), version >= Version("0.27.2.dev0"), version >= Version("0.28"))

    def filled(self, card: Card, model_max_len: int) -> "ServeSettings":
        """These settings with every None replaced by what vLLM takes on this card.

        Source: vLLM 0.32 engine/arg_utils.py `get_batch_defaults` (the OpenAI server's column) and
        `_set_default_max_num_seqs_and_batched_tokens_args`.
        """
        big = card.usable_bytes >= BIG_CARD_BYTES
        length = self.max_model_len or model_max_len
        seqs = self.max_num_seqs or (1024 if big else 256)
        tokens = self.max_num_batched_tokens or min(8192 if big else 2048, seqs * length)
        seqs = self.max_num_seqs or min(seqs, tokens)
        prefixes = self.enable_prefix_caching
        return dataclasses.replace(
            self,
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_cudagraph_capture_size=self.max_cudagraph_capture_size or self._largest_graph(seqs, tokens),
            enable_prefix_caching=self.behaviour.caches_prefixes if prefixes is None else prefixes,
            flashinfer_workspace_bytes=self.flashinfer_workspace_bytes or WORKSPACE_BYTES,
        )

    def _largest_graph(self, seqs: int, tokens: int) -> int:
        """vLLM 0.27.1 and 0.32 config/vllm.py `_set_cudagraph_sizes`: twice the widest decode batch, 512 at most."""
        return min(seqs * (1 + self.num_speculative_tokens) * 2, 512, tokens)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingError(f"{_flag(name)} must be one of {', '.join(allowed)}, found {value!r}")

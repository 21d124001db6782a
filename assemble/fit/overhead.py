"""What vLLM's budget holds besides weights, adapters and the cache, and what lies outside of it.

None of this can be read from a checkpoint. What a shape determines is computed (activations, logits); what only a running
engine shows is a constant, fitted to the field reports' pools and named so here, with the points it was fitted to.

At startup vLLM runs the model once on --max-num-batched-tokens tokens of nothing, samples for --max-num-seqs requests, takes
the peak, captures two CUDA graphs of each kind and extrapolates, and gives the rest of the budget to the cache (vLLM 0.32
v1/worker/gpu_worker.py `determine_available_memory`, v1/worker/gpu_model_runner.py `profile_run`, `profile_cudagraph_memory`).
"""

from dataclasses import dataclass

from assemble.fit.cards import MIB
from assemble.fit.model import VISION, Model
from assemble.fit.settings import ServeSettings


@dataclass(frozen=True)
class Fitted:
    """A number that was fitted, and to what."""

    value: float
    points: str


RUNTIME = Fitted(
    900 * MIB,
    "What a worker holds that is neither weights nor cache on one card: kernels loaded late, cuBLAS and Marlin workspaces, "
    "the allocator's rounding. Fitted, with COMMUNICATION, to the three pools of a 27B on 2x RTX 5070 Ti: 150,000 tokens at "
    "0.94, 114,480 at 0.95 (8 requests), 177,254 at 0.94 on an older build; alone, to 0.63 GiB of cache of a 35B-A3B with "
    "MTP on an RTX 5090 and 8.8 GiB with LoRA on an RTX PRO 5000.",
)
COMMUNICATION = Fitted(600 * MIB, "NCCL's channels and the all-reduce buffers of more than one card. Fitted with RUNTIME.")
ACTIVATIONS = Fitted(
    1.5,
    "Peak of a forward pass over the sum of the widest layer's tensors: inductor keeps more alive than the sum. Fitted to the "
    "same pools, at 1,024 and 2,048 tokens a step.",
)
FIRST_PIECEWISE_GRAPH = Fitted(45 * MIB, "vLLM's own estimates of 4, 5 and 7 piecewise graphs: 0.08, 0.13 and 0.17 GiB.")
FIRST_FULL_GRAPH = Fitted(
    180 * MIB, "0.94 'is effectively 0.9164' on a 15.47 GiB card: 0.365 GiB for six graphs with a 64 MiB workspace."
)
GRAPH = Fitted(
    14 * MIB / 64,
    "A layer of each further graph. On a 27B of 64 layers, 4 requests instead of 8 gave 4.2 % more cache (4 blocks of 28 MB), "
    "for eight graphs less.",
)
CONTEXT = Fitted(
    390 * MIB,
    "CUDA's own context. Fitted to: the first request fails at 0.96 with the default attention workspace, and does not at 0.94 "
    "and 0.95.",
)
SAMPLER = Fitted(
    36,
    "Bytes of one logit while sampling: BF16, its F32 copy, the filtered copy and its buffer, probabilities, noise, in part "
    "twice (vLLM 0.32 v1/sample/sampler.py, ops/topk_topp_sampler.py). How many live at once was fitted: 8.8 GiB at 256 "
    "requests on 48 GB; 1.65M and 2.70M tokens at 1,024 requests on 96 GB, which it still leaves a fifth too high.",
)
IMAGE_TOKENS = 16_384  # vLLM profiles one image of the largest size: "profiled with 1 image items", budget 16384


@dataclass(frozen=True)
class Peak:
    """The largest of the things that are in memory one after another: the last column says which."""

    nbytes: int
    what: str


def activation_peak(model: Model, settings: ServeSettings, tensor_parallel: int) -> Peak:
    """The peak of the profiling run: the forward pass, the sampler, or the vision tower. `settings` are filled."""
    tokens, seqs = settings.max_num_batched_tokens or 0, settings.max_num_seqs or 0
    forward = round(tokens * _token_bytes(model, tensor_parallel) * ACTIVATIONS.value)
    rows = seqs * (2 if settings.num_speculative_tokens else 1)  # the rejection sampler sees a draft beside each
    sampler = rows * round(model.number("vocab_size") * SAMPLER.value)
    peaks = [Peak(forward, f"the forward pass over {tokens:,} tokens"), Peak(sampler, f"the sampler's logits of {rows:,} rows")]
    if not settings.language_model_only and VISION in model.held:
        peaks.append(Peak(_vision_bytes(model), "the vision tower on one image of the largest size"))
    return max(peaks, key=lambda peak: peak.nbytes)


def _token_bytes(model: Model, tensor_parallel: int) -> int:
    """Bytes a token has alive in the widest layer, in BF16 unless said: residual and normed input, then the layer's own."""
    hidden = model.number("hidden_size")
    residual = 3 * hidden * 2
    linear = _linear_bytes(model, tensor_parallel) if model.linear_layers else 0
    return residual + max(linear, _mlp_bytes(model, tensor_parallel))


def _linear_bytes(model: Model, tensor_parallel: int) -> int:
    """Gated DeltaNet, chunked by 64: q, k, v, z and their convolved copy; u, w; a state a chunk; A in F32; output."""
    heads = model.number("linear_num_value_heads")
    keys, values = model.number("linear_key_head_dim"), model.number("linear_value_head_dim")
    mixed = 2 * keys * model.number("linear_num_key_heads") + values * heads
    per_head = 2 * (keys + values) + 2 * keys * values // 64 + 64 * 4 + 2 * 2 * values
    return (2 * (2 * mixed + values * heads) + heads * per_head) // tensor_parallel


def _mlp_bytes(model: Model, tensor_parallel: int) -> int:
    """Gate and up, their product; of a mixture once for each expert a token goes to, and the experts' outputs."""
    if not model.architecture.moe:
        return 3 * model.number("intermediate_size") * 2 // tensor_parallel
    chosen = model.architecture.text.get("num_experts_per_tok")
    inner, hidden = model.number("moe_intermediate_size") // tensor_parallel, model.number("hidden_size")
    return (chosen if type(chosen) is int else 8) * (3 * inner + hidden) * 2


def _vision_bytes(model: Model) -> int:
    """One image of `IMAGE_TOKENS` merged patches, four patches to a token: residual, q, k, v, the MLP's inner width."""
    hidden, inner = model.vision_widths
    return IMAGE_TOKENS * 4 * (7 * hidden + inner) * 2


def graph_counts(settings: ServeSettings) -> tuple[int, int]:
    """How many piecewise and full CUDA graphs are captured. `settings` are filled.

    Sizes are 1, 2, 4, then every 8 up to 256, then every 16; with drafts they are rounded up to multiples of 1 + K; full
    graphs are for pure decode batches. Source: vLLM 0.27.1 config/vllm.py `_set_cudagraph_sizes`, config/compilation.py
    `adjust_cudagraph_sizes_for_spec_decode`; v1/cudagraph_dispatcher.py `initialize_cudagraph_keys`. 0.32 adds some sizes.
    With adapters each size is captured twice, with and without (`_get_lora_cases`).
    """
    if settings.cudagraph_mode == "NONE":
        return 0, 0
    largest, step = settings.max_cudagraph_capture_size or 1, 1 + settings.num_speculative_tokens
    sizes = [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if n <= largest]
    rounded = {-(-size // step) * step for size in sizes}
    fitting = sorted(size for size in rounded if size <= largest) or [step]
    decode = [size for size in fitting if step <= size <= (settings.max_num_seqs or 1) * step]
    cases = 2 if settings.max_lora_rank else 1
    piecewise = 0 if settings.cudagraph_mode.startswith("FULL") and "PIECEWISE" not in settings.cudagraph_mode else len(fitting)
    full = 0 if settings.cudagraph_mode == "PIECEWISE" else len(decode)
    return piecewise * cases, full * cases


def graph_bytes(model: Model, settings: ServeSettings) -> int:
    """What vLLM takes CUDA graphs to need, the decode kernels' workspace included (it is made during capture).

    The workspace: vLLM 0.32 v1/attention/backends/flashinfer.py `_get_trtllm_workspace_buffer`.
    """
    piecewise, full = graph_counts(settings)
    first = (FIRST_PIECEWISE_GRAPH.value if piecewise else 0) + (FIRST_FULL_GRAPH.value if full else 0)
    workspace = (settings.flashinfer_workspace_bytes or 0) if full else 0
    return round(first + (piecewise + full) * GRAPH.value * model.architecture.num_layers) + workspace

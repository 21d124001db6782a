"""What takes memory on a card, one term each, with its explanation and where that was read."""

from collections.abc import Iterator
from dataclasses import dataclass

from assemble.fit.cards import MIB, Cards
from assemble.fit.lora import lora_bytes
from assemble.fit.model import MTP_HEAD, VISION, Held, Model
from assemble.fit.overhead import (
    ACTIVATIONS,
    COMMUNICATION,
    CONTEXT,
    FIRST_FULL_GRAPH,
    FIRST_PIECEWISE_GRAPH,
    GRAPH,
    RUNTIME,
    SAMPLER,
    activation_peak,
    graph_bytes,
    graph_counts,
)
from assemble.fit.settings import ServeSettings


@dataclass(frozen=True)
class Term:
    """Memory of one kind on one card.

    Attributes:
        name: What it is.
        nbytes: How much, a card.
        explanation: A sentence.
        source: File, symbol and version it was read from, or the points it was fitted to.
        fitted: True when a constant in it was fitted.
        inside_budget: Whether vLLM takes it from --gpu-memory-utilization.
        weights: Whether it is weights.
    """

    name: str
    nbytes: int
    explanation: str
    source: str
    fitted: bool = False
    inside_budget: bool = True
    weights: bool = False


SPLIT_SOURCE = "the checkpoint's headers; split as vLLM 0.32 does (assemble/fit/model.py)"


def budget_terms(model: Model, cards: Cards, settings: ServeSettings) -> Iterator[Term]:
    """The terms that vLLM's budget pays for. `settings` are filled."""
    kv_heads = model.number("num_key_value_heads")
    for kind, held in model.held.items():
        if _is_loaded(kind, settings):
            yield _weights(kind, held, cards.count, kv_heads)
    yield from _adapters(model, cards.count, settings)
    peak = activation_peak(model, settings, cards.count)
    yield Term(
        "activations",
        peak.nbytes,
        f"peak of the startup run: {peak.what}",
        f"vLLM 0.32 v1/worker/gpu_model_runner.py profile_run; fitted: {ACTIVATIONS.points} {SAMPLER.points}",
        fitted=True,
    )
    yield from _graphs(model, settings)
    yield Term("runtime", round(RUNTIME.value), "kernels, workspaces, rounding", RUNTIME.points, True)
    if cards.count > 1:
        explanation = "NCCL and all-reduce buffers between the cards"
        yield Term("communication", round(COMMUNICATION.value), explanation, COMMUNICATION.points, True)


def outside_terms(settings: ServeSettings) -> Iterator[Term]:
    """The terms that lie outside of vLLM's budget: utilization must leave room for them. `settings` are filled."""
    workspace = settings.flashinfer_workspace_bytes or 0
    yield Term(
        "attention workspace",
        workspace,
        "FlashInfer's scratch for prefill, made by the first request",
        "vLLM 0.32 v1/attention/backends/flashinfer.py FlashInferMetadataBuilder._get_workspace_buffer; envs.py",
        inside_budget=False,
    )
    yield Term("CUDA context", round(CONTEXT.value), "the driver's own", CONTEXT.points, True, False)


def _is_loaded(kind: str, settings: ServeSettings) -> bool:
    if kind == MTP_HEAD:
        return settings.num_speculative_tokens > 0
    return kind != VISION or not settings.language_model_only


def _weights(kind: str, held: Held, tensor_parallel: int, kv_heads: int) -> Term:
    nbytes = held.on_a_card(tensor_parallel, kv_heads)
    whole = f"{held.total / 1e9:.2f} GB in {held.stored}"
    if tensor_parallel == 1:
        text = whole
    elif nbytes == held.total:
        text = f"{whole}, a copy a card"
    else:
        half = abs(nbytes * tensor_parallel - held.total) < held.total / 1000
        text = f"{whole}, " + (
            f"1/{tensor_parallel} a card" if half else f"{nbytes / held.total:.0%} a card (KV heads are copied)"
        )
    if kind == MTP_HEAD:
        text = f"{text}; embedding and lm_head are the decoder's"
    return Term(kind, nbytes, text, SPLIT_SOURCE, weights=True)


def _adapters(model: Model, tensor_parallel: int, settings: ServeSettings) -> Iterator[Term]:
    experts, others = lora_bytes(model, settings.max_lora_rank, settings.max_loras, tensor_parallel)
    if experts:
        yield Term(
            "LoRA, experts",
            experts,
            f"rank {settings.max_lora_rank}, {model.architecture.num_experts} experts, {model.architecture.num_layers} layers, "
            f"{settings.max_loras} adapter(s), whatever they cover",
            "vLLM 0.32 lora/layers/fused_moe.py FusedMoE3DWithLoRA.create_lora_weights",
        )
    if others:
        explanation = f"rank {settings.max_lora_rank}, every other linear module, embedding, lm_head"
        yield Term("LoRA, rest", others, explanation, "vLLM 0.32 lora/layers/base_linear.py create_lora_weights")


def _graphs(model: Model, settings: ServeSettings) -> Iterator[Term]:
    nbytes = graph_bytes(model, settings)
    if not nbytes:
        return
    piecewise, full = graph_counts(settings)
    counted = settings.behaviour.counts_graphs
    text = f"{piecewise} piecewise, {full} full, to {settings.max_cudagraph_capture_size} tokens"
    if full:
        text += f", and {(settings.flashinfer_workspace_bytes or 0) / MIB:.0f} MiB for decode kernels"
    if not counted:
        text += f"; vLLM {settings.vllm} does not take them from the budget"
    points = " ".join((FIRST_PIECEWISE_GRAPH.points, FIRST_FULL_GRAPH.points, GRAPH.points))
    yield Term(
        "CUDA graphs",
        nbytes,
        text,
        f"vLLM 0.32 v1/worker/gpu_model_runner.py profile_cudagraph_memory; fitted: {points}",
        fitted=True,
        inside_budget=counted,
    )

"""`fit`: whether a checkpoint fits on given cards, term by term."""

import json
from typing import Annotated, Any

import typer

from assemble.checkpoint import Checkpoint
from assemble.cli import reported
from assemble.errors import InputError
from assemble.fit import Fit, Model, ServeSettings, fit, parse_cards, read_model
from assemble.fit.report import print_cards, print_comparison, print_fit
from assemble.fit.settings import GRAPH_MODES
from assemble.hub import opened
from recipes.vllm_release import RELEASE

KV = {"fp8": "fp8", "bf16": "bfloat16", "auto": "auto"}
STATES = {"fp32": "float32", "bf16": "bfloat16", "auto": "auto"}
MIB = 1024 * 1024


def _list_cards(value: bool) -> None:
    if value:
        print_cards()
        raise typer.Exit


def fit_command(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint's directory, or a Hub id (its headers are read).")],
    gpus: Annotated[str, typer.Option(help="What it is served on: 2x16GB, 1xRTX5090, 4x23028MiB.")],
    compare: Annotated[list[str] | None, typer.Option(help="Another checkpoint, to set beside it; may be repeated.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="--max-model-len: the longest request, in tokens.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="--max-num-seqs: requests at a time.")] = None,
    batched_tokens: Annotated[int | None, typer.Option(min=1, help="--max-num-batched-tokens: tokens a step.")] = None,
    utilization: Annotated[float, typer.Option(help="--gpu-memory-utilization.")] = 0.92,
    kv: Annotated[str, typer.Option(help="KV cache: fp8, bf16, or what the checkpoint declares (auto).")] = "auto",
    state: Annotated[str, typer.Option(help="Recurrent state: bf16, fp32, or what config.json says (auto).")] = "auto",
    mtp: Annotated[int, typer.Option(min=0, max=32, metavar="K", help="Tokens that the MTP head drafts; 0 for none.")] = 0,
    lora_rank: Annotated[int, typer.Option(help="--max-lora-rank; 0 for no adapters.")] = 0,
    max_loras: Annotated[int, typer.Option(min=1, help="Adapters at a time.")] = 1,
    vision: Annotated[bool, typer.Option("--vision", help="Load the vision tower (no --language-model-only).")] = False,
    prefix_caching: Annotated[bool | None, typer.Option(help="Default: the version's.")] = None,
    graphs: Annotated[str, typer.Option(help="CUDA graphs: FULL_AND_PIECEWISE, PIECEWISE, NONE, …")] = "FULL_AND_PIECEWISE",
    max_graph: Annotated[int | None, typer.Option(min=1, help="max_cudagraph_capture_size.")] = None,
    workspace: Annotated[int | None, typer.Option(min=1, metavar="MIB", help="VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE.")] = None,
    vllm: Annotated[str, typer.Option(metavar="VERSION", help="Whose behaviour is meant.")] = RELEASE,
    mean_context: Annotated[int | None, typer.Option(min=1, help="Mean context of agents, in tokens: how many run.")] = None,
    rate: Annotated[float | None, typer.Option(help="Dollars an hour for all cards; with --speed, the cost of tokens.")] = None,
    speed: Annotated[
        float | None, typer.Option(help="Output tokens a second, all requests together, as you measured it.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of CHECKPOINT, a Hub id.")] = None,
    sources: Annotated[bool, typer.Option("--sources", help="Also say where each term was read, or fitted to.")] = False,
    known_gpus: Annotated[
        bool, typer.Option("--known-gpus", is_eager=True, callback=_list_cards, help="List the known cards.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """What a served checkpoint takes of a GPU's memory, what is left for contexts, what to change. Exit 1: does not fit."""
    with reported(debug=debug):
        cards = parse_cards(gpus)
        settings = ServeSettings(
            gpu_memory_utilization=utilization,
            max_model_len=context,
            max_num_seqs=concurrency,
            max_num_batched_tokens=batched_tokens,
            kv_cache_dtype=_choice("--kv", kv, KV),
            mamba_cache_dtype="bfloat16" if state == "bf16" else "auto",
            mamba_ssm_cache_dtype=_choice("--state", state, STATES),
            max_lora_rank=lora_rank,
            max_loras=max_loras,
            num_speculative_tokens=mtp,
            cudagraph_mode=_choice("--graphs", graphs, {mode: mode for mode in GRAPH_MODES}),
            max_cudagraph_capture_size=max_graph,
            language_model_only=not vision,
            enable_prefix_caching=prefix_caching,
            flashinfer_workspace_bytes=None if workspace is None else workspace * MIB,
            vllm=vllm,
        )
        cost = _cost(rate, speed)
        models = [_model(checkpoint, revision), *(_model(other, None) for other in compare or [])]
        fits = [fit(model, cards, settings) for model in models]
        if as_json:
            typer.echo(json.dumps(_as_json(fits, mean_context, cost), indent=2))
        elif len(fits) > 1:
            print_comparison(fits)
        else:
            print_fit(fits[0], mean_context=mean_context, cost=cost, sources=sources)
        raise typer.Exit(0 if all(found.fits for found in fits) else 1)


def _model(reference: str, revision: str | None) -> Model:
    with opened(reference, revision) as (root, _):
        return read_model(Checkpoint.open(root), reference)


def _choice(option: str, given: str, choices: dict[str, str]) -> str:
    if given not in choices:
        raise InputError(f"{option} must be one of {', '.join(choices)}, found {given!r}")
    return choices[given]


def _cost(rate: float | None, speed: float | None) -> float | None:
    """Dollars a million output tokens.

    Raises:
        InputError: one of the two without the other, or a speed of nothing.
    """
    if rate is None and speed is None:
        return None
    if rate is None or speed is None or rate < 0 or speed <= 0:
        raise InputError("--rate (dollars an hour) and --speed (output tokens a second) go together, and speed is not zero")
    return rate / (speed * 3600) * 1e6


def _as_json(fits: list[Fit], mean_context: int | None, cost: float | None) -> dict[str, Any]:
    found = [
        each.as_json() | ({"agents": each.agents(mean_context)} if mean_context and each.num_blocks else {}) for each in fits
    ]
    more = {"dollars_per_million_tokens": cost} if cost is not None else {}
    return (found[0] if len(found) == 1 else {"fits": all(f["fits"] for f in found), "checkpoints": found}) | more

"""Source and checkpoint go through memory side by side, a decoder layer at a time.

There are two streams of hidden states: the BF16 model's own, and the checkpoint's own, in which errors add up as they do
when it is served. Besides, each of the checkpoint's layers is given the BF16 model's hidden states: what comes out differs by
the error of that layer alone. At the end both streams meet in the logits.

In memory are two layers in BF16, the next two on their way from the disk, and the hidden states; never the model.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from assemble.architecture import LM_HEAD
from quantize.console import Reporter
from quantize.evaluate.changes import SAME, Change, changed_elsewhere, changed_in_layer, differing_scales, origin_of
from quantize.evaluate.distance import Scores, score
from quantize.evaluate.matrix import Matrix
from quantize.evaluate.modules import ModuleError, decibel, measure
from quantize.evaluate.rows import Batch
from quantize.evaluate.simulation import inputs_of
from quantize.evaluate.weights import Layer, Weights

DIAGNOSED_PER_LAYER = 12  # modules of a layer whose values are looked for elsewhere
Progress = Callable[[int], None]


@dataclass(frozen=True)
class InputRange:
    """The inputs of an FP8 matrix as its static scale holds them, on the held-out text.

    Attributes:
        name: Module name.
        scale: `input_scale`.
        largest: Largest magnitude seen; the scale holds 448 times itself.
        clipped: Share of inputs beyond that.
        sqnr_db: Of the rounded inputs.
    """

    name: str
    scale: float
    largest: float
    clipped: float
    sqnr_db: float


@dataclass(frozen=True)
class LayerError:
    """The error of a decoder layer's output: |difference| / |hidden state|, root mean square over tokens.

    Attributes:
        index: Which layer.
        kind: `full_attention` or `linear_attention`.
        added: By this layer alone, on the BF16 model's hidden states.
        accumulated: By all layers up to this one.
    """

    index: int
    kind: str
    added: float
    accumulated: float


@dataclass
class Walked:
    """Everything that one walk measured. `fused`: modules that a server gives another scale than their own."""

    scores: Scores
    modules: list[ModuleError] = field(default_factory=list)
    inputs: list[InputRange] = field(default_factory=list)
    layers: list[LayerError] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    fused: list[Change] = field(default_factory=list)


@dataclass
class _Stream:
    """The hidden states [B, T, H] of one batch, of the BF16 model and of the checkpoint."""

    batch: Batch
    truth: Any
    own: Any


def walk(source: Weights, written: Weights, head: Weights, batches: list[Batch], device: str, reporter: Reporter) -> Walked:
    """Runs both models over the rows and compares everything on the way.

    Args:
        source: The BF16 checkpoint.
        written: What was made of it.
        head: The checkpoint that the MTP head was taken from.
        batches: The rows.
        device: `cpu` or `cuda`.
        reporter: Where progress goes.
    """
    import torch

    from quantize.streaming.decoder import Decoder

    decoder = Decoder(source.architecture, device)
    tokens = sum(batch.ids.numel() for batch in batches)
    found: dict[str, list[Any]] = {"modules": [], "inputs": [], "layers": [], "changes": [], "fused": []}
    with reporter.task("evaluate", (decoder.num_layers + 1) * tokens) as progress, torch.inference_mode():
        streams = _embedded(decoder, source, written, batches)
        for index, layers in enumerate(_layers(written, source, decoder.num_layers)):
            mine, theirs = (layer.to(decoder.device) for layer in layers)
            prefix = f"{written.architecture.prefix}layers.{index}."
            found["modules"] += _compare_modules(prefix, index, mine, theirs)
            found["changes"] += changed_in_layer(prefix, mine, theirs)
            found["fused"] += differing_scales(prefix, mine)
            modules = (source.build(decoder, index, theirs), written.build(decoder, index, mine))
            del mine, theirs, layers
            added, accumulated = _run(decoder, modules, streams, progress)
            found["layers"].append(LayerError(index, source.architecture.layer_types[index], added, accumulated))
            found["inputs"] += _inputs(prefix, modules[1])
            del modules  # before the next two are built
        scores, output = _predictions(decoder, source, written, streams, progress)
    found["modules"] += output
    outside = [t for name, t in written.checkpoint.items() if not name.startswith(f"{written.architecture.prefix}layers.")]
    with reporter.task("compare the rest", sum(t.nbytes for t in outside)) as progress:
        found["changes"] += changed_elsewhere(written, source, head, progress)
    return Walked(scores, **found)


def _embedded(decoder: Any, source: Weights, written: Weights, batches: list[Batch]) -> list[_Stream]:
    tables = source.embedding(), written.embedding()
    place = _storage(decoder, sum(batch.ids.numel() for batch in batches) * tables[0].shape[1] * 2 * 2)
    return [_Stream(batch, *(decoder.embed(table, batch.ids).to(place) for table in tables)) for batch in batches]


def _storage(decoder: Any, nbytes: int) -> Any:
    """Where the hidden states are kept: on the GPU when they take little of it, else in host memory."""
    import torch

    if decoder.device.type == "cuda" and nbytes * 4 < torch.cuda.mem_get_info(decoder.device)[0]:
        return decoder.device
    return torch.device("cpu")


def _layers(written: Weights, source: Weights, count: int) -> Iterator[tuple[Layer, Layer]]:
    """The layers of both, on the CPU; the next ones are read meanwhile."""
    with ThreadPoolExecutor(2) as pool:

        def start(index: int) -> tuple[Future[Layer], Future[Layer]]:
            return pool.submit(written.stored_layer, index), pool.submit(source.stored_layer, index)

        ahead = start(0)
        for index in range(count):
            ready = ahead[0].result(), ahead[1].result()
            if index + 1 < count:
                ahead = start(index + 1)
            yield ready


def _run(decoder: Any, modules: tuple[Any, Any], streams: list[_Stream], progress: Progress) -> tuple[float, float]:
    """Takes all batches through one layer of both models; the errors added and accumulated."""
    source, written = modules
    added = accumulated = 0.0
    tokens = 0
    roundings = list(inputs_of(written).values())
    for stream in streams:
        place = stream.truth.device
        before = stream.truth.to(decoder.device)
        truth = decoder.forward(source, before)
        for rounding in roundings:
            rounding.recording = True
        alone = decoder.forward(written, before)
        for rounding in roundings:
            rounding.recording = False
        own = decoder.forward(written, stream.own.to(decoder.device))
        added += _error(alone, truth)
        accumulated += _error(own, truth)
        stream.truth, stream.own = truth.to(place), own.to(place)
        tokens += stream.batch.ids.numel()
        progress(stream.batch.ids.numel())
    return float((added / tokens) ** 0.5), float((accumulated / tokens) ** 0.5)


def _error(hidden: Any, truth: Any) -> float:
    """The sum over tokens of |hidden - truth|² / |truth|²."""
    difference = (hidden.float() - truth.float()).square().sum(-1)
    return float((difference / truth.float().square().sum(-1).clamp(min=1e-30)).double().sum())


def _predictions(
    decoder: Any, source: Weights, written: Weights, streams: list[_Stream], progress: Progress
) -> tuple[Scores, list[ModuleError]]:
    """Final norms, output matrices, and the scores of all tokens."""
    mine, theirs = written.stored_lm_head().to(decoder.device), source.stored_lm_head().to(decoder.device)
    output = _compare_modules("", None, Layer({LM_HEAD: mine}, {}), Layer({LM_HEAD: theirs}, {}))
    heads = theirs.bf16(), mine.bf16()
    del mine, theirs
    norms = source.final_norm(), written.final_norm()
    scores = []
    for stream in streams:
        states = [h.to(decoder.device) for h in (stream.truth, stream.own)]
        hidden = tuple(decoder.final_norm(norm, state) for norm, state in zip(norms, states, strict=True))
        scores.append(score(stream.batch.rows, stream.batch.ids, (hidden[0], hidden[1]), heads, progress))
        progress(len(stream.batch.rows))  # the first token of each row, which is not scored
    return Scores.joined(scores), output


def _compare_modules(prefix: str, index: int | None, written: Layer, source: Layer) -> list[ModuleError]:
    """Every quantized matrix of a layer against the source's; the values of one that is far off are looked for elsewhere."""
    errors = []
    for name, matrix in written.matrices.items():
        origin = source.matrices.get(name)
        if matrix.scheme is None or origin is None:
            continue
        found = measure(prefix + name, index, matrix, origin)
        far = [i for i, error in enumerate(found) if not error.cosine > SAME][:DIAGNOSED_PER_LAYER]
        for i in far:
            single = _single(matrix, i) if matrix.stacked else matrix
            holds = origin_of(name, single, i if matrix.stacked else None, source)
            found[i] = replace(found[i], holds=None if holds is None else prefix + holds)
        errors += found
    return errors


def _single(stack: Matrix, expert: int) -> Matrix:
    return Matrix(None, stack.expert(expert).values()[0])


def _inputs(prefix: str, module: Any) -> list[InputRange]:
    return [
        InputRange(prefix + name, float(r.scale), r.largest, r.clipped / max(1, r.count), decibel(r.signal, r.noise))
        for name, r in inputs_of(module).items()
    ]

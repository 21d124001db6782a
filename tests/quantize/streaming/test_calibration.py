"""What FP8 modules see, measured while a layer is run."""

from pathlib import Path

import pytest
import torch

from assemble.architecture import read_architecture
from assemble.checkpoint import Checkpoint
from quantize.streaming.activations import Activations, Store
from quantize.streaming.calibration import Calibration
from quantize.streaming.decoder import Decoder
from quantize.streaming.ranks import Ranks
from quantize.streaming.reading import read_layer

STATES = torch.randn(5, 12, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
MEASURED = {f"self_attn.{name}_proj" for name in "qkvo"}


@pytest.fixture(params=["tiny", "tiny_moe"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return Checkpoint.open(request.getfixturevalue(request.param))


def run(checkpoint: Checkpoint, tmp_path: Path, *, last: bool, calls: list[str]) -> tuple[dict[str, float], torch.Tensor]:
    """The inputs' magnitudes and the states after the last layer, a full attention; notes the modules that are called."""
    architecture = read_architecture(checkpoint.config, checkpoint)
    decoder = Decoder(architecture, "cpu")
    states = Activations(tuple(STATES.shape), 2, decoder.device, Store.HOST, tmp_path / "states")
    for start, (_, part) in zip((0, 2, 4), states.batches(), strict=True):
        states.put(part, STATES[start : start + 2])
    layer, make = decoder.num_layers - 1, decoder.layer

    def noted(index: int, tensors: dict) -> torch.nn.Module:
        module = make(index, tensors)
        for name, part in module.named_children():
            part.register_forward_hook(lambda *_, name=name: calls.append(name))
        return module

    decoder.layer = noted  # type: ignore[method-assign, assignment]
    tensors = read_layer(checkpoint, architecture, layer)
    amax = Calibration(decoder, states, Ranks()).run(layer, tensors, MEASURED, last=last)
    return amax, torch.cat([hidden for hidden, _ in states.batches()])


def test_the_last_layer_is_run_as_far_as_it_is_measured(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole: list[str] = []
    partly: list[str] = []
    amax, after = run(checkpoint, tmp_path, last=False, calls=whole)
    amax_of_last, untouched = run(checkpoint, tmp_path, last=True, calls=partly)
    assert amax_of_last == amax
    assert amax.keys() == MEASURED
    assert min(amax.values()) > 0
    assert whole == ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"] * 3
    assert partly == ["input_layernorm"] * 3
    assert torch.equal(untouched, STATES)
    assert not torch.equal(after, STATES)

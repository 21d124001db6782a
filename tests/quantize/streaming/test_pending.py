"""Packed tensors go to the shards when what their scales follow from has been checked, and on a GPU not a moment sooner."""

from pathlib import Path

import pytest
import torch

from assemble.errors import InputError
from assemble.formats import TensorSpec
from assemble.plan import PlannedShard
from quantize.streaming import pending
from quantize.streaming.modules import Made, Measured
from quantize.streaming.pending import Pending
from quantize.streaming.writing import ShardSink

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SIZE = 64


def made(number: int, device: str, largest: float = 1.0) -> Made:
    measured = Measured([f"m{number}.weight"], torch.tensor([largest], device=device))
    return Made({f"t{number}": torch.full((SIZE,), number, dtype=torch.uint8, device=device)}, [measured])


def opened(directory: Path, count: int) -> ShardSink:
    specs = tuple(TensorSpec(f"t{i}", "U8", (SIZE,)) for i in range(count))
    return ShardSink([PlannedShard("s.safetensors", specs, quantized=True)], directory, lambda *_: None)


@pytest.mark.parametrize("device", DEVICES)
def test_what_no_scale_follows_from_comes_to_no_shard(device: str, tmp_path: Path) -> None:
    with opened(tmp_path, 2) as sink:
        waiting = Pending(sink)
        waiting.add(made(0, device))

        def go_on() -> None:
            waiting.add(made(1, device, float("nan")))
            waiting.settle()

        with pytest.raises(InputError, match=r"tensor m1\.weight holds NaN or infinity"):
            go_on()
        with pytest.raises(Exception, match=r"s\.safetensors is incomplete"):
            sink.finish()
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "LIMIT", 2 * SIZE)
    with opened(tmp_path, 4) as sink:
        waiting, parts = Pending(sink), [made(i, "cuda") for i in range(4)]
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second
        busy = torch.cuda.current_stream().record_event()
        waiting.add(parts[0])
        waiting.add(parts[1])
        assert not busy.query()
        waiting.add(parts[2])  # one too many
        assert busy.query()
        waiting.add(parts[3])
        waiting.settle()
        sink.finish()
    assert (tmp_path / "s.safetensors").read_bytes()[-4 * SIZE :] == b"".join(bytes([i]) * SIZE for i in range(4))

"""What is written from a GPU that is not the threads' own: each thread starts with GPU 0 as its current one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from assemble.formats import TensorSpec
from assemble.plan import PlannedShard
from quantize.streaming.writing import ShardSink

pytestmark = pytest.mark.gpu


def test_the_last_gpu_under_load(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    specs = tuple(TensorSpec(f"tensor-{i}", "U8", (24, 1 << 20)) for i in range(24))
    sums = []
    with (
        torch.cuda.device(device),
        ShardSink([PlannedShard("shard.safetensors", specs, quantized=True)], tmp_path, lambda *_: None) as sink,
    ):
        load = torch.randn(4096, 4096, device=device)
        for i, spec in enumerate(specs):
            load = (load @ load).clamp(-1, 1)  # the tensor comes late: whoever does not wait for it writes something else
            made = torch.full(spec.shape, i, dtype=torch.uint8, device=device) + load.isnan().any().byte()
            sums.append(made.long().sum())
            sink.write({spec.name: made})
            del made  # its memory is another tensor's now, unless the sink keeps it
        sink.finish()
    written = load_file(tmp_path / "shard.safetensors")
    assert [int(written[spec.name].long().sum()) for spec in specs] == [int(total) for total in sums]

"""The same numbers on a GPU, within the noise of BF16 sums. Off by default: pytest -m gpu."""

import json
from pathlib import Path

import pytest
import torch

from assemble.checkpoint import Checkpoint
from quantize import demo
from quantize.console import Reporter
from quantize.evaluate.distance import summarize
from quantize.evaluate.outliers import outliers
from quantize.evaluate.rows import batches, read_rows
from quantize.evaluate.walk import walk
from quantize.evaluate.weights import Weights
from quantize.runner import run
from quantize.stage import Request
from recipes import loader
from recipes.schema import Evaluation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.mark.parametrize("model", [demo.MODEL, demo.MOE_MODEL], ids=["dense", "moe"])
def test_cpu_and_gpu_agree(model: Path, calibration: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = run(Request(str(model), tmp_path / "out", loader.load("demo"), calibration=calibration, device="cpu"), Reporter()).out
    text = tmp_path / "text.jsonl"
    rows = [json.loads(line)["text"] for line in calibration.read_text().splitlines()]
    text.write_text(
        "".join(json.dumps({"text": row[i : i + 900]}) + "\n" for row in rows for i in (2000, 6000) if len(row) > 8000)
    )
    held = read_rows(
        text, AutoTokenizer.from_pretrained(model), Evaluation(rows=8, tokens=256), loader.load("demo").recipe.calibration, None
    )
    source, written = Weights(Checkpoint.open(model)), Weights(Checkpoint.open(out))
    cpu, gpu = (walk(source, written, source, batches(held.rows, 2048), device, Reporter()) for device in ("cpu", "cuda"))
    ours, theirs = summarize(cpu.scores), summarize(gpu.scores)
    for name in ("nll_bf16", "nll_quantized"):
        assert theirs[name].value == pytest.approx(ours[name].value, abs=0.005)
    assert theirs["kl_mean"].value == pytest.approx(ours["kl_mean"].value, rel=0.1)
    assert theirs["top1_agreement"].value == pytest.approx(ours["top1_agreement"].value, abs=0.02)
    assert [m.name for m in cpu.modules] == [m.name for m in gpu.modules]
    for one, other in zip(cpu.modules, gpu.modules, strict=True):
        assert other.sqnr_db == pytest.approx(one.sqnr_db, abs=0.01)
        assert (other.zero, other.saturated) == pytest.approx((one.zero, one.saturated))
    for one, other in zip(cpu.layers, gpu.layers, strict=True):
        assert (other.added, other.accumulated) == pytest.approx((one.added, one.accumulated), rel=0.1)
    assert outliers(gpu) == []

"""A checkpoint that breaks a rule is not released."""

import shutil
from pathlib import Path

import pytest

from quantize.console import Reporter
from quantize.runner import Outcome, run
from quantize.stage import Request
from quantize.stages.verify import VerificationError
from recipes import loader


def test_a_broken_checkpoint_is_not_released(tiny: Path, calibration: Path, quantized: Outcome, tmp_path: Path) -> None:
    out, workspace = tmp_path / "out", tmp_path / "out.run"
    shutil.copytree(quantized.out.with_name("out.run"), workspace)
    for name in ("verify", "card"):
        shutil.rmtree(workspace / name)
    for stage in ("quantize", "assemble"):
        for shard in quantized.out.glob("*.safetensors"):
            shutil.copyfile(shard, workspace / stage / shard.name)
    head_shard = workspace / "assemble" / "model-00002-of-00002.safetensors"
    data = bytearray(head_shard.read_bytes())
    data[-1] ^= 1
    head_shard.write_bytes(data)
    request = Request(str(tiny), out, loader.load("demo"), calibration=calibration, device="cpu")
    with pytest.raises(VerificationError, match=r"verification failed with 1 errors.*verify\.json"):
        run(request, Reporter())
    assert not out.exists()
    assert (workspace / "verify" / "verify.json").is_file()

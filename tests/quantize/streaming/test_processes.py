"""Several processes: one that fails ends all of them soon, and any number goes on from where another number was."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quantize.streaming import engine
from tests.quantize.streaming.test_engine import ROWS, SHARD_BYTES, planned, quantize, shards

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from pathlib import Path
import typer
from assemble.cli import reported
from quantize.errors import CheckFailedError
from quantize.stages.quantize import Task, work
from quantize.streaming import engine
from quantize.streaming.ranks import find_ranks
from quantize.streaming.worker import Silent
from recipes import loader

root, rows, out, failing, layer, shard_bytes = sys.argv[1:]
engine.SAVE_SECONDS = 0
real, run = engine.Calibration.run, []

def counted(self, number, *arguments, last):
    if find_ranks().rank == int(failing) and number == int(layer):
        raise CheckFailedError("stopped by the test")
    run.append(number)
    return real(self, number, *arguments, last=last)

engine.Calibration.run = counted
recipe = loader.load("demo").recipe
calibration = recipe.calibration.model_copy(update={"batch_size": 2})
recipe = recipe.model_copy(update={"max_shard_bytes": int(shard_bytes), "calibration": calibration})
try:
    with reported(CheckFailedError, debug=False):
        find_ranks().join()
        work(Task(Path(root), Path(root), recipe, Path(rows), Path(out), "cpu", "disk"), Silent())
except typer.Exit as ended:
    sys.exit(ended.exit_code)
print("layers", run)
"""


def start(count: int, script: Path, *arguments: object) -> list[subprocess.Popen[str]]:
    """Processes that nobody stops when one of them fails, as torchrun would."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, arguments)]
    return [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


@pytest.mark.timeout(240)
def test_a_failing_process_and_what_other_numbers_of_processes_make_of_it(tiny: Path, tmp_path: Path) -> None:
    """Four processes share three batches, so one has no rows. The third fails; two go on, and in a copy, one."""
    np.save(tmp_path / "rows.npy", ROWS)
    script, out, copy = tmp_path / "process.py", tmp_path / "out", tmp_path / "copy"
    script.write_text(SCRIPT)
    out.mkdir()
    failing = start(4, script, tiny, tmp_path / "rows.npy", out, 2, 2, SHARD_BYTES)
    failing[2].wait(timeout=120)
    ended = time.monotonic()
    said = [process.communicate(timeout=30)[1] for process in failing]
    assert time.monotonic() - ended < 20
    assert [process.returncode for process in failing] == [1, 1, 1, 1], said
    assert "error: stopped by the test" in said[2]
    for text in said[:2] + said[3:]:
        assert "error: another process of this run failed or was stopped" in text
        assert "Traceback" not in text
    assert [p.name for p in out.glob("hidden-*")] == ["hidden-0002.bin"]
    shutil.copytree(out, copy)

    for process in start(2, script, tiny, tmp_path / "rows.npy", out, -1, 0, SHARD_BYTES):
        output, errors = process.communicate(timeout=120)
        assert output.strip() == "layers [2, 3]", errors
    assert not {p.suffix for p in out.iterdir()} - {".safetensors", ".txt", ".json"}

    plan = planned(tiny)
    assert quantize(plan, copy)["layers_run"] == 2
    quantize(plan, tmp_path / "undisturbed")
    assert shards(out) == shards(copy) == shards(tmp_path / "undisturbed")
    assert engine.SAVE_SECONDS > 0

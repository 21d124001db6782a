"""The whole job on a random checkpoint of a real shape: this tool, ModelOpt's ways beside it, and the machine's floor.

    python benchmarks/whole_job.py WORK --shape 1b --rows 8 --tokens 64 --batch 8 --resident --floor
    python benchmarks/whole_job.py WORK --shape 9b --example path/to/hf_ptq.py --floor

Makes the checkpoint in WORK (kept for the next call) and prints one table: seconds from process start to exit, peak host memory
without the page cache, peak GPU memory (as the driver counts it, CUDA context included). `--example` takes ModelOpt's
`examples/hf_ptq/hf_ptq.py`; `--resident` is its documented Python interface, which also runs on a CPU.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from assemble.jsonfile import read_object  # noqa: E402
from recipes import loader  # noqa: E402


@dataclass
class Measured:
    """One command: seconds, peak bytes, and what it said last."""

    name: str
    seconds: float
    host_bytes: int
    gpu_bytes: int
    said: str


class Watch:
    """Samples a process's memory, its children's included, until it ends."""

    def __init__(self, pid: int) -> None:
        self.host_bytes, self.gpu_bytes = 0, 0
        self._process, self._gpu = psutil.Process(pid), _gpu_handle()
        self._before = self._gpu_used()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _gpu_used(self) -> int:
        if self._gpu is None:
            return 0
        import pynvml

        return int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used)

    def _run(self) -> None:
        while self._process.is_running():
            try:
                family = [self._process, *self._process.children(recursive=True)]
                self.host_bytes = max(self.host_bytes, sum(_anonymous(p.pid) for p in family))
                self.gpu_bytes = max(self.gpu_bytes, self._gpu_used() - self._before)
                time.sleep(0.1)
            except psutil.NoSuchProcess:
                return


def _gpu_handle() -> object | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # no driver, no library: no GPU to watch
        return None


def _anonymous(pid: int) -> int:
    """Resident bytes that are not mapped files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def measure(name: str, command: list[str], log: Path) -> Measured:
    """Runs a command to its end."""
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(  # noqa: S603
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | {"PYTHONPATH": _path()}
        )
        watch = Watch(process.pid)
        code = process.wait()
    seconds = time.monotonic() - started
    said = log.read_text().strip().splitlines()[-1:] or [""]
    print(f"{name}: exit {code} after {seconds:.1f} s; {said[0][:200]}", flush=True)  # noqa: T201
    return Measured(name, seconds if code == 0 else float("nan"), watch.host_bytes, watch.gpu_bytes, said[0])


def _path() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def write_recipe(arguments: argparse.Namespace) -> Path:
    """The default recipe with these rows."""
    recipe = yaml.safe_load(loader.load(arguments.recipe).text)
    recipe["calibration"] |= {
        "num_samples": arguments.rows,
        "sequence_length": arguments.tokens,
        "batch_size": arguments.batch,
        "column": "text",
    }
    path = arguments.work / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def write_text(path: Path, tokens: int) -> None:
    """Calibration text: the standard library's source, in documents of 3,000 characters, enough for the tokens."""
    characters, documents = 8 * tokens, []
    while sum(map(len, documents)) < characters:
        for file in sorted(Path(os.__file__).parent.rglob("*.py")):
            text = file.read_text(errors="ignore")
            documents += [text[i : i + 3000] for i in range(0, len(text), 3000)]
            if sum(map(len, documents)) >= characters:
                break
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--recipe", default=loader.DEFAULT)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", type=Path, help="where the random checkpoint goes, when not in WORK")
    parser.add_argument("--example", type=Path, help="ModelOpt's hf_ptq.py")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--floor", action="store_true")
    run(parser.parse_args())


def run(arguments: argparse.Namespace) -> None:
    """Makes the inputs, measures, prints the table."""
    work = arguments.work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    model = arguments.model or work / "model"
    if not model.exists():
        layers = ["--layers", str(arguments.layers)] if arguments.layers else []
        random = [sys.executable, str(HERE / "random_checkpoint.py"), str(model), "--shape", arguments.shape, *layers]
        measure("make the checkpoint", random, work / "make.log")
    text, recipe, rows = work / "text.jsonl", write_recipe(arguments), work / "ours.run" / "calibrate" / "rows.npy"
    write_text(text, arguments.rows * arguments.tokens)
    for name in ("ours", "ours.run", "resident", "example"):
        shutil.rmtree(work / name, ignore_errors=True)
    ours = [sys.executable, "-m", "quantize", "run", str(model), str(work / "ours"), "--recipe", str(recipe)]
    ours += ["--calibration", str(text), "--device", arguments.device]
    made = [measure("this tool", ours, work / "ours.log")]
    device = read_object(work / "ours.run" / "plan" / "stage.json")["facts"]["device"]
    if arguments.floor:
        floor = [sys.executable, str(HERE / "floor.py"), str(model), str(work / "floor"), "--rows", str(rows)]
        made.append(measure("floor", [*floor, "--batch", str(arguments.batch), "--device", device], work / "floor.log"))
    modelopt = yaml.safe_load(recipe.read_text())["modelopt"]["qwen3_5_moe" if "a3b" in arguments.shape else "qwen3_5"]
    if arguments.resident:
        resident = [sys.executable, str(HERE / "resident.py"), str(model), str(work / "resident"), "--rows", str(rows)]
        resident += ["--recipe", modelopt, "--batch", str(arguments.batch), "--device", device]
        made.append(measure("ModelOpt, resident", resident, work / "resident.log"))
    if arguments.example:
        example = [sys.executable, str(arguments.example), "--pyt_ckpt_path", str(model), "--recipe", modelopt]
        example += ["--export_path", str(work / "example"), "--dataset", str(text), "--calib_size", str(arguments.rows)]
        example += ["--calib_seq", str(arguments.tokens), "--batch_size", str(arguments.batch), "--skip_generate"]
        made.append(measure("ModelOpt's example script", example, work / "example.log"))
    show(made, work)


def show(made: list[Measured], work: Path) -> None:
    """Prints what was measured, and the stages of our run."""
    print(f"\n{'':28}{'seconds':>9}{'host':>10}{'GPU':>10}   ours is faster by")  # noqa: T201
    for m in made:
        if m.name == "floor":  # its parts run one after another
            continue
        ratio = f"{m.seconds / made[0].seconds:6.2f}" if m.name.startswith("ModelOpt") else ""
        print(f"{m.name:28}{m.seconds:9.1f}{m.host_bytes / 1e9:8.2f} GB{m.gpu_bytes / 1e9:8.2f} GB   {ratio}")  # noqa: T201
    for m in made:
        if m.name == "floor" and m.said.startswith("{"):
            seconds = json.loads(m.said)
            times = {name: f"{made[0].seconds / seconds[name]:.2f}" for name in ("floor", "process")}
            print(f"floor, each part by itself: {m.said}")  # noqa: T201
            print(f"  this tool takes {times['floor']} times the floor of the work, ", end="")  # noqa: T201
            print(f"{times['process']} times that of a process that does only this work")  # noqa: T201
    for stage in ("fetch", "plan", "calibrate", "quantize", "assemble", "verify", "card"):
        path = work / "ours.run" / stage / "stage.json"
        if not path.is_file():
            continue
        record = read_object(path)
        facts = {
            k: v
            for k, v in record["facts"].items()
            if k in ("seconds", "gpu_peak_memory_bytes", "gpu_peak_reserved_bytes", "predicted", "layers_run", "delta_rule")
        }
        print(f"  {stage:10} {record['seconds']:7.1f} s   {facts or ''}")  # noqa: T201


if __name__ == "__main__":
    main()

"""Cost grows linearly with decoder layers, and with calibration tokens: measures both, and draws them.

    python benchmarks/linear.py WORK docs/quantize

Runs the quantize command on random checkpoints of one small shape (made in WORK, kept for the next call), and takes the seconds
that its quantize stage runs and packs layers, the shortest of some rounds. (Tensors that are copied go to the disk beside that;
on so small a model the stage as a whole lasts as long as they take.) Writes linear_layers.png and linear_tokens.png, each with
the straight line through the points.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from assemble.jsonfile import read_object  # noqa: E402
from benchmarks.whole_job import measure, write_recipe, write_text  # noqa: E402
from recipes import loader  # noqa: E402

Points = list[tuple[int, float]]


def run(arguments: argparse.Namespace, layers: int, tokens: int) -> float:
    """Seconds of running and packing layers; peak memory is measured too, and printed."""
    work: Path = arguments.work
    model = work / f"{arguments.shape}-{layers}"
    if not model.exists():
        make = [sys.executable, str(HERE / "random_checkpoint.py"), str(model), "--shape", arguments.shape]
        measure("make the checkpoint", [*make, "--layers", str(layers)], work / "make.log")
    for name in ("ours", "ours.run"):
        shutil.rmtree(work / name, ignore_errors=True)
    text = work / "text.jsonl"
    write_text(text, tokens)
    arguments.rows = tokens // arguments.tokens
    command = [sys.executable, "-m", "quantize", "run", str(model), str(work / "ours"), "--calibration", str(text)]
    command += ["--recipe", str(write_recipe(arguments)), "--device", arguments.device]
    measured = measure(f"{layers} layers, {tokens} tokens", command, work / "ours.log")
    parts = read_object(work / "ours.run" / "quantize" / "stage.json")["facts"]["seconds"]
    seconds = float(parts["forward"] + parts["pack"])
    print(f"  running and packing {seconds:.1f} s, host memory {measured.host_bytes / 1e9:.2f} GB", flush=True)  # noqa: T201
    return seconds


def draw(points: Points, what: str, also: str, path: Path) -> float:
    """Draws the points and the line through them; returns the share of the variance that the line explains."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    x, y = np.array(points, dtype=float).T
    slope, start = np.polyfit(x, y, 1)
    explained = 1 - float(((y - slope * x - start) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    line = np.array([0, x.max() * 1.05])
    unit, factor = ("a layer", 1) if what == "decoder layers" else ("a thousand tokens", 1000)
    label = f"{start:.1f} s + {slope * factor:.2f} s {unit}   (R² = {explained:.4f})"
    axes.plot(line, start + slope * line, color="tab:gray", linewidth=1, label=label)
    axes.plot(x, y, "o", color="tab:blue", label="measured")
    axes.set(xlabel=what, ylabel="seconds of running and packing", title=also, ylim=(0, y.max() * 1.15), xlim=(0, line[1]))
    axes.set_xticks([0, *x])
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return explained


def main() -> None:
    """Reads the command line, measures, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.3b")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 12, 16])
    parser.add_argument("--total-tokens", type=int, nargs="+", default=[1024, 4096, 8192, 12288])
    parser.add_argument("--tokens", type=int, default=64, help="a row")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="the shortest of these counts; two at least")
    parser.add_argument("--recipe", default=loader.DEFAULT)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    arguments.work = arguments.work.absolute()
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    fewest_layers, fewest_tokens = min(arguments.layers), min(arguments.total_tokens)
    rounds = [  # one after the other, so that a busy minute of the machine does not fall on one size alone
        (
            [run(arguments, n, fewest_tokens) for n in arguments.layers],
            [run(arguments, fewest_layers, n) for n in arguments.total_tokens],
        )
        for _ in range(arguments.rounds)
    ]
    by_layers, by_tokens = zip(*rounds, strict=True)
    layers: Points = list(zip(arguments.layers, map(min, *by_layers), strict=True))
    tokens: Points = list(zip(arguments.total_tokens, map(min, *by_tokens), strict=True))
    explained = {
        "layers": draw(layers, "decoder layers", f"{fewest_tokens} calibration tokens", arguments.out / "linear_layers.png"),
        "tokens": draw(tokens, "calibration tokens", f"{fewest_layers} decoder layers", arguments.out / "linear_tokens.png"),
    }
    print(json.dumps({"layers": layers, "tokens": tokens, "explained": explained}))  # noqa: T201


if __name__ == "__main__":
    main()

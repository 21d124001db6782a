"""How long the commands take that read headers only: a new process each, on checkpoints of real models' shapes.

    python benchmarks/commands.py [--repeats 5] [--against OTHER_CHECKOUT] [--folder DIR]

The checkpoints are sparse files (`benchmarks/headers.py`), so their headers are in the page cache and no weight is read. It
prints the least of the repeats: CPU seconds, which other work on the machine disturbs little, and wall seconds. With --against
each command also runs in another checkout, in turns with this one, and the ratio of CPU seconds is printed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.headers import SHAPES, config_of, source_config_of, write_headers

HERE = Path(__file__).parents[1]
QUANTIZED = {
    "fit": ("assemble", "fit", "{}", "--gpus", "48GB"),
    "serve --profile": ("assemble", "serve", "{}", "--profile", "96gb"),
    "serve": ("assemble", "serve", "{}"),
    "verify": ("assemble", "verify", "{}"),
}
SOURCE = {"plan": ("quantize", "plan", "{}", "--device", "cpu")}
ALONE = {"profiles": ("assemble", "profiles"), "assemble --help": ("assemble", "--help")}


def once(words: tuple[str, ...], root: Path, checkout: Path) -> tuple[float, float]:
    """CPU and wall seconds of one run; what it prints and whether it fits does not matter."""
    command = [sys.executable, "-m", *(str(root) if word == "{}" else word for word in words)]
    before, start = os.times(), time.perf_counter()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    wall, after = time.perf_counter() - start, os.times()
    # 1: it does not fit, or is not sound; 2: this machine is too small for the plan, or an older `serve` ended its list
    if ended.returncode not in (0, 1, 2) or not ended.stdout or "Traceback" in ended.stderr:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr}")
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return used, wall


def measure(name: str, words: tuple[str, ...], root: Path, repeats: int, against: Path | None) -> None:
    """Prints the least seconds of a command, and of the other checkout's."""
    checkouts = [HERE, against] if against else [HERE]
    runs = [[once(words, root, checkout) for checkout in checkouts] for _ in range(repeats)]
    cpu, wall = (min(run[0][i] for run in runs) for i in (0, 1))
    text = f"{root.name:12} {name:16} {cpu:6.2f} s CPU  {wall:6.2f} s wall"
    if against:
        other = min(run[1][0] for run in runs)
        text += f"   there {other:6.2f} s CPU, {other / cpu:.1f} times as much"
    print(text, flush=True)  # noqa: T201


def main() -> None:
    """Runs all of it in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    arguments = parser.parse_args()
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name, words in ALONE.items():
            measure(name, words, Path("-"), arguments.repeats, arguments.against)
        for shape in SHAPES:
            root = write_headers(Path(folder) / shape, config_of(shape))
            for name, words in QUANTIZED.items():
                measure(name, words, root, arguments.repeats, arguments.against)
            root = write_headers(Path(folder) / f"{shape} BF16", source_config_of(shape))
            for name, words in SOURCE.items():
                measure(name, words, root, arguments.repeats, arguments.against)


if __name__ == "__main__":
    main()

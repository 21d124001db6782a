"""How long `verify` takes: headers of real models' sizes, and tensor values against a plain read of the same bytes.

    python benchmarks/verify.py [--gigabytes 4] [--folder DIR]

Headers: sparse checkpoints with the tensors of 27B (2,001) and 35B-A3B (93,627). Values: a dense checkpoint of random bytes,
read front to back by `cat`'s loop and by `verify --deep`, each from the disk (the page cache is told to forget the file) and
from the page cache.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from assemble.checkpoint import read_layout
from assemble.verify import verify
from benchmarks.headers import SHAPES, config_of, write_headers

BUFFER = 16 * 1024 * 1024


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def headers(folder: Path, repeats: int) -> None:
    """Prints the time of header verifies."""
    for shape in SHAPES:
        root = write_headers(folder / shape, config_of(shape))
        count = sum(len(shard.tensors) for shard in read_layout(root).shards)
        times = sorted(seconds(lambda root=root: verify(root)) for _ in range(repeats))
        findings = len(verify(root).findings)
        print(f"headers  {shape:8} {count:7,} tensors  {times[0]:6.2f} to {times[-1]:.2f} s  {findings} findings")  # noqa: T201


def fill(root: Path) -> int:
    """Fills the shards with bytes that pass for weights, and returns their number."""
    rng = np.random.default_rng(0)
    noise = rng.integers(1, 0x70, BUFFER, dtype=np.uint8).tobytes()  # a valid positive number in every dtype
    total = 0
    for shard in read_layout(root).shards:
        with (root / shard.name).open("r+b") as file:
            file.seek(shard.tensors[0].start)
            left = shard.file_bytes - shard.tensors[0].start
            while left:
                left -= file.write(noise[: min(left, BUFFER)])
            file.flush()
            os.fsync(file.fileno())
        total += shard.file_bytes
    return total


def forget(root: Path) -> None:
    """Asks the kernel to drop the shards from the page cache."""
    for path in root.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(root: Path) -> None:
    """Reads every shard from front to back."""
    buffer = bytearray(BUFFER)
    for path in sorted(root.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def values(folder: Path, gigabytes: float, repeats: int) -> None:
    """Prints the throughput of `--deep` and of a plain read, in turns, from the disk and from the page cache."""
    config = config_of("27B")
    layers = max(4, round(gigabytes / 0.25) // 4 * 4)  # a 27B layer has about 0.25 GB
    config["text_config"] |= {"num_hidden_layers": layers, "vocab_size": 32768, "mtp_num_hidden_layers": 1}
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:layers]
    q = config["quantization_config"]
    kept = {m: e for m, e in q["quantized_layers"].items() if m == "lm_head" or int(m.split(".")[3]) < layers}
    q["quantized_layers"] = kept
    for group in q["config_groups"].values():
        group["targets"] = [t for t in group["targets"] if t in kept]
    root = write_headers(folder / "values", config)
    size = fill(root)
    for cold in (True, False):
        plain, deep = [], []
        for _ in range(repeats):
            for function, times in ((lambda: plain_read(root), plain), (lambda: verify(root, deep=True), deep)):
                if cold:
                    forget(root)
                times.append(seconds(function))
        read, verified = (size / min(times) / 1e9 for times in (plain, deep))
        where = "disk" if cold else "page cache"
        text = f"{size / 1e9:.1f} GB: plain read {read:.2f} GB/s, verify --deep {verified:.2f} GB/s, {verified / read:.0%}"
        print(f"values   from the {where:10} {text}")  # noqa: T201


def main() -> None:
    """Runs all of it in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        headers(Path(folder), arguments.repeats)
        values(Path(folder), arguments.gigabytes, arguments.repeats)


if __name__ == "__main__":
    main()

"""Where, when and with what a stage was run."""

import platform
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quantize.machine import find_gpu

PACKAGES = ("nvfp4-mtp", "nvidia-modelopt", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "datasets")


@cache
def package_version(name: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def provenance() -> dict[str, Any]:
    """Time, command line, versions, host, GPU and, for a checkout of this project, its commit."""
    gpu = find_gpu()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": sys.argv[1:],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": gpu.name if gpu else None,
        "git_commit": git_commit(),
        "packages": {name: package_version(name) for name in PACKAGES},
    }


@cache
def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, `-dirty` when changed; None outside a checkout."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except OSError:
        return None
    return done.stdout.strip() or None

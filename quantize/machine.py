"""What this machine has: memory, disk, GPUs. Without torch, so that `plan` can ask in milliseconds."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class GPU:
    """The GPU that a run would use; what is free of it is less by a CUDA context as soon as this process has one."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str


def find_gpu() -> GPU | None:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves visible; None when there is none, or no driver."""
    pynvml = _nvml()
    if pynvml is None:
        return None
    try:
        handle = _visible_handle(pynvml)
        if handle is None:
            return None
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return GPU(str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free), f"{major}.{minor}")
    except pynvml.NVMLError:
        return None


@cache
def _nvml() -> Any:
    """The driver's library, started once a process, since that can take tenths of a second; None without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _visible_handle(pynvml: Any) -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return pynvml.nvmlDeviceGetHandleByIndex(0) if pynvml.nvmlDeviceGetCount() else None
    first = visible.split(",")[0].strip()
    if first.startswith("GPU-"):
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    return pynvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdigit() else None


def available_memory_bytes() -> int:
    """Host memory that can be taken without swapping."""
    return int(psutil.virtual_memory().available)


def free_disk_bytes(path: Path) -> int:
    """Free bytes on the file system where `path` is, or would be made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def reset_peak_memory() -> None:
    """Starts a new measurement of this process's peak memory (Linux; elsewhere the peak is the process's so far)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory_bytes() -> int:
    """This process's peak resident memory since `reset_peak_memory`."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(psutil.Process().memory_info().rss)

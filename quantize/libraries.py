"""Imports PyTorch and transformers in the background, since that takes seconds, while the inputs are hashed.

Whoever imports transformers waits for that first: it replaces its own module while it is imported, and a second thread that
imports from it at that moment is given the unfinished one.
"""

import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quantize.model_scan import scanning_quickly
from quantize.stand_ins import standing_in

# Read when PyTorch is imported. Layers of two kinds and lm_head take turns; without this, memory of one size lies idle.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# Read when CUDA is started: a kernel is loaded when it is first used. PyTorch sets it too, but later.
os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
# A thread that waits for another one sleeps: the cores are wanted by those that read, hash and write.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# transformers imports these, where they are installed, for what no run does: sound, images, losses of object detection, a way
# of generating, models spread over devices. On a machine that has them all, that takes longer than everything else here.
UNUSED = ("accelerate", "librosa", "scipy", "sklearn", "torchaudio", "torchcodec", "torchvision")
SWITCH_SECONDS = 0.0005  # how soon the import lets a thread that hashes go on; Python's own 5 ms are longer than it hashes for

_imported = threading.Event()
_imported.set()  # as far as anyone has asked


def start_gpu() -> None:
    """Begins, in a thread, what a GPU needs and PyTorch does not: Python's imports wait for none of it."""
    threading.Thread(target=_start_gpu, daemon=True).start()


def start_importing(*, gpu: bool) -> None:
    """Begins, in a thread; with `gpu`, also what needs both them and a GPU, where there is one."""
    _imported.clear()
    threading.Thread(target=_prepare, args=(gpu,), daemon=True).start()


def wait_until_imported() -> None:
    """Returns when the modules are there, at once when nobody asked for them."""
    _imported.wait()


def _prepare(gpu: bool) -> None:
    with contextlib.suppress(ImportError):  # the first stage that needs what is missing says so
        try:
            import_libraries()
        finally:
            _imported.set()
        if gpu:
            _compile()


def import_libraries() -> None:
    """Imports them in this thread, at once, and without what no run uses."""
    with contextlib.ExitStack() as stack:
        for context in (_without_collecting(), _switching_soon(), _quick_distributions(), *map(_hidden, UNUSED)):
            stack.enter_context(context)
        import torch  # noqa: F401

        for context in (standing_in(), scanning_quickly()):
            stack.enter_context(context)
        import transformers  # noqa: F401
        from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: F401 - else imported with the first layer
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe  # noqa: F401

        from quantize.streaming import engine  # noqa: F401


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Modules stay: looking for garbage among them over and over takes a fifth of the time, and again when the process ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _switching_soon() -> Iterator[None]:
    """Whoever hashes the inputs meanwhile needs the interpreter often, and for a moment only."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """As if a module were not installed."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


@contextlib.contextmanager
def _quick_distributions() -> Iterator[None]:
    """transformers asks which distribution has which package, and Python reads the file list of every one to say it."""
    original = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: _Distributions(original)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = original


class _Distributions(Mapping[str, list[str]]):
    """Package -> its distributions, found when asked for: most have the package's name."""

    def __init__(self, read_all: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read_all = cache(read_all)

    def __getitem__(self, package: str) -> list[str]:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            return self._read_all()[package]
        return [package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read_all())

    def __len__(self) -> int:
        return len(self._read_all())

    def get(self, package: str, default: Any = None) -> Any:
        """Who asks so wants to know all that have the package."""
        return self._read_all().get(package, default)


def _start_gpu() -> None:
    if _open_cuda():
        _hash_triton()


def _open_cuda() -> bool:
    """Creates this process's CUDA context, which PyTorch then finds; False where there is no GPU, or no PyTorch for one."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not (Path(str(torch.origin)).parent / "lib" / "libtorch_cuda.so").exists():
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), int(os.environ.get("LOCAL_RANK", "0"))):
        return False
    return int(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)) == 0


def _hash_triton() -> None:
    """Before it uses a compiled kernel, Triton hashes itself, for most of a second."""
    with contextlib.suppress(Exception):  # whoever needs a kernel finds out what is wrong
        import triton  # noqa: F401

        for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # 3.6 has it in the first, 3.4 in the second
            if key := getattr(sys.modules.get(place), "triton_key", None):
                key()  # it is remembered
                break


def _compile() -> None:
    """Compiles, beside whatever is done in the meantime."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    from quantize.streaming.faster import delta_rule
    from quantize.streaming.ranks import local_device

    with contextlib.suppress(RuntimeError):  # what is wrong with it, the first stage that uses it says
        if torch.cuda.is_available():
            delta_rule.same_rule(torch_chunk_gated_delta_rule, torch.device(local_device("cuda")))

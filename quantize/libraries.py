"""Imports PyTorch and transformers in the background, since that takes seconds, while the inputs are hashed.

Whoever imports transformers waits for that first: it replaces its own module while it is imported, and a second thread that
imports from it at that moment is given the unfinished one.
"""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator

# Read when PyTorch is imported. Layers of two kinds and lm_head take turns; without this, memory of one size lies idle.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# A thread that waits for another one sleeps: the cores are wanted by those that read, hash and write.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_imported = threading.Event()
_imported.set()  # as far as anyone has asked


def start_importing(*, gpu: bool) -> None:
    """Begins, in a thread; with `gpu`, also what a GPU needs, where there is one."""
    _imported.clear()
    threading.Thread(target=_prepare, args=(gpu,), daemon=True).start()


def wait_until_imported() -> None:
    """Returns when the modules are there, at once when nobody asked for them."""
    _imported.wait()


def _prepare(gpu: bool) -> None:
    with contextlib.suppress(ImportError):  # the first stage that needs what is missing says so
        try:
            _import()
        finally:
            _imported.set()
        if gpu:
            _start_gpu()


def _import() -> None:
    with _without_collecting(), _hidden("sklearn"), _hidden("scipy"):
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
def _hidden(module: str) -> Iterator[None]:
    """As if a module were not installed.

    transformers imports scikit-learn for one way of generating and SciPy for the losses of object detection: two seconds.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def _start_gpu() -> None:
    """Creates CUDA's context and compiles, beside whatever is done in the meantime."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    from quantize.streaming.faster import delta_rule
    from quantize.streaming.ranks import local_device

    with contextlib.suppress(RuntimeError):  # what is wrong with it, the first stage that uses it says
        if torch.cuda.is_available():
            delta_rule.same_rule(torch_chunk_gated_delta_rule, torch.device(local_device("cuda")))

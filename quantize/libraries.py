"""Imports PyTorch and transformers in the background, since that takes seconds, while the inputs are hashed.

Whoever imports transformers waits for that first: it replaces its own module while it is imported, and a second thread that
imports from it at that moment is given the unfinished one.
"""

import os
import threading

# Read when PyTorch is imported. Layers of two kinds and lm_head take turns; without this, memory of one size lies idle.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

_importing: threading.Thread | None = None


def start_importing() -> None:
    """Begins, in a thread."""
    global _importing  # noqa: PLW0603 - there is one interpreter, and it imports once
    _importing = threading.Thread(target=_import, daemon=True)
    _importing.start()


def wait_until_imported() -> None:
    """Returns when the thread is done, at once when there is none."""
    if _importing is not None:
        _importing.join()


def _import() -> None:
    from quantize.streaming import engine  # noqa: F401 - and with it torch, and transformers' model classes

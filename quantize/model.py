"""The only place that loads a model into memory."""

import contextlib
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

from assemble.architecture import TEXT_CLASS, WRAPPED_CLASS, Architecture
from quantize.console import Reporter


def load_model(root: Path, architecture: Architecture, device: str, reporter: Reporter) -> Any:
    """Loads the checkpoint's own class in BF16 and evaluation mode.

    Every floating-point tensor becomes BF16, F32 `A_log` and norms included; the files that are written later take those
    from the source, not from here. transformers drops the MTP head.

    Args:
        root: The checkpoint's directory. Never a Hub id.
        architecture: Of that checkpoint.
        device: `cuda` or `cpu`.
        reporter: Where progress goes.

    Returns:
        A `transformers.PreTrainedModel`.
    """
    import torch
    import transformers

    classes = WRAPPED_CLASS if architecture.wrapped else TEXT_CLASS
    model_class = getattr(transformers, classes[architecture.model_type])
    with _loading_progress(reporter):
        model = model_class.from_pretrained(root, dtype=torch.bfloat16, device_map=device, local_files_only=True)
    return model.eval().requires_grad_(requires_grad=False)


def checkpoint_name(module: str, architecture: Architecture) -> str:
    """A module's name in the checkpoint, from its name in the model.

    They differ for a text-only checkpoint that kept the wrapped names (`model.language_model.`), which transformers 5
    renames on load (conversion_mapping.py, `qwen3_5_text`).
    """
    if architecture.wrapped or not module.startswith("model."):
        return module
    return architecture.prefix + module.removeprefix("model.")


@contextlib.contextmanager
def _loading_progress(reporter: Reporter) -> Iterator[None]:
    """Shows transformers' loading bar as ours."""
    from transformers.utils import logging

    with contextlib.ExitStack() as stack:

        def hook(_factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            items = args[0] if args else kwargs.get("iterable")
            total = kwargs.get("total") or (len(items) if isinstance(items, Sized) else 0)
            return _Bar(items, stack.enter_context(reporter.task("load", total)))

        previous = logging.set_tqdm_hook(hook)
        stack.callback(logging.set_tqdm_hook, previous)
        yield


class _Bar:
    """The part of tqdm's interface that transformers uses."""

    def __init__(self, items: Any, advance: Any) -> None:
        self._items, self._advance = items, advance

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self._advance(1)

    def update(self, n: int = 1) -> None:
        self._advance(n)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: None

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

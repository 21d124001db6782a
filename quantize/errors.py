"""Errors that are not the input's fault: a check that failed. The commands exit with 1 on them."""


class CheckFailedError(RuntimeError):
    """A check of the pipeline failed; nothing was released.

    Attributes:
        summary: What failed in a sentence for the model card: without paths, host names or times.
    """

    summary: str = ""


class OutOfGPUMemoryError(CheckFailedError):
    """The GPU's memory did not suffice."""

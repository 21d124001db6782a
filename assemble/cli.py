"""How the commands end: 0 for success, 1 for a failed check or machine, 2 for bad input, 130 for Ctrl-C."""

import contextlib
import sys
from collections.abc import Iterator

import typer

from assemble.errors import DISK_FULL, InputError
from recipes.errors import RecipeError


@contextlib.contextmanager
def reported(*failed_checks: type[Exception], debug: bool) -> Iterator[None]:
    """Prints an expected error as one paragraph on stderr and exits; with `debug`, shows the traceback.

    Args:
        failed_checks: Errors that mean a check failed (exit 1) and not that the input was bad (exit 2).
        debug: Let the traceback through.
    """
    try:
        yield
    except KeyboardInterrupt:
        _end("interrupted. Finished stages are kept: the same command continues.", 130)
    except failed_checks as error:
        _raise_or_end(error, str(error), 1, debug=debug)
    except (InputError, RecipeError) as error:
        _raise_or_end(error, str(error), 2, debug=debug)
    except MemoryError as error:
        _raise_or_end(error, "out of host memory. Finished stages are kept; the same command continues.", 1, debug=debug)
    except OSError as error:
        if error.errno in DISK_FULL:
            text = (
                f"the disk is full ({error.strerror}). Free some space: the same command continues, finished stages are kept."
            )
        else:
            text = f"{error.strerror or error}: {error.filename or 'no file named'} (--debug shows where)"
        _raise_or_end(error, text, 1, debug=debug)


def _raise_or_end(error: BaseException, text: str, code: int, *, debug: bool) -> None:
    if debug:
        raise error
    _end(text, code)


def _end(text: str, code: int) -> None:
    print(f"error: {text}", file=sys.stderr)  # noqa: T201 - the commands' one way of printing an error
    raise typer.Exit(code)

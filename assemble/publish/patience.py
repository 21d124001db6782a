"""Asks the Hub again when it is busy or in trouble, as long as asking twice does no harm."""

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")
ATTEMPTS = 5
LONGEST_WAIT = 300.0  # seconds that a Retry-After is obeyed for
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


def patiently(ask: Callable[[], Answer], say: Callable[[str], None], attempts: int = ATTEMPTS) -> Answer:
    """Calls `ask` until it answers. huggingface_hub retries transfers itself, but not the questions around them.

    Args:
        ask: Harmless when it is done twice.
        say: Told why it waits, and how long.
        attempts: How often it is asked at most.

    Raises:
        Exception: the last one, or the first that waiting does not help against.
    """
    for attempt in range(1, attempts):
        try:
            return ask()
        except Exception as error:
            seconds = wait_for(error, attempt)
            if seconds is None:
                raise
            say(f"the Hub: {reason(error)}; asking again in {seconds:.0f} s")
            time.sleep(seconds)
    return ask()


def wait_for(error: Exception, attempt: int) -> float | None:
    """How many seconds to wait before the next attempt; None when waiting does not help."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    backoff = min(2.0 ** (attempt - 1), 30.0)
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in TRANSIENT:
            return None
        said = error.response.headers.get("Retry-After", "")
        return min(float(said), LONGEST_WAIT) if said.isdigit() else backoff
    return backoff if isinstance(error, httpx.TransportError) else None


def reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    response = getattr(error, "response", None)
    return f"HTTP {response.status_code}" if response is not None else type(error).__name__

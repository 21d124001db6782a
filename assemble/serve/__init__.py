"""Serving: from a profile, a checkpoint and the memory of the cards to the exact command."""

from dataclasses import dataclass
from pathlib import Path

from assemble.serve.command import Place, vllm_command
from assemble.serve.deciding import RefusedError, Wish, decide
from assemble.serve.described import describe
from recipes.serve_profiles import load_profile, shipped_profiles

PORT = 8000


@dataclass(frozen=True)
class FittingCommand:
    """A shipped profile that a checkpoint fits.

    Attributes:
        profile: The profile's name.
        title: One line for people.
        command: The `vllm serve` line, shell-quoted, a flag a line.
        pool_tokens: Tokens that the KV pool holds.
        max_context: Tokens of the longest request, as the command has it.
        concurrency: Requests of that length that the pool holds.
        vllm: The version that the command is for.
    """

    profile: str
    title: str
    command: str
    pool_tokens: int
    max_context: int
    concurrency: float
    vllm: str


def commands_that_fit(root: Path, *, model: str | None = None, vllm: str | None = None) -> list[FittingCommand]:
    """The commands of every shipped profile that a checkpoint fits, sorted by name.

    Args:
        root: The checkpoint's directory; headers and configs are read.
        model: What the commands call it, a Hub id say; by default `root`.
        vllm: vLLM's version; by default each profile's own.

    Raises:
        InputError: `root` holds no sound checkpoint of this family, or `vllm` is no version.
    """
    checkpoint, found = describe(root), []
    place = Place(model or str(root), None, PORT)
    for name in shipped_profiles():
        profile = load_profile(name)[1]
        try:
            serving = decide(name, profile, checkpoint, Path(place.model).name, Wish(vllm=vllm))
        except RefusedError:
            continue
        pool = serving.fit.pool_tokens
        text = vllm_command(serving, place).text()
        concurrency = serving.fit.concurrency(serving.context)
        found.append(FittingCommand(name, profile.title, text, pool, serving.context, concurrency, serving.vllm))
    return found

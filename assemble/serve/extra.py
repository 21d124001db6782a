"""Arguments of `vllm serve` as they stand on a command line, the profile's and the user's own."""

from collections.abc import Sequence
from dataclasses import dataclass

ASKED = "as asked on the command line"


@dataclass(frozen=True)
class Given:
    """A flag as it is given.

    Attributes:
        name: `--max-model-len`.
        values: What follows it; none for a switch.
        reason: Why it is there.
    """

    name: str
    values: tuple[str, ...]
    reason: str

    @property
    def argv(self) -> tuple[str, ...]:
        """The words."""
        return (self.name, *self.values)


def merged(given: Sequence[Given], extra: Sequence[str]) -> tuple[Given, ...]:
    """The profile's flags with the user's in their place; what the profile does not have comes last.

    A flag of the profile that the user gives, too, is taken from the user, in its negated spelling as well.
    """
    own = split(extra)
    said = {key(flag.name): flag for flag in own}
    kept = [said.pop(key(flag.name), flag) for flag in given]
    return (*kept, *(flag for flag in own if key(flag.name) in said))


def split(words: Sequence[str]) -> list[Given]:
    """Words as flags: `--name value`, `--name=value`, `--switch`. Words before the first flag are kept as one without name."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, equals, value = word.partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            flags.append((word, []))
    return [Given(name, tuple(values), ASKED) for name, values in flags]


def key(name: str) -> str:
    """What makes two flags the same: `--no-enable-x` and `--enable-x`, `-tp` and `--tensor-parallel-size`."""
    return {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-q": "--quantization"}.get(
        name, name.replace("--no-", "--", 1).replace("_", "-")
    )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True

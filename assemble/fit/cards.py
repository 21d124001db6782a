"""The cards this project is for, and how much of their memory CUDA gives away.

Three numbers are called a card's memory. The box says 16 GB. nvidia-smi says 16,303 MiB. CUDA says 15,842 MiB
(`torch.cuda.get_device_properties().total_memory`, 15.47 GiB in PyTorch's out-of-memory text): the driver keeps the rest.
vLLM multiplies the third by --gpu-memory-utilization (vLLM 0.32 v1/worker/utils.py `request_memory`), so that one counts here.
"""

import re
from dataclasses import dataclass

from assemble.errors import InputError

MIB = 1024 * 1024


class CardError(InputError):
    """A --gpus that names no known card."""


@dataclass(frozen=True)
class Card:
    """One GPU.

    Attributes:
        name: NVIDIA's name for it, or what the user wrote.
        gigabytes: What the box says.
        smi_mib: What nvidia-smi reports.
        usable_mib: What CUDA reports on Linux, and vLLM's utilization is a share of.
        sm: Compute capability, 120 for consumer and workstation Blackwell.
        measured: True when `usable_mib` was seen in a log; False when it was derived from `smi_mib`, good to 0.2 %.
    """

    name: str
    gigabytes: int
    smi_mib: int
    usable_mib: int
    sm: int = 120
    measured: bool = True

    @property
    def usable_bytes(self) -> int:
        """`usable_mib` in bytes."""
        return self.usable_mib * MIB


@dataclass(frozen=True)
class Cards:
    """One or several equal GPUs, over which a model is split by tensor parallelism."""

    count: int
    card: Card

    def __str__(self) -> str:
        plural = "s" if self.count > 1 and self.card.name.endswith(" card") else ""
        return f"{self.count}x {self.card.name}{plural}"


def _derived(name: str, gigabytes: int, smi_mib: int) -> Card:
    """A card whose CUDA total nobody reported: on the measured ones CUDA has 425 MiB and 0.22 % less than nvidia-smi."""
    return Card(name, gigabytes, smi_mib, round(smi_mib * 0.9978) - 425, measured=False)


KNOWN_CARDS = (
    _derived("RTX 5070", 12, 12227),
    Card("RTX 5060 Ti", 16, 16311, 15816),
    Card("RTX 5070 Ti", 16, 16303, 15842),
    Card("RTX 5080", 16, 16303, 15851),
    _derived("RTX PRO 2000 Blackwell", 16, 16311),
    _derived("RTX 5090 Laptop", 24, 24463),
    _derived("RTX PRO 4000 Blackwell", 24, 24467),
    Card("RTX 5090", 32, 32607, 32123),
    _derived("RTX PRO 4500 Blackwell", 32, 32623),
    Card("RTX PRO 5000 Blackwell", 48, 48935, 48404),
    _derived("RTX PRO 5000 72GB Blackwell", 72, 73415),
    Card("RTX PRO 6000 Blackwell", 96, 97887, 97249),
)
_FORM = re.compile(r"(?:(\d+)\s*[xX*]\s*)?(.+)")
_SIZE = re.compile(r"(\d+)\s*(gb|mib)", re.IGNORECASE)
COUNT_LIMIT = 64


def parse_cards(text: str) -> Cards:
    """Reads what the user calls their cards: `2x16GB`, `RTX5090`, `2x RTX 5070 Ti`, `4x15842MiB`.

    A size in GB stands for the known card of that size with the least memory; a size in MiB is CUDA's total.

    Raises:
        CardError: no such card, or no sensible number of them.
    """
    found = _FORM.fullmatch(text.strip())
    count = int(found[1] or 1) if found else 0
    if found is None or not 1 <= count <= COUNT_LIMIT:
        raise CardError(f"--gpus {text!r}: write a number and a card, such as 2x16GB or 1xRTX5090. {_known()}")
    size = _SIZE.fullmatch(found[2].strip())
    if size is None:
        return Cards(count, _named(found[2]))
    return Cards(count, _sized(int(size[1])) if size[2].lower() == "gb" else _given(int(size[1])))


def _named(text: str) -> Card:
    wanted = _key(text)
    matching = [card for card in KNOWN_CARDS if wanted in _spellings(card)]
    if not matching:
        raise CardError(f"--gpus: no card {text.strip()!r} is known. {_known()}")
    return matching[0]


def _spellings(card: Card) -> set[str]:
    """A card's names, without its generation and with its size, as shops and serve profiles have it."""
    names = {card.name, card.name.removesuffix(" Blackwell")}
    return {_key(name) for name in names | {f"{name} {card.gigabytes}GB" for name in names}}


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()).removeprefix("nvidia").removeprefix("geforce")


def _sized(gigabytes: int) -> Card:
    of_size = [card for card in KNOWN_CARDS if card.gigabytes == gigabytes]
    if not of_size:
        raise CardError(f"--gpus: no card of {gigabytes} GB is known. {_known()}")
    least = min(of_size, key=lambda card: card.usable_mib)
    return Card(f"{gigabytes} GB card", gigabytes, least.smi_mib, least.usable_mib, least.sm, least.measured)


def _given(mib: int) -> Card:
    if not 1024 <= mib < 2**24:
        raise CardError(f"--gpus: {mib} MiB is no GPU's memory")
    return Card(f"{mib} MiB card", round(mib / 1024), mib, mib)


def _known() -> str:
    sizes = sorted({card.gigabytes for card in KNOWN_CARDS})
    names = ", ".join(card.name for card in KNOWN_CARDS)
    return (
        f"Known sizes: {', '.join(f'{size}GB' for size in sizes)}; known cards: {names}. Any other: its CUDA total, such as "
        "2x23028MiB (python -c 'import torch; print(torch.cuda.mem_get_info()[1] >> 20)')."
    )

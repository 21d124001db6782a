"""The fault matrix: ways to break a checkpoint, each with the rule that is meant to catch it.

A fault is one line of the tables below: its name, the rule, and what is done to a `Copy`. `DENSE` breaks the tiny model's own
finished checkpoint (layers 0 to 2 linear attention, layer 3 full attention, two shards, the second unquantized), `MOE` a
synthetic mixture of 8 experts, its head's experts fused; `SPLIT` the same with a split head. Faults after `AT_DEPTH` need
tensor values, those after `AGAINST_SOURCE` the BF16 checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.assemble.checkpoints import Copy
from tests.assemble.mutations.configs import CONFIG
from tests.assemble.mutations.experts import MOE, MOE_AGAINST_SOURCE, MOE_AT_DEPTH, SPLIT
from tests.assemble.mutations.files import FILES, SIDE
from tests.assemble.mutations.modules import IGNORE, MODULES, MTP
from tests.assemble.mutations.tools import Change
from tests.assemble.mutations.values import AGAINST_SOURCE, AT_DEPTH


@dataclass(frozen=True)
class Fault:
    """One way to break a checkpoint.

    Attributes:
        base: `dense`, `moe` or `split`.
        name: What is wrong with it.
        rule: The rule that is meant to find it.
        change: Does it.
        deep: Whether values must be read to see it.
        source: Whether the source is needed to see it.
        options: More arguments of `verify`.
    """

    base: str
    name: str
    rule: str
    change: Change
    deep: bool = False
    source: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.base}: {self.name}"


def _faults() -> Iterator[Fault]:
    for base, table in (
        *(("dense", t) for t in (FILES, SIDE, CONFIG, MODULES, IGNORE, MTP)),
        ("moe", MOE),
        ("split", SPLIT),
    ):
        yield from (Fault(base, name, rule, change) for name, (rule, change) in table.items())
    for base, table in (("dense", AT_DEPTH), ("moe", MOE_AT_DEPTH)):
        yield from (Fault(base, name, rule, change, deep=True) for name, (rule, change) in table.items())
    for base, table in (("dense", AGAINST_SOURCE), ("moe", MOE_AGAINST_SOURCE)):
        yield from (Fault(base, name, rule, change, source=True) for name, (rule, change) in table.items())
    for parts in (3, 8):
        yield Fault("dense", f"split over {parts} GPUs", "Q-14", lambda _: None, options={"tensor_parallel": parts})
    no_head: Change = lambda c: c.drop(*c.names("mtp."))  # noqa: E731 - a line of the table
    yield Fault("dense", "the head is lost, and wanted", "CFG-5", no_head, options={"require_mtp": True})


FAULTS: tuple[Fault, ...] = tuple(_faults())


def break_copy(copy: Copy, fault: Fault) -> None:
    """Does it, and writes it."""
    fault.change(copy)
    copy.save()

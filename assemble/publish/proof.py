"""Whether a checkpoint may be uploaded: every file as its provenance says, every rule kept, every claim backed by a record."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.card import CARD, card_form, render_card
from assemble.provenance import PROVENANCE, FileCheck, check_files, provenance_text, read_provenance
from assemble.publish.errors import RefusedError
from assemble.verify import verify
from assemble.writer import Progress

CLAIMED = ("evaluate", "smoke")  # sections of the card that a stage's record has to back
SHOWN = 5


@dataclass(frozen=True)
class Parcel:
    """One file to send.

    Attributes:
        content: Where it lies, or, of what is rendered for the repository, its bytes.
        size: In bytes.
        sha256: Of its content, in hexadecimal.
    """

    content: Path | bytes
    size: int
    sha256: str


@dataclass(frozen=True)
class Proven:
    """A checkpoint that may be uploaded.

    Attributes:
        root: Its folder.
        files: What is sent, by name in the repository.
        left: Files of the folder that are not sent: no record names them.
        weights: The digests of its shards.
    """

    root: Path
    files: Mapping[str, Parcel]
    left: tuple[str, ...]
    weights: Mapping[str, str]


def prove(root: Path, name: str, progress: Progress = lambda _: None, *, own_card: bool = False) -> Proven:
    """Checks a checkpoint, and renders its card for the repository `name`.

    Args:
        root: The checkpoint.
        name: What its commands are to call it: the Hub id.
        progress: Called with the bytes of each chunk that was read.
        own_card: Send README.md as it is: whoever wrote it answers for it.

    Raises:
        RefusedError: it is not what was recorded, it breaks a rule, or its card says what no record backs.
    """
    record = read_provenance(root)
    if record is None:
        raise RefusedError(
            f"{root} has no {PROVENANCE}: nothing says what it was when it was checked. "
            f"Check it and record that: python -m assemble card {root}"
        )
    checked = check_files(root, record, progress)
    _check_recorded(root, checked, own_card=own_card)
    _check_rules(root, record)
    if not own_card:
        _check_card(root, record)
    files = {
        name: Parcel(root / name, (root / name).stat().st_size, checked.digests[name])
        for name in record["files"]
        if name in checked.digests
    }
    files |= _rendered(record, name) if not own_card else _as_it_is(root, record)
    left = tuple(f.name for f in checked.findings if f.kind == "extra")
    weights = {file: parcel.sha256 for file, parcel in files.items() if file.endswith(".safetensors")}
    return Proven(root, files, left, weights)


def _check_recorded(root: Path, checked: FileCheck, *, own_card: bool) -> None:
    wrong = [f for f in checked.findings if f.kind != "extra" and not (own_card and f.name == CARD)]
    if not wrong:
        return
    names = {finding.name for finding in wrong}
    shown = "; ".join(str(finding) for finding in wrong[:SHOWN])
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    own = f". To send {CARD} as you wrote it: --own-card" if names == {CARD} else ""
    raise RefusedError(
        f"{root} is not what was checked and recorded: {shown}{more}. If the change is meant, check and record the "
        f"checkpoint as it is now: python -m assemble card {root}" + (" --replace" if CARD in names else "") + own
    )


def _check_rules(root: Path, record: Mapping[str, Any]) -> None:
    deep = bool(record.get("card", {}).get("verify", {}).get("deep"))  # the values were read then, and are the same bytes now
    report = verify(root, deep=not deep)
    if report.errors:
        first = report.errors[0]
        raise RefusedError(
            f"{root} is not fit to serve ({len(report.errors)} errors): {first.rule}: {first.where}: found {first.found}, "
            f"expected {first.expected}. Look at all of them: python -m assemble verify {root}"
        )


def _check_card(root: Path, record: Mapping[str, Any]) -> None:
    """Refuses a card that is not the one that the records make, or records that a stage does not stand behind."""
    facts, remedy = record.get("card"), f"Render it from the records: python -m assemble card {root} --replace"
    if not isinstance(facts, dict):
        raise RefusedError(f"{root / PROVENANCE} holds no facts for a card. {remedy}")
    for claim in CLAIMED:
        if facts.get(claim) and claim not in record.get("stages", {}):
            raise RefusedError(f"{root / CARD} claims results of {claim!r}, and no record of that stage backs them. {remedy}")
    if record.get("card_form") != card_form():  # rendered by another version; what is sent is rendered from the records anew
        return
    said, backed = (root / CARD).read_text(encoding="utf-8"), render_card(facts, str(record.get("name", root.name)))
    if said != backed:
        lines = set(backed.splitlines())
        claim = next((line for line in said.splitlines() if line.strip() and line not in lines), "something is left out of it")
        raise RefusedError(
            f"{root / CARD} says what no record backs, or leaves out what one says: {claim[:200]!r}. {remedy}; "
            "or answer for it yourself: --own-card"
        )


def _rendered(record: Mapping[str, Any], name: str) -> dict[str, Parcel]:
    """Card and provenance for a repository: its commands name it."""
    card = render_card(record["card"], name).encode()
    files = {**record["files"], CARD: hashlib.sha256(card).hexdigest()}
    new = {**record, "name": name, "card_form": card_form(), "files": files}
    return {CARD: _parcel(card), PROVENANCE: _parcel(provenance_text(new).encode())}


def _as_it_is(root: Path, record: Mapping[str, Any]) -> dict[str, Parcel]:
    """The card that someone wrote, and a provenance.json that has its digest."""
    if not (root / CARD).is_file():
        raise RefusedError(f"{root} has no {CARD} to send with --own-card. Write one, or leave that option out")
    card = (root / CARD).read_bytes()
    files = {**record["files"], CARD: hashlib.sha256(card).hexdigest()}
    return {CARD: _parcel(card), PROVENANCE: _parcel(provenance_text({**record, "files": files}).encode())}


def _parcel(data: bytes) -> Parcel:
    return Parcel(data, len(data), hashlib.sha256(data).hexdigest())

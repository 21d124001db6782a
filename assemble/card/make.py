"""`card`: renders README.md anew from what provenance.json holds, or, of a checkpoint without a record, from its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.card import CARD, card_form, render_card
from assemble.card.found import found_facts
from assemble.card.serving import serve_entries
from assemble.errors import InputError
from assemble.provenance import FORMAT, PROVENANCE, FileCheck, check_files, provenance_text, read_provenance
from assemble.publish.belongings import belonging
from assemble.verify import Report, verify
from assemble.wholefile import write_whole
from assemble.writer import Progress, sha256_file

REMADE = (CARD, PROVENANCE)
PLOTS = (".png", ".svg")


class CardError(InputError):
    """A README.md that someone wrote, and that would be lost."""


@dataclass(frozen=True)
class Made:
    """What was made: the card's text, what the checkpoint is like, and where its facts come from."""

    root: Path
    text: str
    report: Report
    origin: str
    changed: bool


def make_card(root: Path, progress: Progress = lambda _: None, *, replace: bool = False) -> Made:
    """Verifies a checkpoint, renders its card, and records the digest of every file in provenance.json.

    Nothing is written when it breaks a rule.

    Args:
        root: The checkpoint.
        progress: Called with the bytes of each chunk that was read.
        replace: Replace a README.md that this did not render.

    Raises:
        CardError: there is a README.md that this did not render.
    """
    record = read_provenance(root) or {}
    checked = check_files(root, {"files": {}, **record}, progress)
    _check_card_is_ours(root, record, checked, replace=replace)
    report = verify(root, deep=True)
    if report.errors:
        return Made(root, "", report, "", changed=False)
    facts, origin = _facts(root, record, checked, report)
    facts["serve"] = serve_entries(root)
    name = str(record.get("name", root.absolute().name))
    text = render_card(facts, name)
    changed = _write(root / CARD, text)
    plots = [n for n in record.get("files", {}) if n.endswith(PLOTS) and n in checked.digests and n in facts["plots"]]
    files = {n: checked.digests[n] for n in (*belonging(root), *plots)} | {CARD: sha256_file(root / CARD)}
    new = {
        **record,
        "format": FORMAT,
        "name": name,
        "card_form": card_form(),
        "card": facts,
        "files": dict(sorted(files.items())),
    }
    if origin != "records":
        new.pop("mended", None)  # the card's facts have it; every file has a digest again
        new["stages"] = {n: s for n, s in record.get("stages", {}).items() if n not in ("evaluate", "smoke")}
    return Made(root, text, report, origin, _write(root / PROVENANCE, provenance_text(new)) or changed)


def _check_card_is_ours(root: Path, record: Mapping[str, Any], checked: FileCheck, *, replace: bool) -> None:
    digest = checked.digests.get(CARD)
    if digest is not None and digest != record.get("files", {}).get(CARD) and not replace:
        raise CardError(f"{root / CARD} was written by someone, and would be lost. Keep a copy elsewhere, then give --replace.")


def _facts(root: Path, record: Mapping[str, Any], checked: FileCheck, report: Report) -> tuple[dict[str, Any], str]:
    """The recorded facts while all that they speak of is unchanged; otherwise what the files say now."""
    earlier, mended = dict(record.get("card") or {}), list(record.get("mended") or [])
    differs = [f for f in checked.findings if f.kind != "extra" and f.name not in REMADE]
    if earlier and not differs and not mended:
        return earlier, "records"
    kept = [*earlier.get("mended", []), *mended]
    return found_facts(root, report, earlier, kept), "files"


def _write(path: Path, text: str) -> bool:
    """Writes a file under its name only when it is whole; False when it has this content already."""
    if path.is_file() and path.read_bytes() == text.encode():
        return False
    write_whole(path, text)
    return True

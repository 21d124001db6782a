"""OUT: it appears in one rename, its card is renewed in one exchange, and it is not called complete once it was changed.

`OUT.run/released.json` holds the digests of the card's files that OUT has, as a list of sets: one, or, while OUT's card is
being renewed, the old set and the new one. Whenever the work is killed, OUT has one of them whole.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.jsonfile import read_object, write_object
from assemble.mend import swap
from assemble.provenance import PROVENANCE, read_provenance
from assemble.writer import link_file, sha256_file, sync_directory
from quantize.stage import Request, read_record

COLLECTED = "collected"
RELEASED = "released.json"


def recover(request: Request) -> None:
    """Finishes what a killed exchange left beside OUT."""
    swap.recover(request.out)


def check_unchanged(request: Request) -> None:
    """Refuses an OUT that this run did not make, or that was changed since: all files are there, small ones agree.

    The shards' values are not read again; `python -m assemble verify OUT --provenance` does that.

    Raises:
        InputError: names the first file that is not as it was made.
    """
    made, released = read_record(request.workspace / "assemble"), request.workspace / RELEASED
    if made is None or not released.is_file():
        raise InputError(
            f"OUT {request.out} already exists, and the run in {request.workspace} is not finished. Move one away."
        )
    shards = {shard.name for shard in Checkpoint.open(request.out).shards}
    small = {name: digest for name, digest in made.outputs.items() if name not in shards}
    missing = [name for name in made.outputs if not (request.out / name).is_file()]
    name = next(iter(missing), None) or _changed(request.out, small)
    if name is None and _card_there(request) is None:
        name = _changed(request.out, read_object(released)["cards"][-1])
    if name is not None:
        raise InputError(
            f"{request.out / name} is not what this run made: it was changed or removed since. Look with: python -m assemble "
            f"verify {request.out} --provenance. To make the checkpoint anew, remove it and give the same command."
        )


def _card_there(request: Request) -> dict[str, str] | None:
    """The digests of OUT's card: one that this run gave it, or one that `python -m assemble card` made anew and recorded."""
    cards: list[dict[str, str]] = read_object(request.workspace / RELEASED)["cards"]
    for card in cards:
        if _changed(request.out, card) is None:
            return card
    made, record = _outputs(request, "assemble"), read_provenance(request.out) or {"files": {}}
    card = {name: digest for name, digest in record["files"].items() if name not in made}
    if made.items() <= record["files"].items() and _changed(request.out, card) is None:
        return card | {PROVENANCE: sha256_file(request.out / PROVENANCE)}
    return None


def _changed(out: Path, digests: Mapping[str, str]) -> str | None:
    """The first file that is absent or other than its digest says."""
    for name, digest in digests.items():
        path = out / name
        if not path.is_file() or sha256_file(path) != digest:
            return name
    return None


def release(request: Request) -> None:
    """Hard links the checkpoint's files into one folder and renames it to OUT."""
    collected = _empty(request)
    outputs: dict[str, Mapping[str, str]] = {}
    for stage in ("assemble", "card"):
        outputs[stage] = _outputs(request, stage)
        for name in outputs[stage]:
            link_file(request.workspace / stage / name, collected / name)
    sync_directory(collected)
    write_object(request.workspace / RELEASED, {"cards": [dict(outputs["card"])]})
    collected.rename(request.out)
    sync_directory(request.out.absolute().parent)


def renew_card(request: Request) -> bool:
    """Gives OUT the card that the records now make, with its weights as they are; False when it has it already.

    What else lies in OUT stays.
    """
    new = dict(_outputs(request, "card"))
    cards, old = read_object(request.workspace / RELEASED)["cards"], _card_there(request)
    assert old is not None  # noqa: S101 - checked before the work began, under the lock
    if old != new:
        collected = _empty(request)
        shutil.copytree(request.out, collected, copy_function=_link, symlinks=True, dirs_exist_ok=True)
        for name in old:
            (collected / name).unlink()
        for name in new:
            link_file(request.workspace / "card" / name, collected / name)
        sync_directory(collected)
        write_object(request.workspace / RELEASED, {"cards": [old, new]})
        swap.publish(collected, request.out)
    if cards != [new]:
        write_object(request.workspace / RELEASED, {"cards": [new]})
    return old != new


def drop_weights(request: Request) -> None:
    """Removes what OUT now holds from the run's folder; the records and reports stay."""
    for path in request.workspace.glob("*/*.safetensors"):
        path.unlink()
    for path in request.workspace.glob("*/*.tmp"):
        path.unlink()
    shutil.rmtree(request.workspace / COLLECTED, ignore_errors=True)


def _empty(request: Request) -> Path:
    collected = request.workspace / COLLECTED
    shutil.rmtree(collected, ignore_errors=True)
    collected.mkdir()
    return collected


def _link(existing: str, new: str) -> Any:
    link_file(Path(existing), Path(new))
    return new


def _outputs(request: Request, stage: str) -> Mapping[str, str]:
    record = read_record(request.workspace / stage)
    assert record is not None  # noqa: S101 - it was made or read a moment ago
    return record.outputs

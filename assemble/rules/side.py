"""Rules about the files beside the weights: tokenizer, chat template, generation and processor configs."""

from collections.abc import Iterator

from assemble.checkpoint import JSON_LIMIT, LINK_OUT, read_json, stays_inside
from assemble.jsonfile import JSONFileError
from assemble.rules.model import Detail, Mend, Served, Severity
from assemble.rules.subject import Subject
from assemble.sidefiles import SIDE_FILES, TOKENIZER, SideFileError, check_generation_config, linked_out, side_files

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZERS = (TOKENIZER, TOKENIZER_CONFIG)
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json")
W = Severity.WARNING
_BESIDE = frozenset(SIDE_FILES) - {"LICENSE"}


def tokenizer_present(subject: Subject) -> Iterator[Detail]:
    """CFG-13: the tokenizer is there and readable; so are a chat template, generation defaults and image processor files."""
    present = {*side_files(subject.root), *linked_out(subject.root)}
    for name in TOKENIZERS:
        if name not in present:
            yield Detail(name, "absent", "the source's file")
    yield from _unreadable(subject, sorted(present))
    if "generation_config.json" not in present:
        yield Detail("generation_config.json", "absent", "the source's sampling defaults", W, Served.WORSE)
    if not present & {"chat_template.jinja", "chat_template.json"} and not _template_in_config(subject):
        yield Detail("chat_template.jinja", "absent, and none in tokenizer_config.json", "a chat template", W, Served.LOUD)
    half = [name for name in PROCESSORS if name in present]
    if len(half) == 1 and "processor_config.json" not in present:
        other = next(name for name in PROCESSORS if name not in present)
        yield Detail(other, f"absent, though {half[0]} is there", "both, or processor_config.json", W, Served.LOUD)


def _unreadable(subject: Subject, names: list[str]) -> Iterator[Detail]:
    for name in names:
        if problem := _problem(subject, name):
            yield Detail(name, problem, "the source's file")
        elif name == "generation_config.json":
            try:
                check_generation_config(subject.root)
            except SideFileError as error:
                yield Detail(name, str(error), "values that can be", W)


def _problem(subject: Subject, name: str) -> str | None:
    """Why the file is of no use; tokenizer.json is large, so of it only the ends are looked at."""
    path = subject.root / name
    if not stays_inside(path):
        return LINK_OUT
    if name == TOKENIZER:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
            file.seek(max(0, path.stat().st_size - 64))
            end = file.read(64).rstrip()
        return None if start.startswith(b"{") and end.endswith(b"}") else "not a JSON object, or cut off"
    try:
        if name.endswith(".json"):
            read_json(subject.root, name)
    except JSONFileError as error:
        return str(error)
    return None


def _template_in_config(subject: Subject) -> bool:
    try:
        return "chat_template" in (read_json(subject.root, TOKENIZER_CONFIG) or {})
    except JSONFileError:
        return False


def side_files_of_the_source(subject: Subject) -> Iterator[Detail]:
    """CFG-13b: every side file of the source is there, and it is the source's byte for byte."""
    if subject.source is None:
        return
    here = set(side_files(subject.root))
    for name in side_files(subject.source.root):
        if name not in _BESIDE:
            continue
        if name not in here:
            yield Detail(name, "absent, though the source has it", "the source's file")
        elif not _same(subject, name):
            yield Detail(name, "not the source's bytes", "the source's file", Severity.INFO, mend=Mend.BY_HAND)


def _same(subject: Subject, name: str) -> bool:
    assert subject.source is not None  # noqa: S101 - the caller checked it
    mine, theirs = subject.root / name, subject.source.root / name
    if not stays_inside(mine) or mine.stat().st_size != theirs.stat().st_size or mine.stat().st_size > JSON_LIMIT:
        return False
    return mine.read_bytes() == theirs.read_bytes()

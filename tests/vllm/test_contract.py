"""The law book against vLLM's own loader: where that refuses, or leaves a parameter unfilled, `verify` finds an error.

The table of all faults, and who catches which, is docs/faults.md; `test_the_page_is_current` writes it.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from assemble.checkpoint import INDEX, Checkpoint, read_json
from assemble.jsonfile import JSONFileError
from assemble.rules import Finding, Severity
from assemble.verify import verify
from assemble.vllm_load import Opinion, second_opinions
from tests.assemble.checkpoints import Copy, link_tree
from tests.assemble.conftest import Pair
from tests.assemble.mutations import FAULTS, Fault, break_copy
from tests.vllm.conftest import ROOT, release

PAGE = ROOT / "docs" / "faults.md"


@dataclass(frozen=True)
class Result:
    """What each of the three says of a broken checkpoint.

    Attributes:
        fault: What is wrong with it.
        findings: Ours, with what the fault needs to be seen. As the loader does, they take an MTP head to be wanted.
        opinion: vLLM's loader's.
        names_differ: Whether its index lists other tensors than it should.
    """

    fault: Fault
    findings: tuple[Finding, ...]
    opinion: Opinion
    names_differ: bool

    @property
    def severity(self) -> Severity | None:
        """The worst of our findings."""
        found = {f.severity for f in self.findings}
        return next((severity for severity in Severity if severity in found), None)

    @property
    def ours(self) -> str:
        """The rule that was meant, and what it takes to see the fault."""
        needs = ("`--deep`" if self.fault.deep else "", "`--source`" if self.fault.source else "")
        return " ".join((self.fault.rule, self.severity.value if self.severity else "missed", *filter(None, needs)))

    @property
    def vllm(self) -> str:
        """What vLLM's loader made of it, in a few words."""
        if self.opinion.refused:
            return "refuses"
        kinds = dict.fromkeys(f.rule.removeprefix("VLLM-").lower() for f in self.opinion.findings)
        return f"silent: {', '.join(kinds)}" if kinds else "loads it whole"


def names_differ(root: Path, base: Path) -> bool:
    """What a check of names alone sees."""
    try:
        index = read_json(root, INDEX) or {}
    except JSONFileError:
        return True
    weight_map = index.get("weight_map")
    expected = (read_json(base, INDEX) or {})["weight_map"]
    return not isinstance(weight_map, dict) or weight_map.keys() != expected.keys()


@pytest.fixture(scope="module")
def results(bases: dict[str, Pair], vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Every fault, by name. vLLM reads all of the broken checkpoints in one process."""
    root = tmp_path_factory.mktemp("faults")
    loads, ours = [], []
    for number, fault in enumerate(FAULTS):
        source, base = bases[fault.base]
        copy = Copy(link_tree(base, root / str(number)), Checkpoint.open(source))
        break_copy(copy, fault)
        options = {"require_mtp": True} | fault.options
        report = verify(copy.root, source=copy.source if fault.source else None, deep=fault.deep, **options)
        ours.append((report.findings, names_differ(copy.root, base)))
        release(copy.root)
        loads.append((copy.root, options.get("tensor_parallel", 1)))
    opinions = second_opinions(vllm_python, loads)
    return {
        str(fault): Result(fault, findings, opinion, differ)
        for fault, (findings, differ), opinion in zip(FAULTS, ours, opinions, strict=True)
    }


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_vllm_stumbles_over_is_an_error_of_ours(fault: Fault, results: dict[str, Result]) -> None:
    result = results[str(fault)]
    assert result.opinion.complete or result.severity is Severity.ERROR, (result.opinion.findings, result.findings)


def test_the_page_is_current(results: dict[str, Result]) -> None:
    before = PAGE.read_text() if PAGE.exists() else ""
    text = page(list(results.values()))
    PAGE.write_text(text)
    assert text == before, f"{PAGE} was not current and has been written anew: commit it"


def page(results: list[Result]) -> str:
    """docs/faults.md."""
    total, refused = len(results), sum(r.opinion.refused for r in results)
    seen = sum(not r.opinion.complete for r in results)
    errors, warnings, notes = (sum(r.severity is severity for r in results) for severity in Severity)
    version = results[0].opinion.vllm
    rows = [
        ("`python -m assemble verify`, as an error", errors),
        ("the same, as a warning", warnings),
        ("the same, as information", notes),
        (f"vLLM {version} itself: it refuses to start", refused),
        (f"a count of what vLLM {version} writes into which parameter (`--with-vllm`), refusals included", seen),
        ("a check of names alone: whether the index lists the tensors that it should", sum(r.names_differ for r in results)),
    ]
    return "\n".join(
        [
            "# Faults, and who catches them",
            "",
            f"{total} broken checkpoints, each made by one change to a sound one (`tests/assemble/mutations`).",
            "`make test-vllm` writes this page, and checks that what vLLM's loader stumbles over is an error of ours.",
            "",
            f"| caught by | of {total} |",
            "|---|---|",
            *(f"| {who} | {count} |" for who, count in rows),
            "",
            f"vLLM loads {total - refused} of them without a word. {seen - refused} of those leave a parameter unfilled,",
            f"fill one twice, or mix number formats. The other {total - seen} fill every parameter; what is wrong shows in",
            "the answers, in the drafts, in speed or memory, or in another program.",
            "",
            "In the table, *verify*: the rule that is meant, its severity, and what it needs beyond headers and configs.",
            "*vLLM's loader*: it refuses; or it is silent about parameters that are not filled (missing), filled in part",
            "(partial) or filled twice, about tensors that are cut off, read as numbers of another kind (cast) or dropped",
            "(unused); or it loads the checkpoint whole. *names*: whether a check of names alone sees it.",
            "",
            "| checkpoint and fault | verify | vLLM's loader | names |",
            "|---|---|---|---|",
            *(f"| {r.fault} | {r.ours} | {r.vllm} | {'yes' if r.names_differ else 'no'} |" for r in results),
            "",
        ]
    )

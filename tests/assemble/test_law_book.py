"""The law book: every fault is found by the rule meant for it, and what is sound has no finding at all."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from assemble.checkpoint import Checkpoint
from assemble.commands.checking import markdown, print_book
from assemble.rules import Mend, Needs, Severity
from assemble.rules.book import RULES
from assemble.verify import verify
from tests.assemble.checkpoints import Copy, link_tree
from tests.assemble.conftest import Pair
from tests.assemble.mutations import FAULTS, Fault, break_copy

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_is_found_by_its_rule(fault: Fault, bases: dict[str, Pair], tmp_path: Path) -> None:
    source, base = bases[fault.base]
    copy = Copy(link_tree(base, tmp_path / "checkpoint"), Checkpoint.open(source))
    break_copy(copy, fault)
    report = verify(copy.root, source=copy.source if fault.source else None, deep=fault.deep, **fault.options)
    assert fault.rule in {f.rule for f in report.findings}, [f"{f.rule} {f.where}: {f.found}" for f in report.findings][:20]
    for finding in report.findings:
        assert finding.where
        assert finding.found
        assert finding.expected
        assert finding.mend


@pytest.mark.parametrize("base", ["dense", "moe", "split"])
def test_unbroken_checkpoint_has_no_finding(base: str, bases: dict[str, Pair]) -> None:
    source, root = bases[base]
    report = verify(root, source=Checkpoint.open(source), deep=True, require_mtp=True)
    assert report.findings == ()
    assert report.rules == tuple(rule.id for rule in RULES)
    assert report.requires.vllm == (0, 23)
    assert report.requires.capability == 75


def test_the_matrix_is_wide() -> None:
    assert len(FAULTS) >= 120
    assert len({str(fault) for fault in FAULTS}) == len(FAULTS)
    assert {fault.rule for fault in FAULTS} == {rule.id for rule in RULES}
    assert Counter(fault.base for fault in FAULTS)["moe"] >= 40


def test_the_book_is_complete() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    numbers = {"IDX": 6, "CFG": 13, "Q": 15, "IGN": 4, "MTP": 5, "VER": 1}
    assert {f"{part}-{i}" for part, last in numbers.items() for i in range(1, last + 1)} <= set(ids)
    for rule in RULES:
        assert rule.check.__doc__, rule.id
        assert rule.check.__doc__.startswith(f"{rule.id}: "), rule.id
        assert all((rule.law, rule.why, rule.source)), rule.id


def test_the_page_is_current() -> None:
    assert (DOCS / "law-book.md").read_text() == markdown(), "run: python -m assemble rules --markdown > docs/law-book.md"


def test_a_lost_head_is_mended_by_a_splice(dense: Copy) -> None:
    dense.drop("mtp.fc.weight")
    dense.save()
    (finding,) = (f for f in verify(dense.root).findings if f.rule == "MTP-1")
    assert finding.mend == Mend.SPLICE.value.replace("CHECKPOINT", str(dense.root))
    (finding,) = (f for f in verify(dense.root, source=dense.source).findings if f.rule == "MTP-1")
    assert finding.mend == f"python -m assemble splice --head-from {dense.source.root} {dense.root}"


def test_broken_experts_are_one_line(moe: Pair, tmp_path: Path) -> None:
    copy = Copy(link_tree(moe[1], tmp_path / "checkpoint"), Checkpoint.open(moe[0]))
    lost = [n for n in copy.names(".experts.") if n.endswith("up_proj.weight_scale_2")]
    copy.drop(*lost)
    copy.save()
    report = verify(copy.root)
    assert len([f for f in report.findings if f.rule == "Q-9"]) == len(lost) == 32
    (group,) = (g for g in report.groups if g.findings[0].rule == "Q-9")
    assert group.where == "model.language_model.layers.*.mlp.experts.*.up_proj.weight_scale_2"
    assert len(group.findings) == 32
    result = subprocess.run(
        [sys.executable, "-m", "assemble", "verify", str(copy.root)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr == ""
    assert f"{group.where}  (32 of this kind)" in result.stdout
    assert "not fit to serve" in result.stdout


def test_file_rules_are_asked_even_without_a_config(dense: Copy) -> None:
    (dense.root / "config.json").unlink()
    (dense.root / "tokenizer.json").unlink()
    dense.raw("model-00002-of-00002.safetensors", lambda data: data[:-1])
    report = verify(dense.root)
    assert {"CFG-1", "CFG-13", "IDX-4"} <= {f.rule for f in report.findings}
    assert set(report.rules) == {rule.id for rule in RULES if rule.needs is Needs.FILES}


def test_an_unquantized_checkpoint_is_called_that(tiny: Path) -> None:
    report = verify(tiny)
    assert [(f.rule, f.severity, f.found) for f in report.findings if f.severity is not Severity.INFO] == [
        ("CFG-6", Severity.ERROR, "no quantization_config and no quantized tensor: a BF16 checkpoint")
    ]
    assert f"python -m quantize run {tiny} OUT" in report.errors[0].mend


def test_the_printed_book_is_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_book()
    text = capsys.readouterr().out
    assert text.count("…") == sum((rule.law + rule.why + rule.source).count("…") for rule in RULES)
    assert max(map(len, text.splitlines())) <= 80

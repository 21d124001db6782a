"""docs/serving.md: its tables are current, its arithmetic is right, nothing that the field reports say is left out."""

import re
import shlex
from pathlib import Path

import pytest

from assemble.serve.page import whole_page
from tests.assemble.serve.test_profiles import BLOCKS, words

DOCS = Path(__file__).parents[3] / "docs"
REPORTS = Path(__file__).parents[4] / "shared" / "seeds"


@pytest.fixture(scope="module")
def page() -> str:
    return (DOCS / "serving.md").read_text()


def test_the_tables_are_current(page: str) -> None:
    assert page.endswith(whole_page()), "run: python -m assemble profiles --markdown, and put it at the page's end"


@pytest.mark.parametrize("block", BLOCKS.values())
def test_every_word_of_the_field_reports_is_explained(block: str, page: str) -> None:
    for name, _ in words(block):
        assert f"`{name}" in page, name


def test_the_reports_have_no_flag_that_is_not_explained(page: str) -> None:
    """Every flag and variable in the reports' texts, not only in the blocks as they are copied into the tests."""
    if not REPORTS.is_dir():
        pytest.skip("the field reports are not here")
    text = "\n".join(path.read_text() for path in sorted(REPORTS.glob("*.txt")))
    served = text[text.index("vLLM deployment") :] + text[: text.index("vLLM deployment")]
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", served)) | set(
        re.findall(r"\b(?:VLLM|PYTORCH|NCCL)_[A-Z0-9_]+", served)
    )
    not_vllms = {"--pyt", "--export", "--recipe", "--dataset", "--trust", "--ignore-eos", "--gpus"}
    for name in sorted(found - not_vllms):
        assert name in page, name


@pytest.mark.parametrize(
    ("said", "value", "found"),
    [
        ("203.2 / 114.8 = 1.77", 1.77, 203.2 / 114.8),
        ("322.9 / 203.2 = 1.59", 1.59, 322.9 / 203.2),
        ("360.1 / 322.9 = 1.12", 1.12, 360.1 / 322.9),
        ("114,480 / 98,304 = 1.165", 1.165, 114480 / 98304),
        ("150,000 / 114,480 = 1.310", 1.310, 150000 / 114480),
        ("117.4 x 0.0213 = 2.50", 2.50, 117.4 * 0.0213),
        ("482.3 / 135.9 = 3.55", 3.55, 482.3 / 135.9),
        ("203.0 / 104.1 = 1.95", 1.95, 203.0 / 104.1),
        ("579,964 / (147.8 x 60) = 65.4", 65.4, 579_964 / (147.8 * 60)),
        ("0.90 x 31.37 GiB are 28.2 GiB, 30.3 GB", 30.3, 0.90 * 32_123 * 2**20 / 1e9),
        ("256 x 1,800 = 460,800", 460_800, 256 * 1800),
        ("114,480 / 8 = 14,310", 14310, 114480 / 8),
        ("16,384 / 4.9 = 3,344", 3344, 16384 / 4.9),
        ("2 x 64 x 8 x 128 x 2 = 262,144", 262144, 2 * 64 * 8 * 128 * 2),
        ("24.4 GiB", 24.4, 262144 * 100_000 / 2**30),
        ("521 / 431 = 1.209", 1.209, 521 / 431),
        ("894,785", 894785, 8.8 * 2**30 / 10560),
        ("/ 65,536 = 13.7", 13.7, 8.8 * 2**30 / 10560 / 65536),
        ("218 / 162 = 1.346", 1.346, 218 / 162),
        ("162 / 19.9 = 8.1", 8.1, 162 / 19.9),
        ("647 x 3,600 = 2.33M", 2.33, 647 * 3600 / 1e6),
        ("$0.16 / 2.33 = $0.069", 0.069, 0.16 / 2.33),
        ("1 + 2 x 0.69 = 2.38", 2.38, 1 + 2 * 0.69),
        ("1 + 2 x 0.88 = 2.76", 2.76, 1 + 2 * 0.88),
    ],
)
def test_arithmetic(said: str, value: float, found: float, page: str) -> None:
    assert said in page
    decimals = len(str(value).partition(".")[2]) if isinstance(value, float) else 0
    assert round(found, decimals) == value


def test_the_commands_of_the_page_are_commands(page: str) -> None:
    from typer.main import get_command

    from assemble.__main__ import app

    known = {option for parameter in get_command(app).commands["serve"].params for option in parameter.opts}  # type: ignore[attr-defined]
    lines = [line.partition("#")[0] for line in page.splitlines() if line.startswith("python -m assemble serve ")]
    assert len(lines) >= 6
    for line in lines:
        own = line.partition(" -- ")[0]
        assert {word for word in shlex.split(own) if word.startswith("--")} <= known

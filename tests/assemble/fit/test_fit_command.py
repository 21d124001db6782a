"""The command, as a user gives it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from assemble.__main__ import app
from tests.loopback_hub import loopback_hub

LONG_CONTEXT = (
    "--gpus 2xRTX5070Ti --utilization 0.94 --context 150000 --concurrency 3 --batched-tokens 1024 --kv fp8 --state bf16 "
    "--mtp 4 --workspace 64 --vllm 0.27.2rc1.dev110"
)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fit", *arguments])


def parsed(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command(*arguments, "--json").stdout)
    return found


def test_a_table_that_says_what_and_why(root_27b: Path) -> None:
    result = command(str(root_27b), *LONG_CONTEXT.split(), "--mean-context", "24000", "--sources")
    assert result.exit_code == 0, result.output
    for words in (
        "on 2x RTX 5070 Ti (15.47 GiB by CUDA), vLLM 0.27.2rc1.dev110",
        "10.50 GB",
        "16,384 bytes a token a card in fp8",
        "blocks    of 848 tokens",
        "It comes out high",
        "fits, 0.",
        "runtime: What a worker holds",
    ):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines()[:20])) <= 120


def test_exit_1_and_a_way_out_when_it_does_not_fit(root_27b: Path) -> None:
    result = command(str(root_27b), "--gpus", "2x16GB", "--mtp", "4")
    assert result.exit_code == 1
    assert "does not fit. No memory is left for the cache" in result.stdout
    assert "together, this fits" in result.stdout
    assert f"python -m assemble serve {root_27b}" in result.stdout


def test_json_has_every_term_with_its_source(root_27b: Path) -> None:
    found = parsed(str(root_27b), *LONG_CONTEXT.split())
    assert found["fits"]
    inside = sum(term["nbytes"] for term in found["terms"] if term["inside_budget"])
    assert inside + found["pool_bytes"] == found["budget_bytes"]
    assert all(term["explanation"] and term["source"] for term in found["terms"])
    assert {term["name"] for term in found["terms"] if term["fitted"]} == {
        "activations", "CUDA graphs", "runtime", "communication", "CUDA context",
    }  # fmt: skip


def test_cost_of_a_million_tokens(root_27b: Path) -> None:
    """The field report: 647 tokens a second at $0.16 an hour, about 7 cents."""
    found = parsed(str(root_27b), *LONG_CONTEXT.split(), "--rate", "0.16", "--speed", "647")
    assert found["dollars_per_million_tokens"] == pytest.approx(0.0687, abs=0.0001)


def test_several_side_by_side(root_27b: Path, tiny: Path, tiny_moe: Path) -> None:
    arguments = (str(root_27b), "--compare", str(tiny), "--compare", str(tiny_moe), "--gpus", "48GB", "--concurrency", "4")
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    assert tiny.name in result.stdout
    assert "pool, tokens" in result.stdout
    assert [each["checkpoint"] for each in parsed(*arguments)["checkpoints"]] == [str(root_27b), str(tiny), str(tiny_moe)]


def test_known_cards_are_listed_without_a_checkpoint() -> None:
    result = command("--known-gpus")
    assert result.exit_code == 0
    assert "RTX 5070 Ti" in result.stdout
    assert "15,842" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--gpus 3x16GB", "cannot be split over 3 cards"),
        ("--gpus 2xfoo", "no card 'foo' is known"),
        ("--gpus 2x16GB --kv fp4", "--kv must be one of fp8, bf16, auto"),
        ("--gpus 2x16GB --state fp8", "--state must be one of fp32, bf16, auto"),
        ("--gpus 2x16GB --lora-rank 7", "vLLM takes 1, 8, 16"),
        ("--gpus 2x16GB --graphs SOME", "--graphs must be one of FULL_AND_PIECEWISE"),
        ("--gpus 2x16GB --context 0", "--context"),
        ("--gpus 2x16GB --mean-context 0", "--mean-context"),
        ("--gpus 2x16GB --mtp 33", "--mtp"),
        ("--gpus 2x16GB --rate 1", "--rate (dollars an hour) and --speed"),
    ],
)
def test_bad_input_is_said_in_one_line(root_27b: Path, arguments: str, words: str) -> None:
    result = command(str(root_27b), *arguments.split())
    assert result.exit_code == 2
    assert words in result.stderr


def test_no_such_checkpoint(tmp_path: Path) -> None:
    result = command(str(tmp_path / "none"), "--gpus", "16GB")
    assert result.exit_code == 2
    assert "none" in result.stderr


def test_a_hub_id_costs_its_headers(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loopback_hub() as hub:
        hub.connect(monkeypatch, tmp_path / "home")
        hub.add("org/tiny", tiny)
        found = parsed("org/tiny", "--gpus", "16GB", "--mtp", "2")
        sent = sum(r.sent for r in hub.requests if r.path.endswith(".safetensors"))
    assert found["checkpoint"] == "org/tiny"
    assert found["terms"] == parsed(str(tiny), "--gpus", "16GB", "--mtp", "2")["terms"]
    assert sent < sum(p.stat().st_size for p in tiny.glob("*.safetensors")) / 2


def test_a_revision_is_for_the_hub(tiny: Path) -> None:
    result = command(str(tiny), "--gpus", "16GB", "--revision", "main")
    assert result.exit_code == 2
    assert "--revision is for a Hub id" in result.stderr

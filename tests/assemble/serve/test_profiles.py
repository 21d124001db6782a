"""Profiles as data: the shipped ones are sound, say everything that the field reports' commands say, and explain it."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from pydantic import ValidationError

from recipes.serve_profile import Condition, ServeProfile, holds, in_range
from recipes.serve_profiles import SHIPPED, ProfileError, load_profile, shipped_profiles, version_facts

NAMES = ["2x16gb-long-context", "2x16gb-throughput", "32gb", "48gb-agents", "96gb"]

# The command blocks of the two field reports that the profiles come from; what names the machine is left out.
LONG_CONTEXT = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 "
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE=67108864 --tensor-parallel-size 2 --trust-remote-code --served-model-name qwen38 "
    "--language-model-only --kv-cache-dtype fp8 --attention-backend TRITON_ATTN --mamba-cache-dtype bfloat16 "
    "--mamba-ssm-cache-dtype bfloat16 --gpu-memory-utilization 0.94 --max-model-len 150000 --max-num-seqs 3 "
    "--max-num-batched-tokens 1024 --enable-chunked-prefill "
    """--speculative-config '{"method":"mtp","num_speculative_tokens":4}' """
    "--reasoning-parser qwen3 --tool-call-parser qwen3_xml --enable-auto-tool-choice NCCL_P2P_DISABLE=1"
)
THROUGHPUT = (
    "--tensor-parallel-size 2 --language-model-only --gpu-memory-utilization 0.95 --max-model-len 98304 --max-num-seqs 8 "
    """--speculative-config '{"method":"mtp","num_speculative_tokens":4}'"""
)
AGENTS = (
    "--max-model-len 65536 --gpu-memory-utilization 0.90 --kv-cache-dtype fp8 --max-num-batched-tokens 8192 "
    """--compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE"}' --enable-lora --max-lora-rank 64 """
    "--lora-modules ft=DIR --tool-call-parser qwen3_xml --reasoning-parser qwen3 --enable-auto-tool-choice "
    "--calculate-kv-scales"
)
SMALL = "--max-num-seqs 32 --max-cudagraph-capture-size 64"
BLOCKS = {"2x16gb-long-context": LONG_CONTEXT, "2x16gb-throughput": THROUGHPUT, "48gb-agents": AGENTS, "32gb": SMALL}


def words(block: str) -> list[tuple[str, str | None]]:
    """A command block as names and values."""
    found: list[tuple[str, str | None]] = []
    for word in shlex.split(block):
        if word.startswith("--"):
            found.append((word, None))
        elif word.split("=")[0].isupper() and "=" in word:
            name, _, value = word.partition("=")
            found.append((name, value))
        else:
            found[-1] = (found[-1][0], word)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_shipped(name: str) -> None:
    found, profile = load_profile(name)
    assert found == name
    assert name in shipped_profiles() == NAMES
    names = [flag.name for flag in profile.flags]
    assert {"--kv-cache-dtype", "--max-model-len", "--gpu-memory-utilization", "--max-num-batched-tokens"} <= set(names)
    assert len(set(names)) == len(names)
    assert in_range(profile.vllm.default, profile.vllm.range)
    assert profile.vllm.default in version_facts().read_in
    assert profile.vllm.seen_on
    for entry in (*profile.flags, *profile.environment, *profile.left_out):
        assert len(entry.reason) >= 20, entry.name
        assert not {entry.name} & {e.name for e in profile.left_out} or entry in profile.left_out, f"{entry.name} is left out"


@pytest.mark.parametrize("name", BLOCKS)
def test_every_word_of_the_field_reports_is_there_and_explained(name: str) -> None:
    profile = load_profile(name)[1]
    given: dict[str, Any] = {e.name: e.value for e in (*profile.flags, *profile.environment)}
    left_out = {e.name: e.value for e in profile.left_out}
    filled = {
        "{tensor_parallel}": profile.gpus.split("x")[0],
        "{context}": str(profile.context.tokens),
        "{name}": "qwen38",
        "{lora_rank}": str(profile.lora.max_rank if profile.lora else 0),
        "{lora_modules}": "ft=DIR",
        "{mtp}": f'{{"method":"mtp","num_speculative_tokens":{profile.mtp[0].num_speculative_tokens}}}',
    }
    for word, value in words(BLOCKS[name]):
        if word in left_out:
            assert left_out[word] in (None, value)
            continue
        assert word in given, f"{word} is neither given nor left out"
        mine = filled.get(str(given[word]), given[word])
        if isinstance(mine, dict):
            assert value == '{"cudagraph_mode":"FULL_AND_PIECEWISE"}'
        elif isinstance(mine, float):
            assert mine == float(value or "nan")
        else:
            assert mine is None or str(mine) == value, word


def test_drafting_is_for_latency() -> None:
    first = {name: load_profile(name)[1].mtp[0] for name in NAMES}
    assert {name: draft.num_speculative_tokens for name, draft in first.items()} == {
        "2x16gb-long-context": 4,
        "2x16gb-throughput": 4,
        "32gb": 4,
        "48gb-agents": 0,
        "96gb": 0,
    }
    dense = {"vllm": "0.27.1", "model": "dense", "mtp": None}
    assert all(holds(draft.when, dense) for draft in first.values())


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    text = (SHIPPED / "96gb.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(
        text
        + "left_out: []\n"
        + "environment:\n  - {name: OMP_NUM_THREADS, value: '8', reason: fewer threads for this machine}\n"
    )
    name, profile = load_profile(str(path))
    assert name == "mine"
    assert [v.name for v in profile.environment] == ["OMP_NUM_THREADS"]
    assert [f.name for f in profile.flags] == [f.name for f in load_profile("96gb")[1].flags]
    with pytest.raises(ValidationError):
        profile.title = "other"  # type: ignore[misc]


def test_what_a_profile_says_itself_takes_the_place_of_the_shared(tmp_path: Path) -> None:
    shared = load_profile("96gb")[1]
    own = SHIPPED / "96gb.yaml"
    text = own.read_text().replace(
        "flags:\n", "flags:\n  - name: --enable-prefix-caching\n    reason: in every case, I know better\n", 1
    )
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    flags = load_profile(str(path))[1].flags
    assert [f.name for f in flags if "prefix" in f.name] == ["--enable-prefix-caching"]
    assert [f.name for f in shared.flags if "prefix" in f.name] == ["--no-enable-prefix-caching", "--enable-prefix-caching"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus: 1x96GB", "gpus: big", "gpus"),
        ("title:", "titel:", "unknown key 'titel', did you mean 'title'"),
        ("value: 0.90", "value: 0.90\n    reasons: x", "unknown key 'flags.0.reasons', did you mean 'reason'"),
        ("value: 64", "value: '{context_length}'", "is no placeholder"),
        ("base: qwen3_5", "base: llama", "there is no base 'llama'"),
        ("least: 32768", "least: 999999", "more than context.tokens"),
        ('range: ">=0.23"', 'range: "new"', "version range"),
        ("  - num_speculative_tokens: 0", "  - num_speculative_tokens: 0\n    when: {model: moe}", "must have no condition"),
        ("--max-num-seqs", "--gpu-memory-utilization", "is given twice"),
        ("title:", "title: [", "is not valid YAML"),
    ],
)
def test_wrong_profiles(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = (SHIPPED / "96gb.yaml").read_text() + "base: qwen3_5\n"
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProfileError, match=message):
        load_profile(str(path))


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="did you mean 48gb-agents"):
        load_profile("48gb-agent")
    with pytest.raises(ProfileError, match="does not exist"):
        load_profile(str(tmp_path / "absent.yaml"))


def test_conditions() -> None:
    facts = {"vllm": "0.27.2rc1.dev110", "model": "moe", "mtp": True}
    assert holds(Condition(), facts)
    assert holds(Condition(vllm=">=0.27,<0.28", model="moe"), facts)
    assert not holds(Condition(vllm=">=0.28"), facts)
    assert not holds(Condition(model="dense"), facts)
    assert not holds(Condition(mtp=False), facts)
    assert not in_range("0.27.2rc1.dev110", ">=0.27.2"), "a pre-release comes before its release"


def test_what_differs_between_versions_is_about_flags_that_there_are() -> None:
    facts = version_facts()
    assert list(facts.read_in) == sorted(facts.read_in, key=Version)
    profiles = [load_profile(name)[1] for name in NAMES]
    known = {e.name for p in profiles for e in (*p.flags, *p.environment, *p.left_out)}
    assert {fact.concerns for fact in facts.facts} - {None} <= known
    assert [f.name for f in facts.facts if in_range("0.19.1", f.vllm)].count("CUDA graphs counted") == 0
    assert "CUDA graphs counted" in [f.name for f in facts.facts if in_range("0.27.1", f.vllm)]
    assert ServeProfile.model_config["frozen"]

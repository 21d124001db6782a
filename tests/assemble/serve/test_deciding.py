"""From profile and checkpoint to flags: conditions, sizes, versions, disagreements and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assemble.errors import InputError
from assemble.serve import commands_that_fit
from assemble.serve.deciding import RefusedError, Serving, Wish, decide
from assemble.serve.described import Described, describe
from assemble.serve.extra import Given, merged, split
from benchmarks.headers import source_config_of, write_headers
from recipes.serve_profiles import load_profile, shipped_profiles
from tests.assemble.checkpoints import Copy


def served(profile: str, checkpoint: Described, **wish: Any) -> Serving:
    return decide(*load_profile(profile), checkpoint, "model", Wish(**wish))


def flags(serving: Serving) -> dict[str, str | None]:
    return {flag.name: " ".join(flag.values) or None for flag in serving.flags}


def test_the_long_context_command_of_the_report(dense_27b: Described) -> None:
    serving = served("2x16gb-long-context", dense_27b)
    assert flags(serving) == {
        "--served-model-name": "model",
        "--tensor-parallel-size": "2",
        "--language-model-only": None,
        "--kv-cache-dtype": "fp8",
        "--max-model-len": "150000",
        "--speculative-config": '{"method":"mtp","num_speculative_tokens":4}',
        "--no-enable-prefix-caching": None,
        "--reasoning-parser": "qwen3",
        "--tool-call-parser": "qwen3_xml",
        "--enable-auto-tool-choice": None,
        "--gpu-memory-utilization": "0.94",
        "--max-num-seqs": "3",
        "--max-num-batched-tokens": "1024",
        "--enable-chunked-prefill": None,
        "--mamba-cache-dtype": "bfloat16",
        "--mamba-ssm-cache-dtype": "bfloat16",
    }
    assert [(v.name, v.value) for v in serving.environment] == [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "67108864"),
    ]
    assert serving.warnings == ()
    assert serving.vllm == "0.27.1"
    settings = serving.fit.settings
    assert (settings.max_model_len, settings.num_speculative_tokens, settings.flashinfer_workspace_bytes) == (150000, 4, 2**26)
    assert (settings.language_model_only, settings.enable_prefix_caching) == (True, False)
    assert (settings.mamba_ssm_cache_dtype, settings.vllm) == ("bfloat16", "0.27.1")


def test_agents_have_prefix_caching_lora_and_no_drafts(moe_35b: Described) -> None:
    serving = served("48gb-agents", moe_35b)
    given = flags(serving)
    assert given["--max-lora-rank"] == "64"
    assert given["--moe-backend"] == "marlin"
    assert {"--enable-lora", "--enable-prefix-caching"} <= set(given)
    assert not {"--lora-modules", "--speculative-config", "--no-enable-prefix-caching", "--tensor-parallel-size"} & set(given)
    assert given["--max-model-len"] == "65536"
    assert serving.fit.settings.max_lora_rank == 64
    assert any("--lora NAME=DIR adds one" in note for note in serving.notes)
    without = served("48gb-agents", moe_35b, lora=False)
    assert "--enable-lora" not in flags(without)
    assert without.fit.pool_tokens > serving.fit.pool_tokens


def test_a_mixture_of_experts_does_not_draft_on_32_gb(dense_27b: Described, moe_35b: Described) -> None:
    assert "--speculative-config" not in flags(served("32gb", moe_35b))
    assert json.loads(flags(served("32gb", dense_27b))["--speculative-config"] or "")["num_speculative_tokens"] == 4
    asked = served("32gb", moe_35b, mtp=2)
    assert flags(asked)["--speculative-config"] == '{"method":"mtp","num_speculative_tokens":2}'
    assert "--no-enable-prefix-caching" in flags(asked)
    assert "MTP drafts 2 tokens a step, as asked" in asked.notes
    assert "--enable-prefix-caching" in flags(served("2x16gb-long-context", dense_27b, mtp=0))


def test_the_context_follows_the_memory(dense_27b: Described, moe_35b: Described) -> None:
    raised = served("32gb", moe_35b)
    assert raised.context == 262144
    assert flags(raised)["--max-model-len"] == "262144"
    assert any("raised from the profile's 65,536" in note for note in raised.notes)
    kept = served("48gb-agents", moe_35b)
    assert kept.fit.pool_tokens > 3 * kept.context == 3 * 65536
    lowered = served("2x16gb-long-context", dense_27b, gpus="1x32GB", extra=("--gpu-memory-utilization", "0.75"))
    assert "--tensor-parallel-size" not in flags(lowered)
    assert lowered.context % 256 == 0
    assert 16384 <= lowered.context < 150000
    assert any("lowered from the profile's 150,000" in note for note in lowered.notes)
    assert lowered.fit.max_context >= lowered.context


def test_a_context_near_the_end_of_the_pool_is_said_to_be(dense_27b: Described) -> None:
    serving = served("2x16gb-long-context", dense_27b)
    assert 150000 <= serving.fit.pool_tokens < 165000
    assert any("should vLLM refuse to start, give --context " in note for note in serving.notes)


def test_an_asked_context_is_kept_or_refused(dense_27b: Described) -> None:
    assert served("2x16gb-long-context", dense_27b, context=100000).context == 100000
    with pytest.raises(RefusedError, match=r"A request of 200,000 tokens needs.*What would help:\n  --max-model-len 1"):
        served("2x16gb-long-context", dense_27b, context=200000)
    with pytest.raises(RefusedError, match="300,000 tokens of context are more than the 262,144"):
        served("96gb", dense_27b, context=300000)
    assert served("96gb", dense_27b, extra=("--max-model-len", "5000")).context == 5000


def test_what_does_not_fit_is_refused(headers: Callable[..., Path]) -> None:
    big = describe(headers("27B", quantized=False))
    with pytest.raises(RefusedError, match=r"it does not fit 32gb: No memory is left.*\n  python -m quantize run MODEL OUT"):
        served("32gb", big)
    fits = served("96gb", big)
    assert any("is not quantized" in warning for warning in fits.warnings)
    assert any("declares no FP8 KV cache" in warning for warning in fits.warnings)


def test_a_lost_head_turns_drafting_off(headers: Callable[..., Path], dense: Copy) -> None:
    dense.drop(*dense.names("mtp."))
    dense.save()
    serving = served("2x16gb-long-context", describe(dense.root))
    assert "--speculative-config" not in flags(serving)
    assert "--enable-prefix-caching" in flags(serving)
    (warning,) = serving.warnings
    assert warning.startswith("the profile drafts with the MTP head, and the checkpoint has no MTP head: served without drafts")
    assert f"python -m assemble splice --head-from BF16_MODEL {dense.root}" in warning
    assert served("96gb", describe(dense.root)).warnings == ()


def test_a_quantized_head_turns_drafting_off(dense: Copy) -> None:
    rows, columns = dense.get("mtp.fc.weight")[1]
    dense.put("mtp.fc.weight", "F8_E4M3", (rows, columns), bytes(rows * columns))
    dense.save()
    serving = served("2x16gb-throughput", describe(dense.root))
    assert "--speculative-config" not in flags(serving)
    assert "a quantized MTP head, which vLLM does not load" in serving.warnings[0]


def test_text_only_checkpoints(tmp_path: Path) -> None:
    config = source_config_of("27B")
    text = config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
    checkpoint = describe(
        write_headers(tmp_path / "text", text | {"tie_word_embeddings": False, "num_hidden_layers": 4, "layer_types": None})
    )
    serving = served("96gb", checkpoint)
    assert "--language-model-only" not in flags(serving)
    assert any("--language-model-only is not needed" in warning for warning in serving.warnings)
    assert serving.vllm == "0.27.1"
    drafting = served("96gb", checkpoint, mtp=2)
    assert drafting.vllm == "0.28.0"
    assert any(
        "in place of the profile's 0.27.1, which is too old for the MTP head of a text-only class" in n for n in drafting.notes
    )
    with pytest.raises(RefusedError, match=r"vLLM 0.27.1 does not serve this checkpoint: the MTP head.*needs 0.28"):
        served("96gb", checkpoint, mtp=2, vllm="0.27.1")


def test_versions(dense_27b: Described) -> None:
    assert served("96gb", dense_27b, vllm="v0.33.0").vllm == "0.33.0"
    with pytest.raises(RefusedError, match=r"quantized lm_head needs 0\.23"):
        served("96gb", dense_27b, vllm="0.22.1")
    with pytest.raises(InputError, match="is not a version"):
        served("96gb", dense_27b, vllm="nightly")
    assert any("not looked up in vLLM 0.30.0" in warning for warning in served("96gb", dense_27b, vllm="0.30.0").warnings)


def test_what_the_user_gives_wins(dense_27b: Described) -> None:
    extra = ("--max-num-seqs=1", "--no-language-model-only", "--api-key", "secret word", "-tp", "2", "--enable-prefix-caching")
    serving = served("2x16gb-long-context", dense_27b, extra=extra)
    given = flags(serving)
    assert given["--max-num-seqs"] == "1"
    assert given["--api-key"] == "secret word"
    assert "--language-model-only" not in given
    assert "--no-language-model-only" in given
    assert "--tensor-parallel-size" not in given
    assert given["-tp"] == "2"
    assert serving.fit.settings.max_num_seqs == 1
    assert not serving.fit.settings.language_model_only
    assert any("MTP and prefix caching together corrupt" in warning for warning in serving.warnings)
    with pytest.raises(InputError, match="--max-num-seqs must be a number, found 'many'"):
        served("96gb", dense_27b, extra=("--max-num-seqs", "many"))
    with pytest.raises(InputError, match="must be given a JSON object"):
        served("96gb", dense_27b, extra=("--compilation-config", "3"))


def test_merging_arguments() -> None:
    own = split(["--a=1", "--b", "x", "y", "--c", "--d", "-1"])
    assert [flag.argv for flag in own] == [("--a", "1"), ("--b", "x", "y"), ("--c",), ("--d", "-1")]
    given = [Given("--b", ("z",), "why"), Given("--enable-c", (), "why"), Given("--e", (), "why")]
    found = merged(given, ["--no-enable-c", "--b=1", "--f"])
    assert [flag.argv for flag in found] == [("--b", "1"), ("--no-enable-c",), ("--e",), ("--f",)]


def test_commands_that_fit(headers: Callable[..., Path]) -> None:
    found = commands_that_fit(headers("27B"), model="org/Qwen-27B-NVFP4")
    assert [f.profile for f in found] == shipped_profiles()
    first = found[0]
    assert first.command.splitlines()[2] == "  vllm serve org/Qwen-27B-NVFP4 \\"
    assert "  --served-model-name Qwen-27B-NVFP4 \\" in first.command.splitlines()
    assert f"--max-model-len {first.max_context}" in first.command
    assert first.concurrency == pytest.approx(first.pool_tokens / first.max_context, rel=0.05)
    assert [f.profile for f in commands_that_fit(headers("27B", quantized=False))] == ["96gb"]

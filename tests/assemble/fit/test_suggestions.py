"""What to change, and whether it helps."""

import dataclasses

import pytest

from assemble.fit import Model, ServeSettings, fit, parse_cards
from assemble.fit.report import changed_flags

TWO_16GB = parse_cards("2xRTX5070Ti")
ASKED = ServeSettings(max_model_len=150_000, num_speculative_tokens=4, language_model_only=True)


def test_the_remedy_is_the_field_reports_own_set_of_flags(model_27b: Model) -> None:
    found = fit(model_27b, TWO_16GB, ASKED)
    assert not found.fits
    assert found.remedy is not None
    assert set(changed_flags(found.settings, found.remedy.settings)) == {
        "--gpu-memory-utilization 0.94",
        "--max-num-seqs 3",
        "--max-num-batched-tokens 1024",
        "--mamba-cache-dtype bfloat16",
        "--mamba-ssm-cache-dtype bfloat16",
        "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE=67108864",
    }


def test_every_suggestion_frees_what_it_says(model_27b: Model) -> None:
    found = fit(model_27b, TWO_16GB, dataclasses.replace(ASKED, kv_cache_dtype="bfloat16", language_model_only=False))
    assert [s.flag for s in found.suggestions][:3] == [
        "--language-model-only",
        "--kv-cache-dtype fp8",
        "--mamba-cache-dtype bfloat16 --mamba-ssm-cache-dtype bfloat16",
    ]
    for suggestion in found.suggestions:
        after = fit(model_27b, TWO_16GB, suggestion.settings)
        assert after.slack_bytes - found.slack_bytes == suggestion.frees_bytes > 0, suggestion.flag


def test_no_single_change_of_a_remedy_can_be_left_out(model_27b: Model) -> None:
    found = fit(model_27b, TWO_16GB, ASKED)
    assert found.remedy is not None
    before, after = dataclasses.asdict(found.settings), dataclasses.asdict(found.remedy.settings)
    pair = {"mamba_cache_dtype", "mamba_ssm_cache_dtype"}  # one suggestion
    for name in (n for n in after if after[n] != before[n] and n not in pair | {"max_cudagraph_capture_size"}):
        without = dataclasses.replace(found.remedy.settings, **{name: before[name]})
        assert not fit(model_27b, TWO_16GB, without).fits, name


@pytest.mark.parametrize("given", [{"max_num_seqs": 64}, {"gpu_memory_utilization": 0.9}, {"max_lora_rank": 64}])
def test_a_remedy_leaves_alone_what_was_asked_for(model_27b: Model, given: dict[str, int]) -> None:
    found = fit(model_27b, TWO_16GB, dataclasses.replace(ASKED, max_model_len=None, **given))  # type: ignore[arg-type]
    assert not found.fits
    for name, value in given.items():
        assert found.remedy is None or getattr(found.remedy.settings, name) == value


def test_a_context_that_was_not_asked_for_is_shortened(model_27b: Model) -> None:
    found = fit(model_27b, TWO_16GB, dataclasses.replace(ASKED, max_model_len=None))
    assert found.remedy is not None
    assert 100_000 < found.remedy.max_model_len < 262_144
    assert found.remedy.settings.enable_prefix_caching


def test_nothing_helps_a_model_that_is_too_large(model_35b: Model) -> None:
    found = fit(model_35b, parse_cards("1x16GB"))
    assert found.remedy is None
    assert "more than the budget has" in found.reason


def test_more_requests_than_blocks_are_refused_as_vllm_does(model_27b: Model) -> None:
    """ "max_num_seqs (1024) exceeds available Mamba cache blocks": seen on a 96 GB card."""
    settings = ServeSettings(max_num_seqs=512, max_model_len=4096, gpu_memory_utilization=0.5, language_model_only=True)
    found = fit(model_27b, parse_cards("96GB"), settings)
    assert 0 < found.num_blocks < 512
    assert "--max-num-seqs 512 is more than" in found.reason
    assert fit(model_27b, parse_cards("96GB"), dataclasses.replace(settings, cudagraph_mode="PIECEWISE")).fits


def test_the_reason_says_what_is_short(model_27b: Model) -> None:
    small = dataclasses.replace(ASKED, max_num_seqs=3, max_num_batched_tokens=1024)
    found = fit(model_27b, TWO_16GB, small)
    assert "A request of 150,000 tokens needs" in found.reason
    assert f"{found.max_context:,} tokens fit" in found.reason
    assert fit(model_27b, TWO_16GB, dataclasses.replace(small, max_model_len=found.max_context)).reason == ""

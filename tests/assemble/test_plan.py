"""A plan is a partition: every tensor has one source and one shard, whatever the limits."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assemble.architecture import read_architecture
from assemble.checkpoint import Checkpoint
from assemble.formats import FP8, W4A16_NVFP4, quantized_tensors
from assemble.plan import AssemblyPlan, PlanError, natural, plan_assembly
from assemble.splice import HeadError


def planned(root: Path, schemes: dict[str, str], limit: int = 5_000_000_000) -> AssemblyPlan:
    source = Checkpoint.open(root)
    return plan_assembly(source, source, read_architecture(source.config, source), schemes, limit)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), limit=st.integers(1, 2_000_000))
def test_a_plan_is_a_partition(data: st.DataObject, limit: int, tiny: Path) -> None:
    source = Checkpoint.open(tiny)
    modules = sorted(read_architecture(source.config, source).linear_modules)
    chosen = data.draw(st.dictionaries(st.sampled_from(modules), st.sampled_from([FP8, W4A16_NVFP4])))
    plan = planned(tiny, chosen, limit)
    placed = [t for shard in plan.shards for t in shard.tensors]
    names = [t.name for t in placed]
    assert len(names) == len(set(names))
    made = {t.name for m, s in chosen.items() for t in quantized_tensors(m, s, source[f"{m}.weight"].shape)}
    assert set(names) == made | set(plan.copies)
    assert not made & set(plan.copies)
    assert set(plan.copies) == set(source) - {f"{m}.weight" for m in chosen}
    assert plan.weight_map.keys() == set(names)
    assert plan.nbytes == sum(t.nbytes for t in placed)
    for name, origin in plan.copies.items():
        assert origin == source[name]
    for number, shard in enumerate(plan.shards, 1):
        assert shard.name == f"model-{number:05d}-of-{len(plan.shards):05d}.safetensors"
        assert shard.tensors
        assert {t.name in made for t in shard.tensors} == {shard.quantized}
        modules_here = {t.name.rpartition(".")[0] for t in shard.tensors}
        assert shard.nbytes <= limit or len(modules_here) == 1
    assert plan == planned(tiny, dict(reversed(chosen.items())), limit)


def test_sources_that_cannot_be_planned(make_variant: Callable[..., Path], quantized, tiny: Path) -> None:
    with pytest.raises(PlanError, match="already quantized"):
        planned(quantized.out, {})
    with pytest.raises(HeadError, match="no MTP head"):
        planned(make_variant(head="none"), {})
    with pytest.raises(PlanError, match="only a BF16 checkpoint"):
        planned(make_variant(float32=True), {"model.language_model.norm": FP8})


def test_natural_order() -> None:
    assert sorted(["a.10", "a.9", "a.1b", "a"], key=natural) == ["a", "a.1b", "a.9", "a.10"]

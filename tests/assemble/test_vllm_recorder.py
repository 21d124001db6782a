"""The recorder of writes, which runs inside vLLM's process, on a model of our own."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from assemble.vllm_load.client import RUNNER


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    """`runner/recorder.py`, which is no part of the package: it imports torch."""
    spec = importlib.util.spec_from_file_location("recorder", RUNNER / "recorder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recorder"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    del sys.modules["recorder"]
    return module


class Fused(torch.nn.Module):
    """A fused parameter [6, 4] of three parts, and a scale, without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(6, 4, dtype=torch.bfloat16, device="meta"))
        self.scale = torch.nn.Parameter(torch.empty(3, device="meta"))


def part(dtype: torch.dtype = torch.bfloat16, rows: int = 2) -> torch.Tensor:
    return torch.empty(rows, 4, dtype=dtype, device="meta")


def test_written_whole(recorder: ModuleType) -> None:
    model = Fused()
    with recorder.Recorder(model) as seen:
        for i in range(3):
            model.weight.data[2 * i : 2 * i + 2].copy_(part())
            model.scale.data[i] = 1.0
    assert seen.written["weight"].coverage(24) == recorder.Coverage(24, 0, None)
    assert seen.written["scale"].coverage(3) == recorder.Coverage(3, 0, None)
    assert not seen.written["weight"].casts


def test_one_part_twice_does_not_hide_that_another_is_missing(recorder: ModuleType) -> None:
    model = Fused()
    with recorder.Recorder(model) as seen:
        for rows in (slice(0, 2), slice(4, 6), slice(0, 2)):
            model.weight.data[rows].copy_(part())
    assert seen.written["weight"].coverage(24) == recorder.Coverage(once=16, again=8, gap=8)
    assert seen.written["scale"].coverage(3) == recorder.Coverage(0, 0, 0)


def test_columns_are_scattered(recorder: ModuleType) -> None:
    model = Fused()
    with recorder.Recorder(model) as seen:
        for columns in (slice(0, 2), slice(2, 4), slice(0, 2)):
            model.weight.data[:, columns].copy_(part(rows=6)[:, columns])
    assert seen.written["weight"].coverage(24) == recorder.Coverage(24, 12, None)


def test_where_it_came_from_and_what_it_was(recorder: ModuleType) -> None:
    model, wide = Fused(), part(rows=8)
    packed = part(torch.uint8)
    with recorder.Recorder(model) as seen:
        seen.handed_out("wide", wide)
        model.weight.data[0:4].copy_(wide.narrow(0, 0, 4))
        seen.handed_out("packed", packed)
        model.weight.data[4:6].copy_(packed)
        seen.handed_out("ignored", part())
        torch.empty(6, 4).copy_(part(rows=6))  # not a parameter, and on the CPU: there are no bytes to copy
    assert dict(seen.used) == {"wide": 16, "packed": 8}
    assert [name for name, _ in seen.tensors] == ["wide", "packed", "ignored"]
    assert seen.reading == "ignored"
    assert seen.written["weight"].casts == {"packed is uint8, the parameter is bfloat16"}

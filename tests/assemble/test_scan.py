"""What the values of a checkpoint say does not depend on the pieces they are read in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from assemble.checkpoint import Checkpoint
from assemble.rules import scan
from assemble.rules.scan import Facts


def made(path: Path) -> Checkpoint:
    """Tensors of several pieces whose remarkable elements lie in the last ones; scales have some in the first, too."""
    path.mkdir()
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn((40, 100), generator=generator).bfloat16()
    late_nan, late_number, scales = plain.clone(), torch.zeros_like(plain), torch.ones((70, 100), dtype=torch.uint8)
    late_nan[39, 99], late_number[39, 98] = torch.nan, 1
    scales[69, 90:] = scales[0, 1] = 0
    scales[68:, 0] = scales[0, 0] = 0x80
    save_file(
        {
            "plain": plain,
            "late_nan": late_nan,
            "late_number": late_number,
            "zero": torch.zeros_like(plain),
            "m.weight_scale": scales.view(torch.float8_e4m3fn),
            "m.weight_scale_2": torch.tensor(0.25),
            "empty": torch.zeros((0, 4), dtype=torch.bfloat16),
        },
        path / "model.safetensors",
    )
    (path / "config.json").write_text("{}")
    return Checkpoint.open(path)


def seen(facts: Facts) -> tuple[object, ...]:
    return facts.zero, facts.special, facts.zero_codes, facts.high_codes, facts.value, facts.differs_at


@pytest.mark.parametrize("piece", [512, 1024, 4096, scan.PIECE])
def test_pieces_are_put_together(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = made(tmp_path / "mine"), made(tmp_path / "theirs")
    path = theirs.path_of(theirs["plain"])
    data = np.fromfile(path, np.uint8)
    for place in (5001, 7999):
        data[theirs["plain"].start + place] ^= 1
    data.tofile(path)
    monkeypatch.setattr(scan, "PIECE", piece)
    progressed: list[int] = []
    origins = {"plain": (theirs.root, theirs["plain"])}
    facts = scan.scan(mine.root, list(mine.values()), origins, progressed.append)
    assert {name: seen(fact) for name, fact in facts.items()} == {
        "plain": (False, False, 0, 0, None, 5001),
        "late_nan": (False, True, 0, 0, None, None),
        "late_number": (False, False, 0, 0, None, None),
        "zero": (True, False, 0, 0, None, None),
        "m.weight_scale": (False, False, 11, 3, None, None),
        "m.weight_scale_2": (False, False, 0, 0, 0.25, None),
        "empty": (True, False, 0, 0, None, None),
    }
    assert sum(progressed) == sum(t.nbytes for t in mine.values())


@pytest.mark.parametrize(
    ("name", "bits", "dtype"),
    [
        ("BF16", np.arange(1 << 16, dtype=np.uint16), torch.bfloat16),
        ("F16", np.arange(1 << 16, dtype=np.uint16), torch.float16),
        ("F8_E4M3", np.arange(1 << 8, dtype=np.uint8), torch.float8_e4m3fn),
        ("F32", (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | np.array([0, 1, 0xFFFF], np.uint32), torch.float32),
    ],
)
def test_every_special_number_is_seen(name: str, bits: np.ndarray, dtype: torch.dtype) -> None:
    finite = torch.from_numpy(bits.reshape(-1).copy()).view(dtype).float().isfinite()
    found = [scan.holds_special(number.tobytes(), name) for number in bits.reshape(-1)]
    assert found == (~finite).tolist()
    assert not scan.holds_special(bits.reshape(-1)[finite.numpy()].tobytes(), name)
    assert scan.holds_special(bits.tobytes(), name)


def test_equal_tensors_have_equal_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PIECE", 1024)
    monkeypatch.setattr(scan, "LARGE", 1)
    source = made(tmp_path / "mine")
    facts = scan.scan(source.root, list(source.values()), {})
    samples = {name: facts[name].sample.digest() for name in ("plain", "late_nan", "late_number", "zero")}
    again = scan.scan(source.root, list(source.values()), {})["plain"].sample.digest()
    assert again == samples["plain"]
    assert len({samples["plain"], samples["late_number"]}) == 2


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    source = made(tmp_path / "mine")
    path = source.root / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OSError, match="ends too early"):
        scan.scan(source.root, list(source.values()), {})


@pytest.mark.parametrize("near", [0, 2**20])
@pytest.mark.parametrize(("shape", "rows"), [((50, 8), [0, 7, 49]), ((5, 10, 8), [3, 12, 49]), ((0, 8), []), ((3, 0), [0, 2])])
def test_rows(shape: tuple[int, ...], rows: list[int], near: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "NEAR", near)
    values = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    save_file({"before": torch.ones(3), "m": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    with scan.Files() as files:
        found = files.rows(checkpoint.root, checkpoint["m"], rows)
    expected = values.reshape(int(np.prod(shape[:-1])), shape[-1]).numpy()[rows]
    assert len(found) == len(rows)
    assert found.tobytes() == expected.tobytes()


def test_rows_of_a_file_that_ends_too_early(tmp_path: Path) -> None:
    save_file({"m": torch.zeros((4096, 64))}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with scan.Files() as files, pytest.raises(OSError, match="ends too early"):
        files.rows(tmp_path, checkpoint["m"], [0, 4095])

"""The main job on a GPU: `pytest -m gpu`."""

from pathlib import Path

import pytest

from quantize.console import Reporter
from quantize.runner import run
from quantize.stage import Request
from recipes import loader
from recipes.loader import LoadedRecipe
from tests.quantize.oracle import compare_with_oracle

pytestmark = pytest.mark.gpu
SHIPPED = ("w4a16_nvfp4-fp8_attn-kv_fp8_cast", "w4a16_nvfp4_mse-fp8_attn-kv_fp8_cast")


@pytest.mark.parametrize("model", ["tiny", "tiny_moe"])
@pytest.mark.parametrize("name", SHIPPED)
def test_equals_modelopt_and_source(
    name: str, model: str, tiny: Path, tiny_moe: Path, calibration: Path, tmp_path: Path
) -> None:
    recipe = loader.load(name)
    small = recipe.recipe.model_copy(update={"calibration": loader.load("demo").recipe.calibration})
    request = Request(
        str({"tiny": tiny, "tiny_moe": tiny_moe}[model]),
        tmp_path / "out",
        LoadedRecipe(name, recipe.text, small),
        calibration=calibration,
        device="cuda",
    )
    outcome = run(request, Reporter())
    assert outcome.records["quantize"].facts["gpu_peak_memory_bytes"] > 0
    compare_with_oracle(request, outcome, tmp_path / "oracle")

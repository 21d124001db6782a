"""What the tests of the MTP head share: held-out prompts, and bodies."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from assemble.checkpoint import Checkpoint
from quantize.evaluate import mtp
from quantize.evaluate.mtp_body import LayerwiseBody
from quantize.evaluate.weights import Weights
from tests.conftest import SHARED

CODE = Path(json.__file__).parent  # text of the kind that the tiny models learnt


@pytest.fixture(scope="session")
def trained() -> Path:
    """The trained tiny model that vLLM was measured on; it is not ours to ship."""
    path = SHARED / "models" / "tiny-qwen3_5-mtp"
    if not path.is_dir():
        pytest.skip("the measured tiny model is not here")
    return path


@pytest.fixture(scope="session")
def code_rows(tiny: Path) -> list[list[int]]:
    """Rows of Python source as token ids, of different lengths."""
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    return [tokenizer.encode(path.read_text()).ids[:200] for path in sorted(CODE.glob("*.py"))]


@pytest.fixture(scope="session")
def few() -> mtp.Settings:
    """A measurement of a second."""
    return mtp.Settings(num_prompts=3, prompt_tokens=40, new_tokens=12, max_drafts=4)


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Path], Weights]:
    return lambda root: Weights(Checkpoint.open(root))


@pytest.fixture(scope="session")
def body(tiny: Path) -> LayerwiseBody:
    """The tiny model's body."""
    return mtp.open_body(Weights(Checkpoint.open(tiny)), "cpu")


@pytest.fixture(autouse=True)
def _no_grad() -> None:
    torch.set_grad_enabled(mode=False)

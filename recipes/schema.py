"""The schema of a recipe: everything that decides the bytes of a checkpoint, and nothing that does not.

A recipe does not say how a tensor is quantized. It names a ModelOpt recipe for each model type, and ModelOpt's own
table (which module gets which format) stays where it is. What a recipe adds is what ModelOpt's leaves to a command
line: the calibration data, the MTP head, the size of a shard.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A frozen model that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Calibration(Strict):
    """The text that the FP8 input scales are measured on.

    Documents are tokenized, joined, and cut into blocks, so every row is full and no padding token reaches the model.

    Attributes:
        dataset: Hub id of a dataset.
        config: The dataset's configuration, or None where it has one only.
        split: The split to read.
        column: The column that holds the text. `messages` is rendered through the model's chat template.
        num_samples: Rows of tokens.
        sequence_length: Tokens a row.
        batch_size: Rows a forward pass. Here and not on the command line, because BF16 matrix products round
            differently for other batch shapes, and with them the measured scales.
        seed: Seed of the documents' order.
    """

    dataset: str = Field(min_length=1)
    config: str | None = None
    split: str = "train"
    column: str = "text"
    num_samples: int = Field(gt=0)
    sequence_length: int = Field(gt=1)
    batch_size: int = Field(default=16, gt=0)
    seed: int = Field(default=0, ge=0)


class MTP(Strict):
    """What becomes of the multi-token-prediction head.

    Attributes:
        precision: `bf16`: byte for byte from the source. Nothing else is offered: vLLM builds the head unquantized.
        required: True: a source without a head is an error.
    """

    precision: Literal["bf16"] = "bf16"
    required: bool = True


class Recipe(Strict):
    """One way to turn a BF16 checkpoint into an NVFP4 one.

    Attributes:
        description: One line for people.
        modelopt: ModelOpt's recipe for each `model_type` of config.json, as `modelopt.recipe.load_recipe` takes it.
        calibration: The calibration data.
        mtp: The MTP head's treatment.
        max_shard_bytes: Tensor bytes a shard holds at most (a single larger tensor gets a shard of its own).
    """

    description: str = ""
    modelopt: dict[Literal["qwen3_5", "qwen3_5_moe"], str] = Field(min_length=1)
    calibration: Calibration
    mtp: MTP = MTP()
    max_shard_bytes: int = Field(default=5_000_000_000, gt=0)

"""The schema of a recipe: everything that decides the bytes of a checkpoint, and nothing that does not.

A recipe does not say how a tensor is quantized. It names a ModelOpt recipe for each model type, and ModelOpt's own
table (which module gets which format) stays where it is. What a recipe adds is what ModelOpt's leaves to a command
line: the calibration data, the MTP head, the size of a shard.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A frozen model that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


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


class Evaluation(Strict):
    """The held-out text that a finished checkpoint is compared with its BF16 source on, and what it must reach.

    What is left open about the data is as in `calibration`. The text is never what was calibrated on: rows that were are left
    out. A gate that is None does not judge.

    Attributes:
        dataset: Hub id of a dataset.
        config: The dataset's configuration.
        split: The split to read.
        column: The column that holds the text.
        rows: Documents, in the order of the data.
        tokens: Tokens of each document, from its beginning, at most.
        num_speculative_tokens: Drafts a step that `min_tokens_per_step` is about.
        max_kl: Largest mean KL(BF16 || quantized), nats a token.
        max_kl_p99: Largest 99th percentile of the same.
        max_nll_increase: How much larger the negative log-likelihood may be, nats a token.
        min_agreement: Share of tokens, 0 to 1, whose first choice has to be the BF16 model's.
        min_tokens_per_step: Tokens a step of the quantized model with its MTP head.
        max_outliers: Modules or tensors that stand out, at most.
    """

    dataset: str | None = None
    config: str | None = None
    split: str | None = "test"
    column: str | None = None
    rows: int = Field(default=64, gt=0)
    tokens: int = Field(default=512, gt=15)
    num_speculative_tokens: int = Field(default=2, gt=0, le=6)
    max_kl: float | None = Field(default=None, gt=0)
    max_kl_p99: float | None = Field(default=None, gt=0)
    max_nll_increase: float | None = None
    min_agreement: float | None = Field(default=None, gt=0, le=1)
    min_tokens_per_step: float | None = Field(default=None, gt=0)
    max_outliers: int | None = Field(default=None, ge=0)


class Smoke(Strict):
    """What a vLLM that serves the checkpoint must show. Whole numbers only: they enter a fingerprint.

    Attributes:
        num_speculative_tokens: Tokens that the MTP head drafts a step.
        max_new_tokens: Tokens generated a prompt.
        min_acceptance_percent: Of the first token drafted in each step, how many must be accepted where no prediction is
            known. The first alone, since the share of all falls with the number of drafts: 2.5 tokens a step are 75 % of
            K=2 and 38 % of K=4. Seen: 88 % (the tiny model on an H200; vLLM issue 43455 says 80 % of a working head);
            0 to 1 % of a dead one, 59 % where the body is broken. 40 is half of a working head's.
        min_of_predicted_percent: Of the accepted tokens a step that `evaluate` predicts, how many must be seen. Seen on an
            H200: 96 to 103 % for working heads, 60 % for a broken body; 51 % in the field for a head that was quantized.
        max_margin_millinats: Where the text with the head first leaves the text without it: how far the two runs' log
            probabilities may disagree on the two candidates, in thousandths of a nat. More is no near-tie. Seen on an
            H200: of 138 first differences between runs of one body half lie below 0.07, 95 % below 0.32, the largest is
            0.44 nats; between two bodies, one broken, half lie above 6 and none of 192 below 1. Log probabilities come
            from BF16 logits, whose step doubles from 16 on: a larger model's near-ties can lie twice as far apart.
        max_nll_increase_millinats: How far the prompts' likelihood may lie above what `evaluate` predicts, a token. Seen on
            an H200: 0.0009 nats; quantization itself costs that model 0.027, and a broken body 1.65. 20 is less than
            quantization costs, and far above what the rounding of kernels makes.
    """

    num_speculative_tokens: int = Field(default=2, ge=1, le=16)
    max_new_tokens: int = Field(default=128, ge=16, le=1024)
    min_acceptance_percent: int = Field(default=40, ge=0, le=100)
    min_of_predicted_percent: int = Field(default=85, ge=0, le=100)
    max_margin_millinats: int = Field(default=1000, ge=0)
    max_nll_increase_millinats: int = Field(default=20, ge=0)


class Recipe(Strict):
    """One way to turn a BF16 checkpoint into an NVFP4 one.

    Attributes:
        description: One line for people.
        modelopt: ModelOpt's recipe for each `model_type` of config.json, as `modelopt.recipe.load_recipe` takes it.
        calibration: The calibration data.
        mtp: The MTP head's treatment.
        evaluation: The held-out text, and the gates.
        smoke: What a vLLM that serves the checkpoint must show.
        max_shard_bytes: Tensor bytes a shard holds at most (a single larger tensor gets a shard of its own).
    """

    description: str = ""
    modelopt: dict[Literal["qwen3_5", "qwen3_5_moe"], str] = Field(min_length=1)
    calibration: Calibration
    mtp: MTP = MTP()
    evaluation: Evaluation = Evaluation()
    smoke: Smoke = Smoke()
    max_shard_bytes: int = Field(default=5_000_000_000, gt=0)

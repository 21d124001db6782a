"""The schema of a serve profile: how a checkpoint is served on one class of cards, and why each flag is there.

A profile is data: flags and environment variables of `vllm serve`, each with its reason and the condition under which it
is given, the context that is wanted, and what is known of it. It knows no checkpoint and no path: what depends on those is
written as a placeholder, and `python -m assemble serve` fills it in.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, Field, model_validator

from recipes.schema import Strict

# What a flag's value may hold in place of a literal; `assemble.serve.deciding` fills them in.
PLACEHOLDERS = ("{name}", "{tensor_parallel}", "{context}", "{mtp}", "{lora_rank}", "{lora_modules}")


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError("must be a version range such as '>=0.21,<0.28'") from error
    return text


VersionRange = Annotated[str, AfterValidator(_specifier)]
Name = Annotated[str, Field(pattern=r"^(--[a-z][a-z0-9-]*|[A-Z][A-Z0-9_]*)$")]
Reason = Annotated[str, Field(min_length=20)]


class Condition(Strict):
    """When a flag is given: all that is stated must hold; what is None does not matter.

    Attributes:
        vllm: vLLM's version lies in this range (PEP 440).
        model: A dense model, or a mixture of experts.
        vision: Whether the checkpoint's class has a vision tower.
        experts: The format of the routed experts.
        mtp: Whether the checkpoint drafts for itself.
        lora: Whether LoRA adapters are served.
        lora_experts: How the adapters name routed experts: `split` one by one, `fused` in two tensors a layer.
        tensor_parallel: Whether it is split over several cards.
    """

    vllm: VersionRange | None = None
    model: Literal["dense", "moe"] | None = None
    vision: bool | None = None
    experts: Literal["W4A16_NVFP4", "NVFP4", "FP8", "BF16"] | None = None
    mtp: bool | None = None
    lora: bool | None = None
    lora_experts: Literal["split", "fused"] | None = None
    tensor_parallel: bool | None = None


class Flag(Strict):
    """One flag of `vllm serve`.

    Attributes:
        name: Its long name, `--kv-cache-dtype`.
        value: What follows it: a literal, one of `PLACEHOLDERS`, a mapping (given as JSON), or None for a switch.
        reason: Why it is there.
        when: Under which condition.
    """

    name: Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*$")]
    value: str | int | float | dict[str, Any] | None = None
    reason: Reason
    when: Condition = Condition()

    @model_validator(mode="after")
    def _placeholder_is_known(self) -> "Flag":
        if isinstance(self.value, str) and self.value.startswith("{") and self.value not in PLACEHOLDERS:
            raise ValueError(f"{self.name}: {self.value} is no placeholder; there are {', '.join(PLACEHOLDERS)}")
        return self


class Variable(Strict):
    """One environment variable of the server: name, value, reason and condition, as for a flag."""

    name: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    value: str
    reason: Reason
    when: Condition = Condition()


class LeftOut(Strict):
    """A flag or variable that people give and this profile does not.

    Attributes:
        name: The flag or variable.
        value: The value that it is usually given with.
        reason: Why it is left out.
    """

    name: Name
    value: str | None = None
    reason: Reason


class Draft(Strict):
    """Whether the MTP head drafts. The first choice of a profile whose condition holds is taken.

    Attributes:
        num_speculative_tokens: Tokens drafted a step; 0 is MTP off.
        reason: Why.
        when: For which checkpoints.
    """

    num_speculative_tokens: int = Field(ge=0, le=16)
    reason: Reason
    when: Condition = Condition()


class Context(Strict):
    """The context that a profile is for.

    Attributes:
        tokens: Tokens that one request may have, prompt and answer together (`--max-model-len`). Lowered to what fits.
        least: Below this the profile makes no sense: the checkpoint is refused.
        raise_to_pool: Give more where the memory holds more, up to what the model was made for.
        reason: Why this many.
    """

    tokens: int = Field(gt=0)
    least: int = Field(gt=0)
    raise_to_pool: bool = False
    reason: Reason

    @model_validator(mode="after")
    def _least_is_least(self) -> "Context":
        if self.least > self.tokens:
            raise ValueError(f"context.least is {self.least}, more than context.tokens, {self.tokens}")
        return self


class Lora(Strict):
    """Whether LoRA adapters are served even when none is named yet.

    Attributes:
        max_rank: The largest rank that memory is set aside for; vLLM takes 1, 8, 16, 32, 64, 128, 256, 320 or 512.
        reason: Why.
    """

    max_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
    reason: Reason


class Sighting(Strict):
    """A report of the profile, or of nearly the same flags, at work.

    Attributes:
        vllm: The version that it ran on.
        checkpoint: What was served.
        cards: On what.
        pool_tokens: The KV pool that vLLM reported, in tokens; None where it was not written down.
        seen: What was seen, with the differences to this profile.
    """

    vllm: str
    checkpoint: str
    cards: str
    pool_tokens: int | None = None
    seen: Reason


class Versions(Strict):
    """The vLLM versions of a profile.

    Attributes:
        default: The release that is served with, and the tag of the image, when none is named.
        range: Outside of this range the profile is refused.
        seen_on: Reports of it at work.
    """

    default: str
    range: VersionRange
    seen_on: tuple[Sighting, ...] = ()


class Flags(Strict):
    """What profiles share: the part of a profile that follows from the model family and not from the cards."""

    flags: tuple[Flag, ...] = ()
    environment: tuple[Variable, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


class ServeProfile(Flags):
    """One way to serve a checkpoint.

    Attributes:
        title: One line for people.
        gpus: The cards, as `python -m assemble fit --gpus` takes them.
        cards: Real cards of this class.
        base: The shared part, `recipes/serve/base/NAME.yaml`, that this one's flags are added to; a flag that both name
            is taken from here.
        context: The context it is for.
        mtp: Whether the MTP head drafts.
        lora: Set where adapters are served; None leaves it to `--lora`.
        vllm: Versions.
    """

    title: str = Field(min_length=1)
    gpus: str = Field(pattern=r"^\d+x\d+GB$")
    cards: tuple[str, ...] = Field(min_length=1)
    base: str = "qwen3_5"
    context: Context
    mtp: tuple[Draft, ...] = Field(min_length=1)
    lora: Lora | None = None
    vllm: Versions

    @model_validator(mode="after")
    def _each_once(self) -> "ServeProfile":
        for names in ([f.name for f in self.flags], [v.name for v in self.environment]):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{twice[0]} is given twice")
        if self.mtp[-1].when != Condition():
            raise ValueError("the last choice of mtp must have no condition, so that one of them always holds")
        return self


class VersionFact(Strict):
    """Something about `vllm serve` that differs between versions.

    Attributes:
        name: A short name.
        vllm: The versions it holds for.
        concerns: The flag or variable it is about, if one.
        fact: What holds.
        consequence: What follows for a command line.
        source: Where it was read or seen.
    """

    name: str = Field(min_length=1)
    vllm: VersionRange
    concerns: Name | None = None
    fact: Reason
    consequence: Reason
    source: str = Field(min_length=1)


class VersionFacts(Strict):
    """`recipes/serve/versions/vllm.yaml`.

    Attributes:
        read_in: Releases in whose source every flag and value of every profile was looked up, oldest first.
        facts: What differs between versions.
    """

    read_in: tuple[str, ...] = Field(min_length=1)
    facts: tuple[VersionFact, ...]


def holds(condition: Condition, facts: Mapping[str, Any]) -> bool:
    """Whether a condition holds.

    Args:
        condition: The condition.
        facts: A value for each of its fields; `vllm` is a version.
    """
    stated = condition.model_dump(exclude_none=True)
    versions = stated.pop("vllm", None)
    return in_range(str(facts["vllm"]), versions) and all(facts[name] == value for name, value in stated.items())


def in_range(version: str, versions: str | None) -> bool:
    """Whether a version lies in a range; a pre-release comes before its release, as PEP 440 orders them."""
    return versions is None or SpecifierSet(versions, prereleases=True).contains(version, prereleases=True)

"""What a checkpoint needs to be served: vLLM's version, the GPU, and what else to say on the command line."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from assemble.architecture import ConfigError
from assemble.rules.model import Detail
from assemble.rules.subject import Subject
from assemble.sidefiles import side_files

RECOMMENDED = (0, 24)  # what vLLM's own page of recipes asks for, for nvidia/Qwen3.6-27B-NVFP4
# SM 7.5: vLLM 0.33 modelopt.py:1647 `ModelOptMixedPrecisionConfig.get_min_capability`; 8.0 for plain FP8 (:447).
CAPABILITY = {"FP8": 80, "FP8_PER_CHANNEL_PER_TOKEN": 80, "FP8_PB_WO": 80, "MXFP8": 80}


@dataclass(frozen=True)
class Requirements:
    """What it takes to serve a checkpoint.

    Attributes:
        vllm: The least version.
        reason: Why.
        capability: The least CUDA compute capability, times ten.
        notes: What else to know or to say, one sentence each.
    """

    vllm: tuple[int, int]
    reason: str
    capability: int
    notes: tuple[str, ...] = ()

    @property
    def vllm_text(self) -> str:
        """The least version as people write it."""
        return f"{self.vllm[0]}.{self.vllm[1]}.0"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"vllm": f">={self.vllm_text}", "reason": self.reason, "sm": self.capability, "notes": list(self.notes)}


def requirements(subject: Subject) -> Requirements:
    """Reads the requirements off configs and headers.

    Sources: vLLM pull requests #42566 (mixed W4A16, 0.22.0) and #42124 (quantized lm_head, 0.23.0); the registries of
    0.22 to 0.26 (no text-only class), 0.27.1, 0.28, 0.29, 0.32 and 0.33 (it is there).
    """
    if isinstance(subject.known, ConfigError):
        return Requirements(RECOMMENDED, "config.json could not be understood", 75)
    version, reason = (0, 22), "mixed precision with W4A16"
    if subject.plain:
        reason = f"plain {subject.plain}"
    elif not subject.listed:
        reason = "not quantized"
    if subject.lm_head:
        version, reason = (0, 23), "quantized lm_head"
    if not subject.known.wrapped:
        version, reason = (0, 27), "text-only class, absent from 0.22 to 0.26, there from 0.27.1 on"
    return Requirements(version, reason, CAPABILITY.get(subject.plain or "", 75), tuple(_notes(subject)))


def _notes(subject: Subject) -> list[str]:
    notes = []
    present = set(side_files(subject.root))
    processors = {"processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"}
    if subject.architecture.wrapped and not present & processors:
        notes.append("no image processor files: serve with --language-model-only")
    if subject.has_head and subject.architecture.wrapped:
        notes.append("vLLM 0.26 and older read mtp_num_hidden_layers at the top level only: give num_speculative_tokens")
    return notes


def recommended_is_enough(subject: Subject) -> Iterator[Detail]:
    """VER-1: vLLM 0.24 and GPUs of compute capability 7.5 are enough to serve it."""
    needs = requirements(subject)
    if needs.vllm > RECOMMENDED:
        yield Detail("vLLM", f"needs {needs.vllm_text} or newer ({needs.reason})", "0.24.0 is enough")
    if needs.capability > 75:
        yield Detail("GPU", f"needs compute capability {needs.capability / 10}", "7.5 is enough")

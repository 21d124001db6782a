"""The bundled demonstration: a small trained model, calibrated on the text of Python's own standard library."""

import json
import sysconfig
from pathlib import Path

MODEL = Path(__file__).parent / "models" / "tiny-qwen3_5-mtp"
MOE_MODEL = MODEL.with_name("tiny-qwen3_5_moe-mtp")
CHARACTERS = 120_000  # about 40,000 tokens of the model's tokenizer; 16 rows of 256 need 4,096


def write_calibration(path: Path) -> None:
    """Writes modules of the standard library, in the order of their names, as rows of a jsonl file (`text`)."""
    rows, total = [], 0
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = source.read_text(encoding="utf-8", errors="replace")
        rows.append(json.dumps({"text": text}))
        total += len(text)
        if total >= CHARACTERS:
            break
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def calibration_file(out: Path) -> Path:
    """Writes the calibration text beside the run's records and returns its path."""
    workspace = out.with_name(out.name + ".run")
    workspace.mkdir(parents=True, exist_ok=True)
    path = workspace / "standard-library.jsonl"
    write_calibration(path)
    return path

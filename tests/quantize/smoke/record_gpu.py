"""Keeps what the sabotage run on a GPU left: `python -m tests.quantize.smoke.record_gpu RESULTS EVALUATED`.

RESULTS is what `benchmarks/sabotage.py`'s run.sh wrote, EVALUATED the folder of `evaluate`. Cut down to what verdicts are made
from: of the good pair each prompt's tokens, with log probabilities and the two best candidates up to the first difference; of
the others two texts without them. Counters, the prompts' likelihood and the logs are whole, but for paths and addresses.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from quantize.smoke.divergence import compare
from quantize.smoke.passes import Pass, read_pass
from tests.quantize.smoke.record import scrubbed

GPU = Path(__file__).parent / "recorded" / "h200"
GOOD = ("good.plain", "good.mtp")
OTHERS = (
    "head_lost.mtp",
    "head_lost.plain",  # cut short while it generated
    "head_fp8_cast.plain",  # cut short before it said a word
    "head_fp8_scaled.mtp",
    "lm_head_bf16.plain",
    "gate_up_apart.plain",
    "gate_up_apart.mtp",
)
PROMPT_IDS, TEXT, OTHER_TEXTS, DIGITS = 8, 60, 2, 5


def keep(results: Path, evaluated: Path) -> None:
    """Writes the cut results, their logs, and the prediction."""
    GPU.mkdir(parents=True, exist_ok=True)
    pair = [read_pass(name, results / f"{name}.json") for name in GOOD]
    ends = {d.prompt: d.position + 1 for d in compare(pair[0].outputs, pair[1].outputs).differences}
    for one in pair:
        rows = one.result["outputs"]
        kept = [short(row, row["steps"][: ends.get(number)]) for number, row in enumerate(rows)]
        write(one, results, {"outputs": kept})
    for name in OTHERS:
        one = read_pass(name, results / f"{name}.json")
        texts = one.result.get("outputs", [])[:OTHER_TEXTS] if one.result["mtp"] else []  # of one pass: nothing to compare
        write(one, results, {"outputs": [short(row, []) for row in texts]})
    report = json.loads((evaluated / "report.json").read_text())
    nll = [json.loads(line)["nll"] for line in (evaluated / "prompts.jsonl").read_text().splitlines()]
    steps = report["mtp"]["bodies"]["quantized"]["tokens_per_step"]
    (GPU / "prediction.json").write_text(json.dumps({"tokens_per_step": steps["2"], "nll": nll}) + "\n")


def short(row: dict[str, Any], steps: list[Any]) -> dict[str, Any]:
    """A continuation with less around it."""
    cut = [
        {
            "id": s["id"],
            "logprob": round(s["logprob"], DIGITS),
            "top": [[i, round(value, DIGITS)] for i, value in s["top"][:2]],
        }
        for s in steps
    ]
    return {**row, "prompt_token_ids": row["prompt_token_ids"][:PROMPT_IDS], "text": row["text"][:TEXT], "steps": cut}


def write(one: Pass, results: Path, changed: dict[str, Any]) -> None:
    """Writes a result and its log, without what names the machine."""
    kept = {**one.result, **changed, "python": "3", "environment": {}}
    if kept.get("canary"):
        kept["canary"] = {**kept["canary"], "steps": []}
    if kept.get("prompt_logprobs"):
        kept["prompt_logprobs"] = {"prompts": [[round(x, 4) for x in row] for row in kept["prompt_logprobs"]["prompts"]]}
    (GPU / f"{one.name}.json").write_text(nameless(json.dumps(kept, separators=(",", ":"))) + "\n")
    log = results / f"{one.name}.log"
    (GPU / log.name).write_text(nameless(log.read_text(errors="replace")))


def nameless(text: str) -> str:
    """The text without paths, addresses and process ids."""
    text = re.sub(r"/[\w/.-]+/smoke_kit/\w+", "/checkpoint", text)
    text = re.sub(r"(/[\w.+-]+)+/vllm/(?=[\w/]+\.py)", "/site-packages/vllm/", text)
    text = re.sub(r"tcp://[\d.]+:\d+", "tcp://127.0.0.1:1", text)
    return scrubbed(text)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]))

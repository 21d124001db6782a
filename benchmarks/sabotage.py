"""Does the smoke test see what is wrong? Sabotaged copies of a good checkpoint before a real vLLM, and a table of verdicts.

    python -m benchmarks.sabotage make CHECKPOINT SOURCE OUT --prompts FILE   # here: copies, settings, runner; also OUT.tar.xz
    bash OUT/run.sh OUT RESULTS                                               # where the GPU is; needs vLLM, nothing of ours
    python -m benchmarks.sabotage judge OUT RESULTS --source SOURCE           # here again: the table, also RESULTS/table.md

CHECKPOINT is a good quantized checkpoint, SOURCE the BF16 one it was made from. OUT holds hard links where nothing changes.
"""

import argparse
import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from assemble.checkpoint import Checkpoint
from quantize.smoke.evidence import Prediction, predicted
from quantize.smoke.passes import End, Pass
from quantize.smoke.prompts import bundled_prompts, read_prompts
from quantize.smoke.report import FAIL, WARN, Report
from quantize.smoke.settings import MTP, PLAIN, RUNNER, Ask
from quantize.smoke.verdict import read_results, verdict
from recipes.schema import Smoke
from tests.assemble.checkpoints import Copy, link_tree

GOOD, BF16 = "good", "bf16"  # the checkpoint itself, and what it was made from: both must pass
HEAD = [
    "checkpoint",
    "K",
    "verdict",
    "why",
    "tokens a step (accepted by position)",
    "text with and without the head",
    "NLL",
    "passes",
]
HEAD += ["as it should be"]
FC = "mtp.fc.weight"
APART = 4  # how far gate's and up's tensor scales are drawn apart
STEP = 16  # E4M3 has three bits of mantissa: a fourth of a number is two less in the exponent, 16 less in the code


def head_lost(copy: Copy) -> None:
    """The whole head is gone; config.json still declares it."""
    copy.drop(*copy.names("mtp."))


def head_not_indexed(copy: Copy) -> None:
    """The head lies in a shard of its own that the index does not name."""
    for name in copy.names("mtp."):
        raw = copy.get(name)
        copy.drop(name)
        copy.put(name, *raw, shard="mtp.safetensors")
    copy.save()
    copy.index(lambda i: i.update(weight_map={n: f for n, f in i["weight_map"].items() if f != "mtp.safetensors"}))


def fc_halves_swapped(copy: Copy) -> None:
    """The projection takes the hidden state where the embedding is, and the other way round."""
    dtype, shape, data = copy.get(FC)
    left, right = np.split(np.frombuffer(data, np.uint16).reshape(shape), 2, axis=1)
    copy.put(FC, dtype, shape, np.concatenate([right, left], axis=1).tobytes())


def k_norm_zeroed(copy: Copy) -> None:
    """The head's k_norm is all zeros. The family's norms multiply by 1 + w: keys lose their learned weights, no more."""
    copy.change("mtp.layers.0.self_attn.k_norm.weight", lambda a: a.__setitem__(slice(None), 0))


def head_cast(copy: Copy, *, scaled: bool) -> None:
    """The head's matrices are stored in FP8 and not listed; with the scales of a quantizer, or as a plain cast."""
    import torch

    for name in [n for n in copy.names("mtp.") if len(copy.get(n)[1]) == 2]:
        _, shape, data = copy.get(name)
        weight = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape).float()
        scale = weight.abs().max() / 448 if scaled else torch.tensor(1.0)
        stored = (weight / scale).to(torch.float8_e4m3fn)
        copy.put(name, "F8_E4M3", shape, stored.view(torch.uint8).numpy().tobytes())
        if scaled:
            copy.scalar(f"{name}_scale", float(scale))


def gate_up_apart(copy: Copy) -> None:
    """Each layer's up_proj has a tensor scale of its own, its block scales to match: wrong only when fused with gate_proj."""
    for name in copy.names(".up_proj.weight_scale_2"):
        copy.scale(name, APART)
        blocks = name.removesuffix("_2")
        copy.change(blocks, lambda a: np.where(a > STEP + 7, a - STEP, a >> 2).astype(np.uint8))


def kv_scheme_missing(copy: Copy) -> None:
    """The FP8 KV cache is declared in hf_quant_config.json alone, as in a checkpoint that was published."""
    copy.q(lambda q: q.pop("kv_cache_scheme"))


@dataclass(frozen=True)
class Sabotage:
    """One way to break the checkpoint, and what the verdict must say: the check that sees it, a rule or word in its text."""

    name: str
    change: Callable[[Copy], None]
    check: str
    word: str


SABOTAGES = (
    Sabotage("head_lost", head_lost, "acceptance", "CFG-5"),
    Sabotage("head_not_indexed", head_not_indexed, "acceptance", "IDX-1"),
    Sabotage("fc_halves_swapped", fc_halves_swapped, "acceptance", "MTP-3"),
    Sabotage("k_norm_zeroed", k_norm_zeroed, "law book", "MTP-3"),
    Sabotage("head_fp8_cast", lambda c: head_cast(c, scaled=False), "law book", "MTP-2"),
    Sabotage("head_fp8_scaled", lambda c: head_cast(c, scaled=True), "law book", "MTP-2"),
    Sabotage("gate_up_apart", gate_up_apart, "law book", "Q-6"),
    Sabotage("kv_scheme_missing", kv_scheme_missing, "KV cache", "CFG-8"),
    Sabotage("lm_head_bf16", lambda c: c.bf16("lm_head"), "loads", "Q-2"),
)

RUN = r"""#!/usr/bin/env bash
# Every pass on every checkpoint of KIT, JOBS at once. The good one goes first and alone: it tunes the kernels for the others.
# usage: run.sh KIT RESULTS [JOBS]     the environment must have vLLM; PYTHON names the interpreter (python3 unless set),
#                                      LIMIT the seconds for a pass (600)
set -u
kit=$1 results=$2 jobs=${3:-4} python=${PYTHON:-python3}
mkdir -p "$results"
one() {
    timeout "${LIMIT:-600}" "$python" "$kit/smoke_runner.py" "$kit/$2.json" "$results/$1.$2.json" --model "$kit/$1"
    echo "$1 $2: exit $? at $(date +%T)"
}
parts=$(cd "$kit" && ls -- *.json | sed 's/\.json$//' | sort -r)
export -f one; export kit results python LIMIT
for part in $parts; do one good "$part"; done
for folder in "$kit"/*/; do
    name=$(basename "$folder")
    [ "$name" = good ] || for part in $parts; do printf '%s %s\n' "$name" "$part"; done
done | xargs -P "$jobs" -L 1 bash -c 'one "$0" "$1"'
"""


def make(options: argparse.Namespace) -> None:
    """Writes the copies, the settings, the runner and the script that runs it."""
    out, engine = options.out, options.engine_args
    out.mkdir(parents=True)
    link_tree(options.checkpoint, out / GOOD)
    shutil.copytree(options.source, out / BF16, ignore=shutil.ignore_patterns("*.jsonl", "*.md"))
    origin = Checkpoint.open(options.source)
    chosen = () if options.no_sabotage else SABOTAGES
    for sabotage in chosen:
        copy = Copy(link_tree(options.checkpoint, out / sabotage.name), origin)
        sabotage.change(copy)
        copy.save()
    prompts = read_prompts(options.prompts, "article") if options.prompts else bundled_prompts()
    for place, drafts in enumerate(options.drafts):
        ask = Ask(out / GOOD, Smoke(num_speculative_tokens=drafts), prompts, engine=engine)
        (out / f"{MTP}{drafts if place else ''}.json").write_text(json.dumps(ask.settings(MTP, model=GOOD)))
    (out / f"{PLAIN}.json").write_text(json.dumps(ask.settings(PLAIN, model=GOOD)))
    shutil.copyfile(RUNNER, out / RUNNER.name)
    (out / "run.sh").write_text(RUN)
    archive = out.with_name(out.name + ".tar.xz")
    with tarfile.open(archive, "w:xz", preset=9) as file:
        file.add(out, out.name)
    size = archive.stat().st_size / 1e6
    print(f"{out}: {2 + len(chosen)} checkpoints; {archive}: {size:.1f} MB")  # noqa: T201


def judge(kit: Path, results: Path, source: Path | None, evaluated: Path | None) -> bool:
    """Prints the table of verdicts; True when each of them is the right one."""
    rows, right = [HEAD, ["---"] * len(HEAD)], True
    known: dict[str, Sabotage | None] = {GOOD: None, BF16: None, **{s.name: s for s in SABOTAGES}}
    for part in sorted(kit.glob(f"{MTP}*.json")):
        drafts = json.loads(part.read_text())["speculative"]["num_speculative_tokens"]
        recipe = Smoke(num_speculative_tokens=drafts)
        for name, wanted in {n: w for n, w in known.items() if (kit / n).is_dir()}.items():
            files = [results / f"{name}.{pass_name}.json" for pass_name in (PLAIN, part.stem)]
            passes = read_results([file for file in files if file.is_file()])
            given = {} if name == BF16 else {"source": source}
            prediction = _prediction(evaluated, drafts, BF16 if name == BF16 else "quantized")
            report = verdict(kit / name, passes, recipe, "results", prediction=prediction, **given)
            good = report.passed if wanted is None else _named(report, wanted)
            right &= good
            rows.append([name, str(drafts), *_shown(report, passes), "yes" if good else "NO"])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    (results / "table.md").write_text(table + "\n")
    print(table)  # noqa: T201
    return right


def _prediction(evaluated: Path | None, drafts: int, body: str) -> Prediction:
    """What `evaluate` predicts of the quantized checkpoint, or of the one it was made from."""
    if evaluated is None:
        return Prediction()
    facts = json.loads((evaluated / "report.json").read_text())
    if body != BF16:
        return predicted(facts, drafts, read_prompts(evaluated / "prompts.jsonl"))
    steps = facts["mtp"]["bodies"]["bf16"]["tokens_per_step"]
    return Prediction(steps.get(str(drafts)))


def _named(report: Report, wanted: Sabotage) -> bool:
    """Whether the verdict names what was done."""
    bad = [check for check in report.checks if check.status in (FAIL, WARN)]
    return any(check.name == wanted.check and wanted.word in f"{check.found} {check.cause} {check.remedy}" for check in bad)


def _shown(report: Report, passes: Mapping[str, Pass]) -> list[str]:
    facts = report.facts
    outcome = "fails" if not report.passed else "warns" if any(check.status == WARN for check in report.checks) else "passes"
    drafted, text, scored = facts["acceptance"], facts["agreement"], facts["likelihood"]
    drafts = (
        f"{drafted['tokens_per_step']:.2f} ({' '.join(f'{share:.0%}' for share in drafted['by_position'])})" if drafted else "-"
    )
    said = f"{text['same']} same, {text['near_ties']} at near-ties" if text else "-"
    said += f", {text['diverged']} diverge; at most {text['largest_margin']:.2f}" if text else ""
    ran = "; ".join(
        f"{name}: {one.end if one.end is not End.UNKNOWN else f'cut in {one.phase!r}'}" for name, one in passes.items()
    )
    reason = report.reason.replace("|", "/") or "-"
    return [outcome, reason, drafts, said, f"{scored['nll']:.4f}" if scored else "-", ran]


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description="Sabotaged checkpoints before a real vLLM.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    for name in ("checkpoint", "source", "out"):
        making.add_argument(name, type=Path)
    making.add_argument("--prompts", type=Path)
    making.add_argument("--engine-args", type=json.loads, default={})
    making.add_argument(
        "--drafts", type=int, nargs="+", default=[2], help="tokens that the head drafts a step; a pass for each"
    )
    making.add_argument("--no-sabotage", action="store_true", help="only the checkpoint and its source")
    judging = commands.add_parser("judge")
    judging.add_argument("kit", type=Path)
    judging.add_argument("results", type=Path)
    judging.add_argument("--source", type=Path)
    judging.add_argument("--evaluated", type=Path, help="the folder that `evaluate` wrote, when its prompts.jsonl was used")
    args = parser.parse_args()
    if args.command == "make":
        make(args)
    else:
        sys.exit(0 if judge(args.kit, args.results, args.source, args.evaluated) else 1)


if __name__ == "__main__":
    main()

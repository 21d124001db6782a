"""assemble: shards, configs, index and side files become a checkpoint."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from assemble.architecture import MTP_PREFIX
from assemble.config import complete_config, hf_quant_config, ignore_list, quantization_config
from assemble.jsonfile import write_object
from assemble.plan import AssemblyPlan
from assemble.sidefiles import side_files
from assemble.writer import link_file, sha256_file, sha256_tensor, sync_directory, write_index
from quantize.stage import Context, Result
from quantize.stages import fetch
from quantize.stages.plan import planned
from quantize.stages.quantize import check_unchanged


def run(context: Context) -> Result:
    """Leaves a complete checkpoint in the stage's folder.

    Raises:
        InputError: a shard that was changed since it was hashed, or the source.
    """
    plan = planned(context, context.records["fetch"])
    directory = context.directory
    quantized = context.records["quantize"]
    check_unchanged(quantized, context.directory_of("quantize"))
    known = dict(quantized.outputs)
    for name in quantized.outputs:
        link_file(context.directory_of("quantize") / name, directory / name)
    for name in side_files(plan.source.root):
        shutil.copyfile(plan.source.root / name, directory / name)
    modelopt = str(quantized.provenance["packages"]["nvidia-modelopt"])
    _write_configs(plan, directory, modelopt)
    write_index(plan, directory)
    sync_directory(directory)
    fetch.check_unchanged(context.records["fetch"])  # else its side files and its config are not those on record
    outputs = {p.name: known.get(p.name) or sha256_file(p) for p in sorted(directory.iterdir()) if p.is_file()}
    head = {name: t for name, t in plan.copies.items() if name.startswith(MTP_PREFIX)}
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda t: sha256_tensor(plan.head.path_of(t), t), head.values())
    facts = {"head_sha256": dict(zip(head, digests, strict=True)), "copied_tensors": len(plan.copies)}
    return Result(outputs, facts)


def _write_configs(plan: AssemblyPlan, directory: Path, modelopt_version: str) -> None:
    config, _ = complete_config(plan.source.config, plan.architecture)
    ignore = ignore_list(plan)
    config["quantization_config"] = quantization_config(plan.listed, ignore, modelopt_version)
    write_object(directory / "config.json", config)
    write_object(directory / "hf_quant_config.json", hf_quant_config(plan.listed, ignore, modelopt_version))

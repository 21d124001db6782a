"""`status`: where a run stands, from its records."""

from pathlib import Path
from typing import Any

from assemble.errors import InputError
from quantize.pipeline import PIPELINE
from quantize.stage import FAILED, read_record


def read_status(out: Path) -> dict[str, Any]:
    """The state of every stage of the run that makes (or made) `out`.

    Raises:
        InputError: no run is recorded for it.
    """
    workspace = out.with_name(out.name + ".run")
    if not workspace.is_dir():
        there = f"{out} exists, but no" if out.exists() else "no"
        raise InputError(f"{there} run is recorded for {out}: there is no {workspace}.")
    stages = []
    for stage in PIPELINE:
        record = read_record(workspace / stage.name)
        started = (workspace / stage.name).is_dir()
        failed = (workspace / stage.name / FAILED).is_file()
        state = "failed" if failed else "done" if record else "unfinished" if started else "to do"
        if stage.optional and not started:
            state = "not asked for"
        stages.append(
            {
                "stage": stage.name,
                "state": state,
                "seconds": record.seconds if record else None,
                "peak_memory_bytes": record.peak_memory_bytes if record else None,
                "finished": record.provenance["time"] if record else None,
            }
        )
    needed = {stage.name for stage in PIPELINE if not stage.optional}
    complete = out.exists() and all(s["state"] == "done" for s in stages if s["stage"] in needed)
    return {"out": str(out), "complete": complete, "stages": stages}

"""Which files of a folder belong to a checkpoint and are sent: the others stay."""

from pathlib import Path

from assemble.checkpoint import INDEX, read_layout, stays_inside
from assemble.sidefiles import side_files

CONFIGS = ("config.json", "hf_quant_config.json", INDEX)


def belonging(root: Path) -> list[str]:
    """Configs, index, the shards that are read, and the side files, by name. The card and provenance are made, not found."""
    shards = [shard.name for shard in read_layout(root).shards]
    configs = [name for name in CONFIGS if (root / name).is_file() and stays_inside(root / name)]
    return sorted({*configs, *shards, *side_files(root)})

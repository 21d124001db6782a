"""What importing in a hurry must not change. Each case runs in a process of its own, since modules are imported once."""

import os
import subprocess
import sys
from pathlib import Path


def python(code: str, path: Path | None = None) -> str:
    """What a new process prints."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment).stdout


def test_transformers_knows_what_it_would_have_known() -> None:
    code = """
import gc, sys
from importlib.metadata import packages_distributions, version
from quantize import libraries
interval = sys.getswitchinterval()
libraries._import()
assert gc.isenabled() and sys.getswitchinterval() == interval
assert not [name for name, module in sys.modules.items() if module is None and name in libraries.UNUSED]

import transformers.models
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

known = transformers.models._class_to_module
scan = import_utils.create_import_structure_from_path.__closure__
import_utils.create_import_structure_from_path = [c.cell_contents for c in scan if hasattr(c.cell_contents, "cache_clear")][0]
import_utils.create_import_structure_from_path.cache_clear()
fresh = import_utils.define_import_structure(transformers.models.__file__)
names = {name: module for modules in fresh.values() for module, found in modules.items() for name in found}
assert len(names) > 3000 and {name: known[name] for name in names} == names
print("good")
"""
    assert python(code) == "good\n"


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

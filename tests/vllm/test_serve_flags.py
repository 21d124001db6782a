"""The profiles' command lines, given to vLLM's own command line parser."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from assemble.serve.adapter import Adapter
from assemble.serve.command import Place, vllm_command
from assemble.serve.deciding import Wish, decide
from assemble.serve.described import describe
from recipes.serve_profiles import load_profile, shipped_profiles
from tests.assemble.serve.conftest import headers

__all__ = ["headers"]

PARSE = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
found = []
for argv in json.load(sys.stdin):
    arguments = parser.parse_args(argv)
    validate_parsed_serve_args(arguments)
    found.append({name: str(value) for name, value in vars(arguments).items()})
print(json.dumps(found))
"""


@pytest.mark.parametrize("shape", ["27B", "35B-A3B"])
def test_vllm_takes_every_flag_and_means_the_same(shape: str, headers: Callable[..., Path], vllm_python: Path) -> None:
    checkpoint = describe(headers(shape))
    adapter = Adapter("ft", Path("/adapter"), 16, "split" if shape != "27B" else None, 4, None, ())
    wishes = [Wish(), Wish(adapters=(adapter,))]
    served = [decide(*load_profile(n), checkpoint, "named", w) for n in shipped_profiles() for w in wishes]
    lines = [vllm_command(s, Place("/model", None, 9000)).argv[2:] for s in served]
    result = subprocess.run([vllm_python, "-c", PARSE], input=json.dumps(lines), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    for serving, found in zip(served, json.loads(result.stdout.splitlines()[-1]), strict=True):
        given = {flag.name: flag.values for flag in serving.flags}
        assert (found["model_tag"], found["port"], found["served_model_name"]) == ("/model", "9000", "['named']")
        for name, values in given.items():
            field, on = name.removeprefix("--").replace("-", "_"), True
            if field.startswith("no_"):
                field, on = field.removeprefix("no_"), False
            if not values:
                assert found[field] == str(on), name
            elif values[0].startswith("{"):
                assert all(str(value) in found[field] for value in json.loads(values[0]).values()), name
            elif name not in ("--served-model-name", "--lora-modules"):
                assert found[field] == values[0] or float(found[field]) == float(values[0]), name
        assert ("/adapter" in found["lora_modules"]) == bool(serving.adapters)

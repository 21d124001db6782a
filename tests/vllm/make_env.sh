#!/usr/bin/env bash
# Makes the environment in which vLLM's own loader runs on a CPU: `make vllm-env` calls this.
# usage: make_env.sh PYTHON VENV CPU_INDEX
#   PYTHON     interpreter to make it with      VENV  the environment's directory; replaced when it is there
#   CPU_INDEX  an index with PyTorch's CPU builds, beside the configured ones
set -euo pipefail
[ $# = 3 ] || { sed -n 2,6p "$0"; exit 2; }
python=$1 venv=$2 cpu_index=$3
pins=$(dirname "$0")/requirements.txt
torch=$(sed -n 's/^torch==/torch==/p' "$pins")

"$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# The CPU build (0.2 GB) first: vLLM's CPU build is linked against it, and the default one brings 3 GB of CUDA libraries.
pip install --no-deps --retries 0 "$torch+cpu" --extra-index-url "$cpu_index" || {
  echo "no CPU build of $torch found: set TORCH_CPU_INDEX to an index that has it" >&2
  exit 1
}
pip install --no-deps --only-binary=:all: -r <(grep -v '^torch==' "$pins")

# torchvision on PyPI is a CUDA build. Its compiled half does not load beside torch+cpu, and importing it, as transformers
# does, ends at the operator torchvision::nms that it lacks. Nothing here calls the operator, so declaring it is enough.
if ! "$venv/bin/python" -c 'import torchvision' 2>/dev/null; then
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cat >"$site/_torchvision_operators.py" <<'PYTHON'
"""Declares the operators of torchvision's compiled half, which does not load beside torch's CPU build."""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
  sed -i '1i import _torchvision_operators' "$site/torchvision/__init__.py"
fi

"$venv/bin/python" -c 'import torchvision, vllm; print("vLLM", vllm.__version__, "loads checkpoints in this environment")'

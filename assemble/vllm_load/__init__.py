"""vLLM's own loader as a second opinion: does it take a checkpoint, and does it fill every parameter?

`client.py` starts another interpreter, whose environment has vLLM's CPU build, on the folder `runner/`, and turns what that
prints into findings. This package itself imports neither torch nor vLLM; `runner/` is only ever run, by the other one.
"""

from assemble.vllm_load.client import KINDS, Opinion, VllmCrashError, VllmEnvironmentError, second_opinion, second_opinions

__all__ = ["KINDS", "Opinion", "VllmCrashError", "VllmEnvironmentError", "second_opinion", "second_opinions"]

"""The vLLM that this project serves and tries checkpoints with, unless another is asked for.

0.27.1, for three reasons. Of all releases it is nearest to the build that the profiles' numbers were measured on
(0.27.2rc1.dev110, a nightly that cannot be had again). It is the first that knows the text-only classes, so every checkpoint of
the recipe loads. And every flag of every profile was looked up in it (`serve/versions/vllm.yaml`), between 0.26.0, which
`smoke` was tried with on a GPU, and 0.32.0, whose own loader the law book is tested against.

`serve` and `smoke` name this release; a test holds the profiles and the Dockerfile to it. What is smoke-tested is thus what is
served.
"""

RELEASE = "0.27.1"
REPOSITORY = "vllm/vllm-openai"
IMAGE = f"{REPOSITORY}:v{RELEASE}"

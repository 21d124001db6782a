"""The smoke test: a checkpoint before a real vLLM, with its MTP head drafting, and a verdict on what that did.

"It loaded and the text looks fine" is exactly what vLLM shows for a dead MTP head: the body checks every draft, so the text
stays right and only nothing is ever accepted. So the test counts accepted drafts, compares the text with and without the
head, asks which kernels and which KV cache were really chosen, and explains what it finds.

    settings.py     what vLLM is asked to do, safe by default; prompts.py: from what it generates
    runner/         the one script that imports vLLM: run by another interpreter, never imported
    launch.py       starts that script: here, in another environment, in a container; endpoint.py: asks a running server
    passes.py       what that left, JSON and log; logs.py: what only the log tells
    judge.py        the checks, functions of evidence.py alone; acceptance.py, divergence.py, texts.py: the harder ones
    failures.yaml   known messages, their cause and remedy; blame.py: from a silent failure to the law book
    verdict.py      law book and checks together; report.py: what people and the card are told
"""

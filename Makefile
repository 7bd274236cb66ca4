# Every target sets itself up in .venv from Python 3.11+, make and git.
.DEFAULT_GOAL := help
.PHONY: help setup lock generate demo up test check bench clean
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Every service is a process that starts: without bytecode each would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/.ready ## .venv with the locked dependencies

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@command -v uv >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	uv pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements/dev.txt
	uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

lock: ## re-resolve the requirements files
	uv pip compile --quiet --generate-hashes --no-header --universal --python-version 3.11 -o requirements/base.txt pyproject.toml
	uv pip compile --quiet --generate-hashes --no-header --universal --python-version 3.11 --extra sandbox --group dev -c requirements/base.txt -o requirements/dev.txt pyproject.toml requirements/build.in

generate: setup ## schema/generated from the structs
	python -m schema.generate

demo: setup ## the main job from end to end on examples/, ends by itself
	python -m sandbox.demo

up: setup ## everything in this terminal, until Ctrl-C
	lbledger up

test: setup ## all tests (T=path for some of them, WORKERS=0 to see them one by one)
	python -m pytest -q -n $(or $(WORKERS),2) --no-loadscope-reorder $(or $(T),tests)

check: setup ## lint, types, import contracts, contracts of the schema, deployment files
	ruff check .
	ruff format --check --quiet .
	mypy
	lint-imports
	python -m schema.generate --check
	python -m pytest -q -p no:cacheprovider tests/contracts/test_events.py tests/adapters/test_migrations.py
	check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	kubectl kustomize deploy >/dev/null

bench: setup ## the benchmarks (QUICK=1 for two minutes' worth)
	python -m bench $(if $(QUICK),--quick)

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# make setup   everything into .venv     make serve   serve the default model
# make test    the tests (<= 10 min)     make lint    ruff, mypy, import-linter, buf
# make docs    docs/api.md, out of the code's own tables
# make prove   every "Must show" line of the issues at full counts, one table
#
# PYTHON        the interpreter that .venv is made with
# TORCH         what pip is asked for when .venv has no torch: pinned, because an open range may pull a CUDA build of
#               several gigabytes onto a machine without a GPU
# TORCH_ARGS    more arguments for that pip call, e.g. an index of CPU or CUDA builds
# ARGS          passed on to `paceline serve`, pytest or the prover

PYTHON ?= python3.11
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Remade when what is to be installed changes.
SERVE_STAMP := $(VENV)/.serve-ready
DEV_STAMP := $(VENV)/.dev-ready

.PHONY: setup setup-dev serve test lint docs prove proto proto-released clean

setup: $(SERVE_STAMP)

setup-dev: $(DEV_STAMP)

$(BIN)/python:
	@echo "==> making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11 or newer; set PYTHON=")'
	@$(PYTHON) -m venv $(VENV)

$(SERVE_STAMP): $(BIN)/python pyproject.toml setup.py $(wildcard worker/kernels/*.cpp worker/kernels/*.h)
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	  echo "==> installing $(TORCH) (the largest part, a minute or two)"; \
	  $(BIN)/python -m pip install --disable-pip-version-check -q $(TORCH_ARGS) "$(TORCH)"; }
	@echo "==> installing paceline and what it serves with"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[serve]'
	@touch $@

$(DEV_STAMP): $(SERVE_STAMP) pyproject.toml tests/clients/package-lock.json
	@echo "==> installing what the tests need"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[serve,dev]'
	@npm ci --prefix tests/clients --silent --no-audit --no-fund
	@touch $@

serve: setup
	@$(BIN)/paceline serve $(ARGS)

# Two files at a time: most tests compute on one core or wait.
test: setup-dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# mypy and import-linter look for the package paceline: a folder of links gives them one.
LINKS := .lint/paceline
$(LINKS): Makefile
	@rm -rf .lint && mkdir -p $(LINKS) && touch $(LINKS)/__init__.py
	@for room in proto worker cluster router; do ln -s ../../$$room $(LINKS)/$$room; done

lint: setup-dev $(LINKS)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@MYPYPATH=.lint $(BIN)/mypy -p paceline
	@PYTHONPATH=.lint $(BIN)/lint-imports
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against proto/released.binpb

docs: setup-dev
	@$(BIN)/python -m paceline.router.reference > docs/api.md

prove: setup-dev
	@$(BIN)/python -m tests.prove $(ARGS)

proto: setup-dev
	@PYTHON=../$(BIN)/python proto/generate.sh

# What clients in the field were built with: `make lint` holds new messages against it. Remade at a release only.
proto-released: setup-dev
	@$(BIN)/buf build --exclude-source-info -o proto/released.binpb

clean:
	rm -rf $(VENV) .lint build *.egg-info

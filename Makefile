# Everything runs from a .venv in this folder; `make setup` makes it, and every other target does so first.
#
#   PYTHON=python3.12 make setup     another interpreter
#   ARGS="-k resume -x" make test    options handed on to pytest
#   JOBS=8 make test                 more tests at a time, for more than two cores

PYTHON ?= python3
ARGS ?=
JOBS ?= 4

BIN := .venv/bin
STAMP := .venv/.set-up

# Also pins what the build of the package itself needs.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# Hundreds of processes import the package: let the first of them compile it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all package soak lint format bench docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the package and all that the tests need

$(STAMP): pyproject.toml setup.py constraints.txt src/rankfeed/_util/_native.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rankfeed needs Python 3.11 or newer; choose one with PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs]'
	$(BIN)/python -m pip install --quiet --no-deps mosaicml-streaming  # asks for an older numpy, and needs none
	$(BIN)/python -m pip install --quiet --prefix .venv/mpich mpich
	@touch $@

demo: setup  ## train, kill the job, resume it on other ranks, and count what was delivered
	$(BIN)/python examples/demo.py

# Four at a time, since tests that start ranks wait for half of their time; these are in four groups, each of
# which runs one after the other (tests/conftest.py).
test: setup  ## run the tests, of the expensive ones a representative case each: within 7 minutes on 2 cores
	$(BIN)/python -m pytest -n $(JOBS) --max-worker-restart 3 $(ARGS)

test-all: setup  ## run all tests but the soaks, as .ci/run does: within 25 minutes on 2 cores
	$(BIN)/python -m pytest -n $(JOBS) --max-worker-restart 3 -m "not soak" $(ARGS)

package: setup  ## install sdist and wheel into fresh environments, and use them: alone, and with each extra
	$(BIN)/python -m tests.packages.install $(ARGS)

# One at a time and with its output shown: a soak's figures are its point.
soak: setup  ## run the tests that take hours and print what they measured
	$(BIN)/python -m pytest -m soak -s -v --timeout 3600 $(ARGS)

lint: setup  ## check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## put the code into the common style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: setup  ## measure beside other libraries, and write docs/performance.md
	$(BIN)/python -m bench.performance $(ARGS)

docs: setup  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## remove what was built, .venv included
	rm -rf .venv site dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

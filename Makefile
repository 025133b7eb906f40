# Each target works on a fresh machine: it makes .venv, installs the pinned versions, then does its work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= auto

# More threads than cores make small models slower, and every test process would start its own.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check
.DEFAULT_GOAL := check

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,all]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

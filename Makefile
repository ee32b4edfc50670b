# `make demo` and `make test` do all the set-up they need. Choose the interpreter with PYTHON=.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.rlframe-setup
# Everything that has a wheel for the interpreter. `all` is the list in setup.py.
EXTRAS ?= gymnasium,dm_control,test,lint
PYTEST_ARGS ?=

# The first interpreter that starts and is Python 3.10 (a pyenv shim may be there and not start).
PYTHON ?= $(shell for p in python3.10 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' >/dev/null 2>&1 && { echo $$p; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-system results lint format bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## build .venv, the reference environment (PYTHON= chooses the interpreter)

demo: $(STAMP) ## train PPO on CartPole-v1 and evaluate it
	$(BIN)/rlframe train --agent ppo --env CartPole-v1 --seed 1

test: $(STAMP) ## the tests (PYTEST_ARGS= adds options)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-system: $(STAMP) ## the tests that run whole programs
	$(BIN)/python -m pytest -m system $(PYTEST_ARGS)

results: $(STAMP) ## train again what docs/results.md shows (hours)
	$(BIN)/python -m benchmarks.results

lint: $(STAMP) ## ruff, mypy, and the layers of the design
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff lay the code out
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .

bench: $(STAMP) ## this project and its peers, side by side
	$(BIN)/rlframe bench

clean: ## remove .venv and what tools cached
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# Python 3.10 takes the exact versions that are tested; a newer one takes the newest that its wheels allow.
$(STAMP): setup.py constraints/py310.txt
	@test -n "$(PYTHON)" || { printf '%s\n' \
	  'rlframe: no Python 3.10 was found; the reference environment needs it.' \
	  '  Install it:     pyenv install 3.10   or   uv python install 3.10   or   apt install python3.10-venv' \
	  '  or name one:    make $(MAKECMDGOALS) PYTHON=/path/to/python3.10' \
	  '  or go without Launchpad and Reverb, on 3.11 to 3.13 with a newer JAX: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo 'rlframe: PYTHON=$(PYTHON) does not start, or is not Python 3.10 to 3.13.' >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	case "$$($(BIN)/python -c 'import sys; print(sys.version_info[1])')" in \
	  10) $(BIN)/python -m pip install -q -c constraints/py310.txt -e '.[$(EXTRAS)]' ;; \
	  *)  $(BIN)/python -m pip install -q -e '.[$(EXTRAS)]' ;; \
	esac
	@touch $(STAMP)

# `make demo` and `make test` do all the set-up they need, with Python 3.10 where it is found, else with the newest one
# that is supported. PYTHON= chooses the interpreter, VENV= the environment.

VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
RESULTS_ARGS ?=

# Where the environment forbids bytecode, each of the tests' hundreds of processes would compile its imports again.
export PYTHONDONTWRITEBYTECODE =

# Two steps, so that the demo need not wait for TensorFlow, Launchpad, Reverb and Ray, two thirds of it.
CORE := $(VENV)/.rlframe-core
ALL := $(VENV)/.rlframe-all

# The published clients and server, for `make test-compat` and `rlframe bench trajectories --peers-python`.
COMPAT_VENV ?= .venv-compat
COMPAT := $(COMPAT_VENV)/.atroposlib

# An environment for each suite of JAX environments and each Python, because their versions conflict.
SUITES ?= gymnax jumanji
SUITES_VENV ?= .venv-suites

# The first interpreter of these minor versions that starts (a pyenv shim may be there and not start) and has venv.
find = $(shell for v in $(1); do for p in python3.$$v python3 python $(2); do \
	"$$p" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, '$$v'))' >/dev/null 2>&1 && { echo "$$p"; exit; }; \
	done; done)
PYTHON ?= $(or $(call find,10),$(call find,13 12 11))
PYENV := "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.$$v.*/bin/python

# The documentation site is built with the newest Python here, without Launchpad and Reverb.
DOCS_VENV ?= .venv-docs
DOCS := $(DOCS_VENV)/.rlframe-docs
DOCS_PYTHON ?= $(or $(call find,13 12 11,$(PYENV)),$(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-system test-learning test-compat test-jax-suites compat chromium docs newest results results-long lint format bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(ALL) ## build .venv, the reference environment (PYTHON= chooses the interpreter)

demo: $(CORE) ## train PPO on CartPole-v1 and evaluate it
	@$(LEFT_OUT)
	$(BIN)/rlframe train --agent ppo --env CartPole-v1 --seed 1

# XLA optimizes little here: nearly all of a small test's time is compilation. test-system compiles as users do.
test: $(ALL) ## the tests (PYTEST_ARGS= adds options)
	@$(LEFT_OUT)
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -p no:schemathesis $(PYTEST_ARGS)

test-system: $(ALL) ## the tests that run whole programs
	$(BIN)/python -m pytest -m system $(PYTEST_ARGS)

test-learning: $(ALL) ## two scripts of one process and four of the runs of docs/project/results-engines.md must solve CartPole
	$(BIN)/python -m pytest -m system tests/programs/test_learning.py \
		'tests/test_examples.py::test_single_process_script_learns[single_process]' \
		'tests/test_examples.py::test_callback_stops_a_solved_run_in_every_topology[single_process]' $(PYTEST_ARGS)

test-compat: $(ALL) $(COMPAT) ## environments of the package atroposlib, unchanged, against the trajectory service
	RLFRAME_COMPAT_PYTHON="$(abspath $(COMPAT_VENV))/bin/python" $(BIN)/python -m pytest -m compat $(PYTEST_ARGS)

# Each environment has only the core, one suite and pytest.
test-jax-suites: ## the tests with gymnax and jumanji, on Python 3.10 and the newest one (SUITES= chooses)
	@for venv in $(foreach suite,$(SUITES),$(foreach python,$(SUITE_PYTHONS),$(SUITES_VENV)/$(suite)-$(python))); do \
	  $(MAKE) --no-print-directory $$venv/.rlframe && echo "Testing $$venv:" && \
	  JAX_DISABLE_MOST_OPTIMIZATIONS=1 $$venv/bin/python -m pytest -m suites $(PYTEST_ARGS) tests/envs/test_conformance.py tests/envs/test_jax_suites.py \
	    || exit 1; done

compat: $(COMPAT) ## build .venv-compat, an environment with the package atroposlib

# At most five minutes, and a failure is none: the tests say what they miss.
chromium: ## install Chromium, in which the live page is tested, where we are root on Debian
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive && \
	  timeout 60 apt-get update -qq >/dev/null && timeout 240 apt-get install -qq -y --no-install-recommends chromium >/dev/null; \
	} || echo 'rlframe: Chromium cannot be installed here; the tests of the live page will be skipped.' >&2

results: $(ALL) ## train what docs/project/results.md lacks, and write it (RESULTS_ARGS= adds options; about 16 hours in all)
	$(BIN)/python -m benchmarks.results $(RESULTS_ARGS)

results-long: $(ALL) ## the same, and SAC on HalfCheetah for a million steps, and MinAtar (needs the extra gymnax)
	$(BIN)/python -m benchmarks.results --long $(RESULTS_ARGS)

lint: $(ALL) ## ruff, mypy, the layers of the design, and plain English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.plain_english

docs: $(DOCS) ## the documentation site, in build/docs; every notebook runs, and a warning is an error
	PATH="$(abspath $(DOCS_VENV))/bin:$$PATH" $(DOCS_VENV)/bin/sphinx-build -q -W --keep-going -j 4 -b html docs build/docs
	@$(DOCS_VENV)/bin/python docs/pages.py | tail -n 1
	@echo "The site is in build/docs/index.html."

format: $(ALL) ## let ruff lay the code out
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .

bench: $(ALL) ## this project and its peers, side by side
	$(BIN)/rlframe bench

newest: # the newest supported Python after 3.10 of this machine; nothing where there is none
	@echo $(call find,13 12 11,$(PYENV))

clean: ## remove .venv, .venv-modern, .venv-compat, .venv-docs, .venv-suites and what tools cached
	rm -rf $(VENV) .venv-modern $(COMPAT_VENV) $(DOCS_VENV) $(SUITES_VENV) build docs/_generated docs/reference/api *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# uv takes a tenth of pip's time; where it is not on the path, pip puts it into the environment first.
UV_INTO = uv=$$(uv --version >/dev/null 2>&1 && echo uv || echo $(1)/uv); \
	"$$uv" --version >/dev/null 2>&1 || $(1)/python -m pip install -q --disable-pip-version-check uv || exit 1; \
	"$$uv" pip install -q --python $(1)/python

# The exact versions that are tested.
install = $(call UV_INTO,$(1)) -e '.[$(2)]' -c constraints/$$($(1)/python -c \
	'import sys; print("py310" if sys.version_info[:2] == (3, 10) else "modern")').txt

LEFT_OUT = $(BIN)/python -c 'import sys; v = sys.version_info[1]; v > 10 and \
	print(f"rlframe: on Python 3.{v} Launchpad and Reverb are left out, which need 3.10" + "; dm_control too (3.12)" * (v > 12))'

$(CORE): setup.py constraints/py310.txt constraints/modern.txt
	@test -n "$(PYTHON)" || { printf '%s\n' \
	  'rlframe: no Python 3.10 was found (with which there are Launchpad and Reverb), and none from 3.11 to 3.13.' \
	  '  Install one:  pyenv install 3.10   or   uv python install 3.10   or   apt install python3.10-venv' \
	  '  or name it:   make $(MAKECMDGOALS) PYTHON=/path/to/python3.10' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo 'rlframe: PYTHON=$(PYTHON) does not start, or is not Python 3.10 to 3.13.' >&2; exit 1; }
	@echo "Setting up $(VENV): the core (half a minute, 1.2 GB)."
	@"$(PYTHON)" -m venv $(VENV)
	@$(call install,$(BIN),gymnasium)
	@touch $@

$(ALL): $(CORE)
	@echo "Setting up $(VENV): every extra, the tests and the linters (half a minute, 2.2 GB more)."
	@$(call install,$(BIN),all)
	@touch $@

# Its tokenizers are used as transformers 4 had them. No model runs, so PyTorch is not needed.
$(COMPAT):
	@test -n "$(PYTHON)" || { echo 'rlframe: no Python 3.10 to 3.13 was found; name one with PYTHON=.' >&2; exit 1; }
	@echo "Setting up $(COMPAT_VENV): atroposlib 0.4.0 and what it needs (half a minute, 0.9 GB)."
	@"$(PYTHON)" -m venv $(COMPAT_VENV)
	@$(call UV_INTO,$(COMPAT_VENV)/bin) atroposlib==0.4.0 'transformers<5'
	@touch $@

# Pythons of the suites that are here: py310, modern or both. The two words are also parts of files in constraints/.
SUITE_PYTHONS = $(if $(call find,10),py310) $(if $(call find,13 12 11,$(PYENV)),modern)

$(SUITES_VENV)/%/.rlframe: setup.py constraints/%.txt
	@echo "Setting up $(@D): the core, one suite and pytest (half a minute, 1.4 GB)."
	@"$(if $(findstring py310,$*),$(call find,10),$(call find,13 12 11,$(PYENV)))" -m venv --clear $(@D)
	@$(call UV_INTO,$(@D)/bin) -e '.[$(firstword $(subst -, ,$*))]' pytest pytest-timeout -c constraints/$*.txt
	@touch $@

$(DOCS): setup.py constraints/py310.txt constraints/modern.txt
	@echo "Setting up $(DOCS_VENV), which builds the documentation (1.4 GB)."
	@"$(DOCS_PYTHON)" -m venv $(DOCS_VENV)
	@$(call install,$(DOCS_VENV)/bin,docs)
	@touch $@

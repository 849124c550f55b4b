# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
#
# make quickstart   watch a policy learn, on this machine, in a few minutes
# make rs           the same with rejection sampling against a served reward model
# make dpo          the same from pairs of reviews alone, without a reward model
# make kto          the same from single reviews with a thumb up or down
# make spin         the same from the kinder reviews alone, against the policy's own
# make distill      a small student learns from a kind teacher's logits
# make teacher      PPO of a small student with a teacher's log-probs as advantages, beside SFT
# make arithmetic   PPO on two-digit sums, rewarded by a Python function
# make guessing     PPO on a game of several turns, played with a Python class
# make test-fast    unit tests of the mathematics, the configuration and the trainers
# make test         every promise once (tests/promises.md), without a GPU
# make test-full    all tests but those of make chaos: every split, servers with and without Triton, the long jobs
# make chaos        faults in the phases of a job, and what came of them; CHAOS=all: every fault in every phase
# make bench        benchmarks against Hugging Face and TRL (25 to 28 minutes); writes benchmarks/results/*.json
#                   and the tables of benchmarks/figures.md
# make mutants      plant faults in copies of the code, one by one, and see a test fail for each
# make golden       run three steps of every job, show which numbers of tests/golden have changed, and
#                   store them there; make test compares
# make test-gpu     the tests that need a GPU
# make gpu-check    a GPU's numbers, speed, profile and memory, in at most eight minutes
# make lint         ruff (check and format) and mypy
# make docs         build the documentation into site/, without a warning
# make test-versions PYTHONS="python3.10 python3.12"
#                   on each Python: all tests, the exchange of checkpoints with .venv, the quickstart
# make lock         write requirements/*.lock anew after a change of setup.py
# make upgrade      the same with the newest versions that setup.py allows; says what changed, and
#                   runs the tests with them
# make clean        remove what the targets made (.venv too)
#
# Each target makes .venv and installs into it first, and again only when setup.py or the locks
# change.
# Variables:
#   PYTHON     interpreter for the virtual environment, 3.10 to 3.12
#   VENV       folder of the virtual environment (.venv)
#   LOCKED     yes: the exact versions of requirements/*.lock, by their hashes; no: what setup.py
#              allows, for example where an index lacks one of them (run make clean between the two)
#   TORCH      the torch requirement. A plain package index serves Linux the CUDA build (several GB,
#              runs on a CPU too); to save the download, name a CPU build your index has
#              (TORCH="torch==2.13.0+cpu") or a wheel file.
#   PIP_FLAGS  more options for pip, such as an index of your own
#   WORKERS    files of tests that run at the same time (3)
#   ARGS       more arguments for a walk-through, for example ARGS="--seed 1", for pytest, for example
#              ARGS="-k gae", or for the benchmarks, for example ARGS="--only generate"

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
ARGS ?=
WORKERS ?= 3
VENV ?= .venv
LOCKED ?= yes
PYTHONS ?= python3.10 python3.11 python3.12
RUN := $(VENV)/bin/python
LOCKS := $(wildcard requirements/*.lock)
, := ,

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help install quickstart rs dpo kto spin distill teacher arithmetic guessing test-fast test test-full chaos golden test-gpu gpu-check bench \
  mutants lint format docs test-versions lock upgrade clean
.DELETE_ON_ERROR:

help:
	@sed -n '4,/^$$/s/^# \{0,1\}//p' Makefile

$(RUN):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no '$(PYTHON)' on this machine; install Python 3.10, 3.11 or 3.12, or name one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else \
	  "error: $(PYTHON) is Python %d.%d; this package needs 3.10, 3.11 or 3.12 (PyTriton asks for numpy 1, which 3.13 and later lack). Name one: make PYTHON=python3.11 ..." % v)'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and by exact version: otherwise the resolver may pick another build of it.
# $(call INSTALL,name of the lock after the Python,extras)
define INSTALL
	lock=requirements/$$($(RUN) -c 'import sys; print("py%d%d" % sys.version_info[:2])')$(1).lock; \
	if [ "$(LOCKED)" = no ]; then $(RUN) -m pip install --quiet $(PIP_FLAGS) --editable '.$(2)'; \
	else $(RUN) -m pip install --quiet $(PIP_FLAGS) --no-deps --require-hashes --requirement $$lock \
	  && $(RUN) -m pip install --quiet --no-deps --no-build-isolation --no-index --editable . ; fi
endef

$(VENV)/.installed: setup.py $(LOCKS) | $(RUN)
	@echo "Installing into $(VENV); the first time takes a few minutes."
	$(RUN) -m pip install --quiet $(PIP_FLAGS) '$(TORCH)'
	$(call INSTALL)
	@touch $@

# The libraries to compare with go without their requirements into a folder of their own: tests/oracles.txt says why.
$(VENV)/.installed-test: $(VENV)/.installed tests/oracles.txt
	$(call INSTALL,-dev,[test$(,)dev$(,)docs])
	rm -rf $(VENV)/oracles
	$(RUN) -m pip install --quiet $(PIP_FLAGS) --no-deps --target $(VENV)/oracles --requirement tests/oracles.txt
	@touch $@

install: $(VENV)/.installed

quickstart: install
	$(RUN) examples/quickstart/run.py $(ARGS)

rs: install
	$(RUN) examples/quickstart/run_rs.py $(ARGS)

kto: install
	$(RUN) examples/quickstart/run_kto.py $(ARGS)

spin: install
	$(RUN) examples/quickstart/run_spin.py $(ARGS)

dpo: install
	$(RUN) examples/quickstart/run_dpo.py $(ARGS)

distill: install
	$(RUN) examples/quickstart/run_distill.py $(ARGS)

teacher: install
	$(RUN) examples/quickstart/run_teacher.py $(ARGS)

arithmetic: install
	$(RUN) examples/quickstart/run_arithmetic.py $(ARGS)

guessing: install
	$(RUN) examples/quickstart/run_guessing.py $(ARGS)

# Long files first (tests/conftest.py). Three workers for two cores: many tests wait for processes.
BY_FILE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ALL_TESTS := tests/golden tests/functional tests/chaos tests/distributed tests/unit

test-fast: $(VENV)/.installed-test
	$(RUN) -m pytest $(BY_FILE) -m "not slow and not full" tests/unit $(ARGS)

test: $(VENV)/.installed-test
	$(RUN) -m pytest $(BY_FILE) -m "not full and not chaos" $(ALL_TESTS) $(ARGS)

test-full: $(VENV)/.installed-peers
	$(RUN) -m pytest -p tests.durations $(BY_FILE) -m "not chaos" $(ALL_TESTS) $(ARGS)

# With CHAOS_REPORT=FILE the figures for scripts/fault_table.py go to FILE.
chaos: $(VENV)/.installed-test
	$(RUN) -m pytest -n 2 tests/chaos $(ARGS)

# TRL goes without its requirements into a folder of its own: most tests compare with another
# release of it.
$(VENV)/.installed-peers: $(VENV)/.installed-test benchmarks/peers.txt
	rm -rf $(VENV)/peers
	$(RUN) -m pip install --quiet $(PIP_FLAGS) --no-deps --target $(VENV)/peers --requirement benchmarks/peers.txt
	@touch $@

bench: $(VENV)/.installed-peers
	$(RUN) benchmarks/run.py --page $(ARGS)

golden: $(VENV)/.installed-test
	$(RUN) -m tests.golden $(ARGS)

mutants: $(VENV)/.installed-test
	$(RUN) -m tests.mutants $(ARGS)

# Environments .venv-<name of the interpreter>. All Pythons are tried, also after a failure.
test-versions: $(VENV)/.installed-test
	@failed=; for python in $(PYTHONS); do echo "== $$python"; \
	  OTHER_PYTHON=$(CURDIR)/$(RUN) $(MAKE) PYTHON=$$python VENV=.venv-$${python##*/} \
	    test quickstart || failed="$$failed $$python"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; else echo "passed: $(PYTHONS)"; fi

lock: $(VENV)/.installed-test
	$(RUN) scripts/locks.py $(ARGS)

upgrade: $(VENV)/.installed-test
	$(RUN) scripts/locks.py --upgrade
	$(MAKE) test

test-gpu: $(VENV)/.installed-test
	$(RUN) -m pytest tests/gpu $(ARGS)

gpu-check: $(VENV)/.installed-test
	$(RUN) benchmarks/gpu_check.py $(ARGS)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The sources are read, not imported. The variable silences an advertisement of the theme.
docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)

clean:
	rm -rf $(VENV) .venv-* site build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

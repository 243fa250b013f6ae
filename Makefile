# Two commands are enough: `make run` and `make test`. Each sets up what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread a worker: the same numbers however many workers there are (see README).
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help run test test-slow faults benchmark scaling overhead reproduce lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed ## train MAML on two workers; options in ARGS="dataset=omniglot seed=1"
	$(BIN)/torchrun --standalone --nproc_per_node=2 experiments/maml.py +partition=dim0 $(ARGS)

test: $(VENV)/.installed-test ## run the tests, all but the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-slow ## run the slow tests, and those of the extras, which it installs
	$(BIN)/python -m pytest -m slow $(ARGS)

faults: $(VENV)/.installed ## kill, freeze and cut off real runs; parts in ARGS="kills endings"
	$(BIN)/python experiments/faults $(ARGS)

benchmark: $(VENV)/.installed ## metadist and its rivals on the same tasks, in turn; ARGS="--rounds 5"
	$(BIN)/python experiments/benchmark.py $(ARGS)

scaling: $(VENV)/.installed ## steps against workers, tasks, parameters; a model of 8 to 1,024 workers
	$(BIN)/python experiments/scaling.py $(ARGS)

overhead: $(VENV)/.installed ## what the framework itself costs; parts in ARGS="latency start"
	$(BIN)/python experiments/overhead.py $(ARGS)

reproduce: $(VENV)/.installed ## the papers' tables; ARGS="maml_sinusoid --seeds 3 --fraction 0.03"
	$(BIN)/python experiments/reproduce.py $(ARGS)

lint: $(VENV)/.installed-dev ## check style and imports
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## mend style and imports
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean: ## remove the virtual environment and caches, never results
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "metadist needs Python 3.10 or newer: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing metadist and PyTorch into $(VENV), once: some 5 GB, a few minutes"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.installed-slow: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test,sweeps,ray,peers]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

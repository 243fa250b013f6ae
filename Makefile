# `make run` and `make test` are enough to start: each target installs what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per worker: results do not depend on the number of workers (see docs/strategies.md).
export OMP_NUM_THREADS ?= 1
# Without files of bytecode, each of the tests' processes would compile the modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-slow faults fuzz benchmark scaling overhead gpu reproduce docs lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed ## train MAML on two workers; ARGS="dataset=omniglot seed=1"
	$(BIN)/torchrun --standalone --nproc_per_node=2 experiments/maml.py +partition=dim0 $(ARGS)

# Tests wait for the processes that they start: four at a time keep two cores busy.
test: $(VENV)/.installed-test ## run the tests except the slow ones; ARGS="tests/training -x"
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-slow ## install the optional dependencies and run the slow tests
	$(BIN)/python -m pytest -m slow $(ARGS)

faults: $(VENV)/.installed ## kill, freeze and disconnect real runs; ARGS="kills endings"
	PYTHONPATH=tests $(BIN)/python -m faults $(ARGS)

fuzz: $(VENV)/.installed ## run invalid configurations and corrupted files; ARGS="--seed 1"
	PYTHONPATH=tests $(BIN)/python -m fuzzing $(ARGS)

benchmark: $(VENV)/.installed ## compare training speed with baselines; ARGS="--rounds 5"
	$(BIN)/python experiments/benchmark.py baselines $(ARGS)

scaling: $(VENV)/.installed ## step time by workers, tasks, parameters; cost model up to 1,024 workers
	$(BIN)/python experiments/benchmark.py scaling $(ARGS)

overhead: $(VENV)/.installed ## cost of the framework itself; ARGS="latency startup"
	$(BIN)/python experiments/benchmark.py overhead $(ARGS)

gpu: $(VENV)/.installed ## correctness and speed on a CUDA device, in at most ten minutes; ARGS="--minutes 5"
	$(BIN)/python experiments/benchmark.py gpu $(ARGS)

reproduce: $(VENV)/.installed ## published results; ARGS="maml_sinusoid --seeds 3 --fraction 0.03", or ARGS=--quick
	$(BIN)/python experiments/reproduce.py $(ARGS)

docs: $(VENV)/.installed-docs ## build the documentation into site/; warnings are errors
	$(BIN)/mkdocs build --strict $(ARGS)

lint: $(VENV)/.installed-dev ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy metadist

format: $(VENV)/.installed-dev ## fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and caches, never results
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "metadist needs Python 3.10 or newer: make $(MAKECMDGOALS) PYTHON=python3.13"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing metadist and PyTorch into $(VENV), once: about 5 GB, a few minutes"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.installed-slow: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test,sweeps,ray,timm,mlflow,baselines,docs]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

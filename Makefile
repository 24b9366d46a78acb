# `make plan` and `make test` are all the set-up there is: each makes .venv if needed and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TITAN03 := .venv-titan03
FRAMEWORKS := .venv-frameworks

.PHONY: plan test test-long test-fast test-mutation contexts test-matrix test-titan03 test-frameworks coverage smoke lint types docs clean

# torch first, and bounded: asked for through another package, pip would take the newest build with CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=23"
	$(BIN)/pip install --quiet "torch==2.13.0"
	$(BIN)/pip install --quiet -e ".[dev,docs,pictures]" "torchtitan==0.2.2"
	touch $@

# TorchTitan 0.3 cannot be installed beside 0.2: an environment of its own.
$(TITAN03)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TITAN03)
	$(TITAN03)/bin/pip install --quiet --upgrade "pip>=23"
	$(TITAN03)/bin/pip install --quiet --no-compile "torch==2.13.0"
	$(TITAN03)/bin/pip install --quiet --no-compile -e . "torch==2.13.0" "torchtitan==0.3.0" pytest pytest-xdist
	touch $@

# Trainers that `autosac run` is tested with; two gigabytes more.
$(FRAMEWORKS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --upgrade "pip>=23"
	$(FRAMEWORKS)/bin/pip install --quiet --no-compile "torch==2.13.0"
	$(FRAMEWORKS)/bin/pip install --quiet --no-compile -e ".[dev,scripts]" "torchtitan==0.2.2"
	$(FRAMEWORKS)/bin/pip install --quiet --no-compile --no-deps megatron-core einops
	touch $@

plan: $(STAMP)
	$(BIN)/autosac plan examples/llama3_8b.toml --gpu h100-sxm-80gb --world-size 8 --budget 68GiB -o plan.json

# Compiled modules are kept, whatever the environment says: tests start many processes that import the same ones.
test test-long test-fast test-titan03 test-frameworks: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not long" tests

# Whole jobs, planned, searched and trained: half an hour.
test-long: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m long tests

# What needs neither a capture nor seconds: the loop while editing.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 -q -m "not slow and not capture and not long" tests

# Hours; MUTANTS=40 takes less. Stopped and started again, it goes on.
MUTANTS ?= 150
SEED ?= 0
JOBS ?= 2
test-mutation: $(STAMP)
	nice -n 10 $(BIN)/python -m benchmarks.mutation --mutants $(MUTANTS) --seed $(SEED) --jobs $(JOBS) \
		$(if $(COVERED),--covered $(COVERED))

# Which test runs which line, for test-mutation COVERED=build/contexts. Takes twice as long as the tests alone.
contexts: $(STAMP)
	rm -rf build/contexts && mkdir -p build/contexts
	COVERAGE_FILE=build/contexts/lines $(BIN)/python -m pytest -n 2 -q -p benchmarks.mutation.contexts \
		--cov --cov-context=test --cov-report= tests

test-titan03: $(TITAN03)/.installed
	$(TITAN03)/bin/python -m pytest -n 2 --dist loadfile tests/titan03

# Hugging Face, Lightning, DeepSpeed, diffusers, Megatron-Core: their scripts and callbacks.
test-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest -n 2 tests/scripts/test_frameworks.py tests/integrations/test_hf.py \
		tests/integrations/test_lightning.py tests/integrations/test_accelerate.py

# Hours, and 6 GB of disk at a time; MATRIX="2.15 0.3" takes the rows with these words.
MATRIX ?=
test-matrix: $(STAMP)
	$(BIN)/python -m benchmarks.matrix --only "$(MATRIX)"

# Which lines the tests run. Takes half as long again as the tests alone.
coverage: $(STAMP)
	$(BIN)/python -m pytest -n 2 -q --cov --cov-report=term:skip-covered tests

# The wheel, in an environment of its own and an empty folder.
smoke: $(STAMP)
	PYTHON=$(BIN)/python .ci/smoke

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: $(STAMP)
	$(BIN)/mypy

# Into build/docs; a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

clean:
	rm -rf $(VENV) $(TITAN03) $(FRAMEWORKS) build dist docs/_generated *.egg-info plan.json

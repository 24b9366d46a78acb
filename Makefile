# `make plan` and `make test` are all the set-up there is: each makes .venv if needed and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: plan test lint types clean

# torch first, and bounded: asked for through another package, pip would take the newest build with CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=23"
	$(BIN)/pip install --quiet "torch==2.13.0"
	$(BIN)/pip install --quiet -e ".[dev,pictures]"
	touch $@

plan: $(STAMP)
	$(BIN)/autosac plan examples/llama3_8b.toml --gpu h100-sxm-80gb --world-size 8 --budget 68GiB -o plan.json

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 tests

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info plan.json

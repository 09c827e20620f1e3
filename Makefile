# make demo, make test: each sets up all that it needs. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test lint format bench clean

help:            ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)   ## train a fixed-vector model and an attention model for a minute each, and compare them
	rm -rf demo
	$(BIN)/weft compare dates-fixed dates --budget 60s --out demo

test: $(READY)   ## run all tests
	$(BIN)/python -m pytest --numprocesses 2

lint: $(READY)   ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## lay the code out
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)  ## measure weft beside its peers; see bench/README.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python bench/trainer.py
	$(BIN)/python bench/loader.py
	$(BIN)/python bench/predict.py

clean:           ## remove what the other targets made
	rm -rf $(VENV) demo runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

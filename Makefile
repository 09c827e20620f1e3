# make demo, make test: each sets up all that it needs. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PINNED := $(PIP) --no-compile --constraint constraints.txt --editable
READY  := $(VENV)/.ready
DEV    := $(VENV)/.dev

.PHONY: help demo test browser isa peers ray lint format bench models clean

help:            ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# What weft itself needs; and, in the same .venv, what its tests need. Most modules are never imported, so they are compiled
# when they first are, and not by pip, which takes as long for that as for all else: the result must be kept then.
unexport PYTHONDONTWRITEBYTECODE

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with PyTorch and what else weft needs: about a minute, and 350 MB where nothing is cached"
	@$(PYTHON) -m venv $(VENV)
	@$(PINNED) .
	@touch $@

$(DEV): $(READY)
	@echo "Adding what the tests and checks need to $(VENV): about a minute"
	@$(PINNED) '.[dev]'
	@$(PIP) --no-deps axe-playwright-python==0.1.8  # for its copy of axe-core: Playwright is not needed
	@touch $@

demo: $(READY)   ## train a fixed-vector model and an attention model for 1,000 steps each, and compare them
	@echo "Training two models, 1,000 steps each: about a minute each. The result is the same on a faster or slower machine."
	@rm -rf demo
	$(BIN)/weft compare dates-fixed dates --budget 1000 --out demo
	@echo "Open demo/report.html in a browser: it needs no network"

test: $(DEV) browser  ## run all tests, the numeric ones also as older CPUs compute
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal
	@$(MAKE) --no-print-directory isa

# Instruction sets held down, for each library that chooses among them; numba would add what the machine has to its CPU's name.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 NUMBA_CPU_NAME=haswell \
	NUMBA_CPU_FEATURES=+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+popcnt,+movbe
SSE4 := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 NUMBA_CPU_NAME=x86-64-v2 \
	NUMBA_CPU_FEATURES=+ssse3,+sse4.1,+sse4.2

# Of the files that have such tests alone: to import all others takes as long as the tests.
NUMERIC = $$(grep -rl --include='test_*.py' 'mark\.isa' tests)

isa: $(DEV)      ## run the numeric tests as older CPUs compute: with AVX2 alone, and with SSE4
ifeq ($(shell uname -m),x86_64)
	env $(AVX2) $(BIN)/python -m pytest --numprocesses 2 -m isa $(NUMERIC)
	env $(SSE4) $(BIN)/python -m pytest --numprocesses 2 -m isa $(NUMERIC)
endif

# Pages are tested in Debian's Chromium. Where we may, it is installed (tried once, and soon given up with no network);
# where it is not there, those tests are skipped.
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=0 -o Acquire::http::Timeout=5 \
	-o Acquire::https::Timeout=5 -o APT::Update::Error-Mode=any -o DPkg::Lock::Timeout=10
WANTED := install --no-install-recommends chromium fonts-dejavu-core

browser: $(DEV)
	@if ! command -v chromium && test ! -e $(VENV)/.browser && test "$$(id -u)" = 0 && command -v apt-get; then \
		touch $(VENV)/.browser; \
		timeout 60 env $(APT) update && timeout 300 env $(APT) --download-only $(WANTED) && env $(APT) $(WANTED); \
	fi >/dev/null 2>&1 || true
	@command -v chromium >/dev/null || echo "chromium is not installed: the tests in a browser are skipped"

lint: $(DEV)   ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(DEV) ## lay the code out
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

peers: $(DEV)  ## compare with KenLM's module, and with lmplz where that is on the PATH (or LMPLZ says where it is)
	$(PIP) --no-deps kenlm==0.3.0
	$(BIN)/python -m pytest -m peers

ray: $(DEV)    ## test the work on a Ray cluster, two workers on this machine: Ray is not installed for the other tests
	$(PINNED) '.[dev,ray]'
	$(BIN)/python -m pytest tests/test_ray_engine.py

bench: $(DEV)  ## measure weft beside its peers; see bench/README.md
	$(PINNED) '.[bench]'
	$(BIN)/python bench/trainer.py
	$(BIN)/python bench/loader.py
	$(BIN)/python bench/prepare.py
	$(BIN)/python bench/predict.py
	$(BIN)/python bench/cells.py
	$(PIP) --no-deps --target .cache/joeynmt joeynmt==2.3.0
	$(BIN)/python bench/attention.py --order own
	$(BIN)/python bench/layers.py
	$(BIN)/python bench/translate.py
	$(PIP) --no-deps --target .cache/encoders sentence-transformers==6.2.0
	$(BIN)/python bench/encode.py

# TEXTS: a folder of plain texts; PAIRS: Tatoeba's fra.txt; see bench/models.py. It takes an hour of a GPU.
models: $(READY) ## train the models that ship with weft again (TEXTS=folder PAIRS=file)
	$(BIN)/python bench/models.py text $(TEXTS) $(PAIRS)
	$(BIN)/python bench/models.py train
	$(BIN)/python bench/models.py pack

clean:           ## remove what the other targets made
	rm -rf $(VENV) demo runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

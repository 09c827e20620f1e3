# make demo, make test: each sets up all that it needs. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test browser isa peers lint format bench clean

help:            ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)   ## train a fixed-vector model and an attention model for a minute each, and compare them
	rm -rf demo
	$(BIN)/weft compare dates-fixed dates --budget 60s --out demo

test: $(READY) browser  ## run all tests, and those of numbers again as lesser CPUs compute them
	$(BIN)/python -m pytest --numprocesses 2
	$(foreach set,$(HELD_DOWN),env $($(set)) $(BIN)/python -m pytest --numprocesses 2 -m isa &&) true

# Instruction sets held down, for each library that chooses among them; numba would add what the machine has to its CPU's name.
ifeq ($(shell uname -m),x86_64)
HELD_DOWN := AVX2 SSE
endif
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 NUMBA_CPU_NAME=haswell \
	NUMBA_CPU_FEATURES=+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+popcnt,+movbe
SSE := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 NUMBA_CPU_NAME=x86-64-v2 \
	NUMBA_CPU_FEATURES=+ssse3,+sse4.1,+sse4.2

# Pages are tested in Debian's Chromium. Where we may, it is installed (tried once, and soon given up with no network);
# where it is not there, those tests are skipped.
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=0 -o Acquire::http::Timeout=5 \
	-o Acquire::https::Timeout=5 -o APT::Update::Error-Mode=any -o DPkg::Lock::Timeout=10
WANTED := install --no-install-recommends chromium fonts-dejavu-core

browser: $(READY)
	@if ! command -v chromium && test ! -e $(VENV)/.browser && test "$$(id -u)" = 0 && command -v apt-get; then \
		touch $(VENV)/.browser; \
		timeout 60 env $(APT) update && timeout 300 env $(APT) --download-only $(WANTED) && env $(APT) $(WANTED); \
	fi >/dev/null 2>&1 || true
	@command -v chromium >/dev/null || echo "chromium is not installed: the tests in a browser are skipped"

# The settings of a CPU with AVX2 alone, and of one with SSE4: each library has its own.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 NUMBA_CPU_NAME=haswell \
	NUMBA_CPU_FEATURES=+ssse3,+avx,+avx2,+fma,+sse4.2,+bmi,+bmi2,+f16c,+lzcnt,+popcnt,+movbe
SSE4 := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 NUMBA_CPU_NAME=nehalem \
	NUMBA_CPU_FEATURES=+ssse3,+sse4.2,+popcnt

isa: $(READY)    ## run the numeric tests as older CPUs would
	$(AVX2) $(BIN)/python -m pytest -m isa
	$(SSE4) $(BIN)/python -m pytest -m isa

lint: $(READY)   ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## lay the code out
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

peers: $(READY)  ## compare with KenLM's module, and with lmplz where that is on the PATH (or LMPLZ says where it is)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps kenlm==0.3.0
	$(BIN)/python -m pytest -m peers

bench: $(READY)  ## measure weft beside its peers; see bench/README.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python bench/trainer.py
	$(BIN)/python bench/loader.py
	$(BIN)/python bench/prepare.py
	$(BIN)/python bench/predict.py
	$(BIN)/python bench/cells.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/joeynmt joeynmt==2.3.0
	$(BIN)/python bench/attention.py --order own
	$(BIN)/python bench/layers.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/ctranslate2 ctranslate2==4.8.4
	$(BIN)/python bench/translate.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/encoders \
		sentence-transformers==6.2.0 onnxruntime==1.31.1 onnx==1.23.2 flatbuffers==25.12.19 ml_dtypes==0.6.0
	$(BIN)/python bench/encode.py

clean:           ## remove what the other targets made
	rm -rf $(VENV) demo runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

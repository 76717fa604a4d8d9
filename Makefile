# `make demo` and `make test` set everything up themselves; with `make PYTHON=python3.12 …` another interpreter.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# The package takes a range of torch. Without a GPU the development environment pins the small CPU build.
TORCH ?= $(if $(shell command -v nvidia-smi),torch>=2.6,torch==2.13.0)

DEMO_GRID ?= tests/data/demo_grid_h200.json.gz
DEMO_DIR  := build/demo
DEMO      := b=32 h=32 s=1024 d=64 causal

.PHONY: setup demo test verify-all compile-all test-peers lint clean calibrate
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The main job without a GPU: search over times recorded on an H200, explain a winner, compile it for the H200 and
# verify it in the emulator.
demo: export FA4GEN_CACHE_DIR := $(CURDIR)/$(DEMO_DIR)/cache
demo: setup
	rm -rf $(DEMO_DIR)
	$(BIN)/fa4gen tune --preset demo --measure replay --grid $(DEMO_GRID) --out $(DEMO_DIR)/tuned.json
	$(BIN)/fa4gen show '$(DEMO)' --device h200 --table $(DEMO_DIR)/tuned.json
	$(BIN)/fa4gen compile '$(DEMO)' --device h200 --table $(DEMO_DIR)/tuned.json
	$(BIN)/fa4gen verify '$(DEMO)' --emulate --device h200 --table $(DEMO_DIR)/tuned.json

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal

# An extra: all sampled variants of every family in the emulator; `make test` runs a few of each.
verify-all: setup
	$(BIN)/python -m pytest -n auto --dist worksteal --whole-sample tests/emulated/test_sampled.py tests/emulated/test_hardware.py

# An extra, some 25 minutes over the number of cores: 500 sampled variants of flash_fwd_sm100 compile as they promise.
compile-all: setup
	PYTHONPATH=tests/compile:tests/emulated $(BIN)/python tests/compile/survey_sm100.py

# An extra: kernels that nobody here wrote, compiled and run in the emulator.
test-peers: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/peers \
		'flash-attn-4==4.0.0b36' quack-kernels einops triton
	PYTHONPATH=build/peers $(BIN)/python -m pytest tests/emulated/peers

# Fits the timing model to the recorded grid (docs/model.md): compiles and traces 624 variants, a core-hour.
calibrate: setup
	$(BIN)/python scripts/calibrate_model.py --fit 'b=32 h=32 s=1024 d=64' 'b=4 h=32 s=8192 d=64'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache

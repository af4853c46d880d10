# Every target does its own set-up; only Python 3.11+ and make are needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-laws lint bench clean

demo: $(READY)
	$(BIN)/headgate demo

test: $(READY) lint
	$(BIN)/pytest -n 2

test-laws: $(READY)
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -n 2 tests/laws tests/differential

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(READY)
	$(BIN)/python -m benchmarks

$(READY): pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Every target makes its own virtual environment when there is none; PYTHON picks the interpreter (3.11 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Two test processes fit two cores and 8 GB of memory; more cores may take more. A file's tests share what they
# compile, and so a process.
WORKERS ?= 2

.PHONY: demo test test-all lint clean

demo: $(VENV)/.run-stamp
	$(BIN)/eaglejax demo

test: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-all: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m ""

lint: $(VENV)/.dev-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	touch $@

# The tests compare with PyTorch and transformers; running a model needs no PyTorch.
$(VENV)/.dev-stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[test,lint]'
	touch $@ $(VENV)/.run-stamp

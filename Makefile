PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-families test-models check bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group test --group check
	touch $@

demo: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

FAMILIES := tests/test_models.py tests/test_mtp.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix --ignore=,$(FAMILIES))

test-families: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal $(FAMILIES)

$(VENV)/vision: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $@ --group vision
	touch $@

test-models: $(VENV)/.installed $(VENV)/vision
	PYTHONPATH="$(CURDIR)/$(VENV)/vision" $(BIN)/python tests/matrix.py

check: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV)

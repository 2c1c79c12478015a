# One virtual environment serves everything; it is made anew when requirements.txt changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup train test test-slow clean

setup: $(VENV)/installed

$(VENV)/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

train: setup
	$(BIN)/python train.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) runs

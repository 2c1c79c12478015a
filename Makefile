# One virtual environment serves everything; it is made anew when requirements.txt changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup train docs test test-docs test-buckets test-loggers test-optuna test-serve test-slow fuzz chaos compile \
	scaling clean

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
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m slow

# The home page, pictures, and code with tables.
CHECKED_PAGES := site/index.html site/gallery.html site/reference/api.html

# The tests of the loggers with their real packages, which `test` skips.
test-loggers: .venv-loggers/installed
	.venv-loggers/bin/python -m pytest tests/training/test_loggers.py

# The tests of searches with Optuna, which `test` skips.
test-optuna: .venv-optuna/installed
	.venv-optuna/bin/python -m pytest tests/comparison/test_tune_optuna.py

# The tests of the web server with its real packages, which `test` skips.
test-serve: .venv-serve/installed
	.venv-serve/bin/python -m pytest tests/training/test_serve.py

# Damaged files of all kinds, made by Hypothesis: is each read right, or refused in one line? See tests/fuzz.py.
fuzz: .venv-fuzz/installed
	.venv-fuzz/bin/python -m tests.fuzz

# Runs on s3:// with a server of moto, which `test` skips. One of them is killed ten times.
test-buckets: .venv-buckets/installed
	.venv-buckets/bin/python -m pytest tests/training/test_buckets.py

# What `test` leaves out of the documentation: the site is built, notebooks run, and Chromium checks pages.
test-docs: docs .venv-notebooks/installed
	.venv-notebooks/bin/python -m tests.notebooks
	rm -rf runs/test-docs
	.venv-notebooks/bin/python -m hbf train --config=digits --config.train.epochs=4 --workdir=runs/test-docs
	.venv-notebooks/bin/python -m hbf explain --workdir=runs/test-docs
	.venv-notebooks/bin/python -m tests.accessibility runs/test-docs/explain.html $(CHECKED_PAGES)

# The site of docs/, in site/.
docs: .venv-docs/installed
	.venv-docs/bin/mkdocs build --quiet

# Kills runs, damages their checkpoints and fills their disks: is anything lost?
chaos: setup
	$(BIN)/python -m benchmarks.chaos

# The compilers of hardware that isn't here are large, and each has an environment of its own.
.venv-%/installed: requirements-%.txt requirements.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

compile: .venv-tpu/installed .venv-gpu/installed
	.venv-tpu/bin/python -m benchmarks.hardware --platform=tpu
	.venv-gpu/bin/python -m benchmarks.hardware --platform=cuda

scaling: .venv-tpu/installed .venv-gpu/installed
	.venv-tpu/bin/python -m benchmarks.scaling --platform=tpu
	.venv-gpu/bin/python -m benchmarks.scaling --platform=cuda

clean:
	rm -rf $(VENV) .venv-tpu .venv-gpu .venv-docs .venv-notebooks .venv-loggers .venv-optuna .venv-serve .venv-fuzz
	rm -rf .venv-buckets site runs

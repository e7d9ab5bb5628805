# A virtual environment is made on first use; PYTHON chooses its interpreter (3.10 to 3.12).
PYTHON ?= python3
VENV ?= .venv
DEMO ?= demo
BIN := $(VENV)/bin
READY := $(VENV)/ready

# The oldest MindSpore that is supported, in an environment of its own.
OLDEST_VENV ?= .venv-oldest
OLDEST_READY := $(OLDEST_VENV)/ready
OLDEST_MINDSPORE := mindspore==2.7.0

.PHONY: help install lint test test-all test-oldest demo clean

help:
	@echo "make install   virtual environment in $(VENV) with everything"
	@echo "make demo      the whole job on real data: build, tune, train"
	@echo "make test      the test suite"
	@echo "make test-all  the same with the slow tests"
	@echo "make test-oldest  the suite with the oldest supported MindSpore, in $(OLDEST_VENV)"
	@echo "make lint      style and types"
	@echo "make clean     remove what these made"

install: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c "import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 12); \
	sys.exit(0 if ok else 'Python 3.10 to 3.12 is needed, this is %d.%d; give another with: make PYTHON=python3.11' % sys.version_info[:2])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m ""

$(OLDEST_READY): pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --editable ".[dev]" "$(OLDEST_MINDSPORE)"
	@touch $@

test-oldest: $(OLDEST_READY)
	$(OLDEST_VENV)/bin/python -m pytest -n 2 --dist loadfile

demo: $(READY)
	rm -rf $(DEMO)
	$(BIN)/varseq-data demo --out $(DEMO)
	$(BIN)/varseq-data inspect $(DEMO)/data.mindrecord --out $(DEMO)/results
	$(BIN)/varseq-tune --data $(DEMO)/data.mindrecord --space cpu --trials 5 --confirm 1 \
		--out $(DEMO)/results
	$(BIN)/varseq-train --config $(DEMO)/results/best.yaml \
		--set train.out=$(DEMO)/train --set train.max_steps=40

clean:
	rm -rf $(VENV) $(OLDEST_VENV) $(DEMO) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Everything sets itself up: needs Python 3.11+, make and a C++ compiler.
#   make demo     measure the embedded pair, print the winning llama-server command
#   make test     format, lint, types and all tests, those with the real llama.cpp included
#   make check    the same without the tests that need llama.cpp: seconds
#   make engine   llama.cpp with its tools, compiled into .venv (about four minutes, once)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check style engine setup docs clean

demo: engine
	$(BIN)/browndwarf demo $(ARGS)

test: style engine
	$(BIN)/python -m pytest

check: setup style
	$(BIN)/python -m pytest -m "not engine and not slow"

style: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

engine: setup
	@$(BIN)/browndwarf engine install --quiet

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "browndwarf needs Python 3.11 or newer; set PYTHON=python3.12 or so"; exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

docs: setup
	$(BIN)/python -m browndwarf.cli.reference > docs/commands.md

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint types clean

demo: .venv/installed
	$(BIN)/python examples/demo.py

test: lint types
	$(BIN)/pytest

test-slow: .venv/installed
	$(BIN)/pytest -m slow

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs

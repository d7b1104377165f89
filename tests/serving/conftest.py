"""Files named *_engine start a vLLM engine: they run in their own environment and process (make test-vllm)."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.path.stem.endswith("_engine"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; type make test-vllm"))

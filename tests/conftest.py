"""Tests run offline, on tiny random models; `real` ones use the bundled smollm2 if it is installed."""

from __future__ import annotations

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

from wakesight.engines.hf.engine import HFEngine
from wakesight.testing import tiny

torch.set_num_threads(1)  # tiny tensors gain nothing from more, and lose much when cores are shared
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session", params=tiny.FAMILIES)
def engine(request) -> HFEngine:
    """A tiny engine of every family; cache memory that nobody wrote or that was freed is NaN."""
    return tiny.engine(request.param)


@pytest.fixture(scope="session")
def smollm2() -> HFEngine:
    from wakesight.engines.hf.engine import load
    from wakesight.models.load import BUNDLED

    if BUNDLED["smollm2"].path() is None:
        pytest.skip("the bundled model smollm2 is not installed")
    torch.set_num_threads(os.cpu_count() or 1)  # as a user would load it, one-token products included
    try:
        return load("smollm2")
    finally:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_hybrid() -> HFEngine:
    """The hybrid that comes with the package."""
    from wakesight.engines.hf.engine import load

    return load("tiny-hybrid")

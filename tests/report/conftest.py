"""One finished run folder for all tests of the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import make_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "hand")

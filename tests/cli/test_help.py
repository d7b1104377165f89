"""docs/help.md is what the commands say of themselves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_help_page_is_current():
    spec = importlib.util.spec_from_file_location("generate_help", DOCS / "generate_help.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = "docs/help.md is stale; type: .venv/bin/python docs/generate_help.py"
    assert (DOCS / "help.md").read_text() == module.help_page(), stale

"""Model folders that several commands are tried on."""

from __future__ import annotations

import pytest

from wakesight.testing import tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(tiny.save("llama", tmp_path_factory.mktemp("llama")))

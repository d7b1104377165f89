"""Family rows, and the tiny configs behind them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version

from wakesight.errors import RequestError
from wakesight.models.families import FAMILIES, family_of, missing_model_types
from wakesight.testing import tiny


def test_model_types_name_one_row_each():
    types = [name for row in FAMILIES for name in row.model_types]
    assert len(types) == len(set(types))
    for row in FAMILIES:
        for name in row.model_types:
            assert family_of(SimpleNamespace(model_type=name)) is row


def test_an_unknown_type_is_named_with_what_is_supported():
    with pytest.raises(RequestError, match=r"'qwen3_nxt' .*qwen3_next.*unknown architecture"):
        family_of(SimpleNamespace(model_type="qwen3_nxt"))


def test_a_family_without_native_signals_says_why():
    for row in FAMILIES:
        assert row.native_signals in ("gated_delta", "kda", "mamba2", None)
        assert bool(row.no_signals)
        assert row.native_signals is None or row.recurrence


def test_every_family_has_a_tiny_config():
    assert set(tiny.CONFIGS) == {row.name for row in FAMILIES}
    assert set(tiny.FAMILIES) <= set(tiny.CONFIGS)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_tiny_config_maps_to_its_row(name):
    assert family_of(tiny.config(name)).name == name


def test_missing_types_are_what_this_transformers_cannot_load():
    older = Version(transformers.__version__) < Version("5.17")
    assert ("kimi_linear" in missing_model_types()) == older
    for row in FAMILIES:
        absent = missing_model_types() & set(row.model_types)
        assert bool(absent) == (row.name not in tiny.FAMILIES)
        for name in absent:
            with pytest.raises(ValueError, match=name):
                transformers.AutoConfig.for_model(name)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_the_recurrent_module_is_where_the_row_says(name):
    row = family_of(tiny.config(name))
    found = [path.split(".") for path, _ in tiny.model(name).named_modules()]
    assert row.recurrence is None or any(path[-1] == row.recurrence for path in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_tiny_logits_are_finite_and_repeat(name, dtype):
    ids = torch.tensor([tiny.tokens(300)])
    with torch.no_grad():
        logits, again = (tiny.model(name).to(dtype)(input_ids=ids).logits for _ in range(2))
    assert logits.isfinite().all()
    assert torch.equal(logits, again)

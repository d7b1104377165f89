"""The one-token product is F.linear, up to rounding, and leaves with the engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wakesight.engines.hf.linear import one_token, split_one_token


@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 48), (48,), (1, 3, 48), (2, 1, 48)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_linear_for_one_row_and_for_many(shape, bias):
    torch.manual_seed(0)
    weight, offset, x = torch.randn(36, 48), torch.randn(36) if bias else None, torch.randn(shape)
    for blocks in (2, 3, 4):
        found = one_token(weight, offset, blocks, x)
        assert found.shape == (*shape[:-1], 36)
        assert torch.allclose(found, F.linear(x, weight, offset), atol=1e-5)


def test_only_layers_it_can_serve_are_changed_and_all_come_back(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(6, 4).bfloat16(), nn.Bilinear(2, 2, 2))
    before = [dict(vars(m)) for m in model]

    restore = split_one_token(model)
    changed = ["forward" in vars(m) for m in model]
    restore()

    assert changed == [True, False, False, False]  # 5 rows do not halve; bfloat16 has its own product
    assert [dict(vars(m)) for m in model] == before

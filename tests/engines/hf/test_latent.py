"""Latent attention: logits in the stored space equal those over the expanded keys."""

from __future__ import annotations

import pytest
import torch

from wakesight.cache.pool import Pool
from wakesight.cache.slots import Slots
from wakesight.engines.hf.attention import attend
from wakesight.engines.hf.latent import absorbed, as_stored, stored
from wakesight.engines.hf.layers import SlotLayer
from wakesight.testing import tiny

pytestmark = pytest.mark.skipif(
    "kimi_linear" not in tiny.FAMILIES, reason="this transformers has no kimi_linear, the one family with latent keys"
)


@pytest.fixture(scope="module")
def module():
    """The latent attention of the first layer that has one."""
    model = tiny.model("kimi_linear")
    return next(m for m in model.modules() if hasattr(m, "kv_b_proj"))


def latents(module, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, 1, count, module.kv_lora_rank, generator=noise),
        torch.randn(1, 1, count, module.qk_rope_head_dim, generator=noise),
    )


def queries(module, count: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(9)
    return torch.randn(1, module.num_heads, count, module.qk_head_dim, generator=noise)


def slots_with(key: torch.Tensor, value: torch.Tensor) -> Slots:
    slots = Slots(Pool(poison=True))
    slots.append({"key": key[0], "value": value[0]})
    return slots


@pytest.mark.parametrize(("held", "new"), [(1, 1), (40, 1), (40, 7), (40, 40)])
def test_absorbed_logits_equal_the_expanded_ones(module, held, new):
    latent, rotary = latents(module, held)
    query = queries(module, new)
    keys, _ = module.expand_kv(latent, rotary)
    expected = query[0].double() @ keys[0].double().mT

    moved, (shared,) = absorbed(module, query[0], slots_with(latent, rotary))

    assert moved.shape == (module.num_heads, new, module.kv_lora_rank + module.qk_rope_head_dim)
    assert shared.shape == (held, module.kv_lora_rank + module.qk_rope_head_dim)
    assert torch.allclose((moved @ shared.T).double(), expected, rtol=1e-4, atol=1e-4)


def test_heads_differ_or_the_test_above_would_prove_little(module):
    latent, rotary = latents(module, 5)
    query = queries(module, 1)[0, :1].expand(module.num_heads, -1, -1)
    moved, (shared,) = absorbed(module, query, slots_with(latent, rotary))
    logits = moved @ shared.T
    assert (logits[0] - logits[1]).abs().max() > 0.1


def test_stored_keys_are_the_latent_and_the_rotary_part(module):
    latent, rotary = latents(module, 6)
    (shared,) = stored(slots_with(latent, rotary))
    assert torch.equal(shared, torch.cat([latent[0, 0], rotary[0, 0]], dim=-1))


def test_plain_keys_are_the_strips_themselves():
    slots = slots_with(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3))
    query = torch.randn(4, 2, 4)
    heard, keys = as_stored(None, query, slots)
    assert heard is query
    assert [key.data_ptr() for key in keys] == [slots.strip("key", head).data_ptr() for head in range(2)]


def test_rows_of_different_lengths_attend_over_their_own_latents(module):
    """`update` hands on padded latents, which the model expands for all rows at once."""
    pasts, new = (0, 3, 25), 4
    rows = [latents(module, past + new, seed=past) for past in pasts]
    held = [
        slots_with(key[:, :, :past], value[:, :, :past]) if past else Slots(Pool(poison=True))
        for (key, value), past in zip(rows, pasts, strict=True)
    ]
    layer = SlotLayer(held, list(pasts), latent=True)
    query = queries(module, new).expand(3, -1, -1, -1)

    fresh = [torch.cat([row[part][:, :, -new:] for row in rows]) for part in (0, 1)]
    keys, values = module.expand_kv(*layer.update(*fresh))
    found = layer.attend(module, query, keys, values, module.scaling, attend)

    assert layer.seen == [4, 7, 29]
    for r, (latent, rotary) in enumerate(rows):
        expected = attend(query[r : r + 1], *module.expand_kv(latent, rotary), module.scaling)
        assert torch.allclose(found[r : r + 1], expected, atol=1e-5)

"""The closed form equals what really happens when an entry is removed, in both of its bodies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wakesight.learning import influence as module
from wakesight.learning.influence import GUARD, attention_weights, influence, influence_and_outputs, influence_reference
from wakesight.testing import tiny

J, T, CONTEXT, D, DV, HIDDEN = 3, 6, 40, 8, 12, 20


def drawn(seed: int = 0, peaky: float = 1.0, dtype: torch.dtype = torch.float64, **sizes: int) -> dict:
    noise = torch.Generator().manual_seed(seed)
    heads, new, context = (sizes.get(n, v) for n, v in (("heads", J), ("new", T), ("context", CONTEXT)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype)

    return {
        "queries": normal(heads, new, D) * peaky,
        "keys": normal(context + new, D),
        "values": normal(context + new, DV) + 1,
        "output": normal(heads, HIDDEN, DV),
        "scaling": D**-0.5,
        "first": context,
        "entries": context,
    }


def by_removal(queries, keys, values, output, scaling, first, entries) -> Tensor:
    """The entry's key and value are taken out of the tensors, and attention is computed again."""

    def layer(query: Tensor, seen: list[int]) -> Tensor:
        weights = (query * scaling @ keys[seen].T).softmax(dim=-1)  # [J, seen]
        return torch.einsum("jd,jhd->h", weights @ values[seen], output)

    found = queries.new_zeros(queries.shape[1], entries)
    for row in range(queries.shape[1]):
        seen = list(range(first + row + 1))
        whole = layer(queries[:, row], seen)
        for entry in range(entries):
            found[row, entry] = (layer(queries[:, row], [p for p in seen if p != entry]) - whole).norm()
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest relative difference; removal itself leaves 1e-15 of rounding, which tiny influences drown in."""
    return float(((found - expected).abs() / expected.clamp(min=1e-6 * float(expected.max()))).max())


@pytest.mark.parametrize("peaky", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("body", [influence, influence_reference])
def test_both_forms_equal_real_removal(body, heads, peaky):
    case = drawn(heads, peaky, heads=heads)

    assert relative(body(**case), by_removal(**case)) < 1e-8


def random_hybrid():
    return tiny.engine("qwen3_5", num_attention_heads=6)


def bundled_hybrid():
    from wakesight.engines.hf.engine import load

    return load("tiny-hybrid", dtype=torch.float64)


@pytest.mark.parametrize("make", [random_hybrid, bundled_hybrid])
@pytest.mark.parametrize("body", [influence, influence_reference])
def test_both_forms_equal_real_removal_in_layers_of_a_model(body, make):
    """Queries, keys, values and projections as a hybrid's attention modules have them."""
    engine = make()
    engine.model.double()
    engine = _again(engine)
    session = engine.prefill(tiny.tokens(60))
    rows = engine.follow(session.state, tiny.tokens(5, seed=3))
    for layer, row in enumerate(rows):
        output = engine.output_projection(layer).transpose(0, 1)
        heads = engine.geometry.kv_heads[layer]
        group = engine.geometry.query_heads // heads
        slots = session.state.slots[layer]
        for head in range(heads):
            mine = slice(head * group, (head + 1) * group)
            case = {
                "queries": row.queries[mine],
                "keys": torch.cat([slots.strip("key", head), row.keys[head]]),
                "values": torch.cat([slots.strip("value", head), row.values[head]]),
                "output": output[mine],
                "scaling": row.scaling,
                "first": 60,
                "entries": 60,
            }
            assert case["keys"].dtype == torch.float64
            assert relative(body(**case), by_removal(**case)) < 1e-8


def _again(engine):
    from wakesight.engines.hf.engine import HFEngine
    from wakesight.models.families import family_of
    from wakesight.models.load import LoadedModel

    engine.close()
    return HFEngine(LoadedModel("double", engine.model, engine.tokenizer, family_of(engine.model.config)), growth=64)


@pytest.mark.parametrize("peaky", [0.1, 1.0, 3.0, 10.0])
def test_float32_blocks_stay_near_the_reference_in_float64(peaky):
    """Also where one entry has nearly all the weight, which is where squares lose their digits."""
    exact = drawn(5, peaky, new=40, context=90)
    single = {n: v.float() if isinstance(v, Tensor) else v for n, v in exact.items()}
    expected = influence_reference(**{n: v.double() if isinstance(v, Tensor) else v for n, v in single.items()})
    strong = float(attention_weights(exact["queries"], exact["keys"], D**-0.5, 90, torch.float64)[..., :90].max())
    assert peaky < 10 or strong > 0.9999

    found = influence(**single)

    assert found.dtype == torch.float32
    assert float((found - expected).abs().max() / expected.max()) < 1e-5
    tops = expected > 0.01 * expected.max()
    assert float(((found - expected).abs() / expected)[tops].max()) < 2e-3


def test_blocks_of_any_size_give_the_same(monkeypatch):
    case = drawn(2, 2.0, new=23)
    whole, outputs = influence_and_outputs(**case)
    for block in (1, J * 50, J * 200):
        monkeypatch.setattr(module, "BLOCK", block)
        again, same = influence_and_outputs(**case)
        assert torch.allclose(again, whole, rtol=1e-9, atol=0)
        assert torch.allclose(same, outputs, rtol=1e-12, atol=1e-12)


def test_outputs_are_attention():
    case = drawn(3)
    _, outputs = influence_and_outputs(**case)
    for row in range(T):
        seen = CONTEXT + row + 1
        expected = torch.nn.functional.scaled_dot_product_attention(
            case["queries"][:, row : row + 1], case["keys"][:seen].expand(J, -1, -1),
            case["values"][:seen].expand(J, -1, -1), scale=case["scaling"],
        )  # fmt: skip
        assert torch.allclose(outputs[:, row : row + 1], expected, rtol=1e-10)


def test_an_entry_without_weight_has_no_influence():
    case = drawn(4)
    case["keys"][7] = -1e4 * case["queries"].sum(dim=(0, 1))
    case["queries"] = case["queries"][:1, :1].expand(J, 1, D).contiguous()
    case["keys"][7] = -1e4 * case["queries"][0, 0]
    assert influence(**case)[0, 7] == 0
    assert influence_reference(**case)[0, 7] == 0


def test_heads_add_up_before_the_norm():
    """Two heads that see the same and are projected to opposite sides cancel."""
    case = drawn(6, heads=2)
    case["queries"][1] = case["queries"][0]
    case["output"][1] = -case["output"][0]
    assert float(influence(**case).max()) < 1e-6 * float(influence(**{**case, "output": case["output"].abs()}).max())


@pytest.mark.parametrize("body", [influence, influence_reference])
def test_the_guard_bounds_an_entry_that_has_all_the_weight(body):
    """Beyond 1 - a = GUARD the influence is scaled by (1 - a) / GUARD, so it never explodes."""
    case = drawn(7, heads=1, new=1)
    case["keys"] *= 0.01
    case["keys"][5] = 0.01 * case["keys"][5] + case["queries"][0, 0] * 60
    lost = 1 - attention_weights(case["queries"], case["keys"], D**-0.5, CONTEXT, torch.float64)[0, 0, 5]
    assert 0 <= lost < GUARD
    found = float(body(**case)[0, 5])
    without = (case["values"].sum(0) - case["values"][5]) / (len(case["values"]) - 1)
    full = float(torch.einsum("d,hd->h", without - case["values"][5], case["output"][0]).norm())
    assert 0 <= found <= 1.1 * full * max(float(lost) / GUARD, 1e-9)

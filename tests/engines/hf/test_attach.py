"""A loaded model keeps working with other caches, and `close` gives it back as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from wakesight.engines.hf.cache import SlotLayer
from wakesight.engines.hf.engine import load
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import cached


@pytest.fixture(params=tiny.FAMILIES)
def family(request):
    return request.param


def test_close_leaves_no_trace(family):
    model = tiny.model(family)
    implementation = model.config._attn_implementation
    names, hooks = set(vars(model)), len(model._forward_pre_hooks)

    load(model).close()

    assert model.config._attn_implementation == implementation
    assert set(vars(model)) == names
    assert len(model._forward_pre_hooks) == hooks
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_closed_engine_refuses(family):
    engine = load(tiny.model(family))
    session = engine.prefill(tiny.tokens(20))
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        session.ask([1, 2])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_caches_and_padded_batches_work_as_before(family, attention):
    plain = tiny.model(family)
    plain.set_attn_implementation(attention)
    ours = load(tiny.model(family), attention=attention).model
    rows = [tiny.tokens(12), [258] * 5 + tiny.tokens(7)]
    inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor([[1] * 12, [0] * 5 + [1] * 7])}
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 258}

    expected = plain.generate(**inputs, **settings)

    assert torch.equal(ours.generate(**inputs, **settings), expected)
    assert torch.equal(ours.generate(**inputs, **settings, **cached(DynamicCache(config=ours.config))), expected)


def test_full_ids_are_refused_by_name(family):
    engine = load(tiny.model(family))
    context, question = tiny.tokens(40), tiny.tokens(5, seed=2)
    session = engine.prefill(context)
    with pytest.raises(RequestError, match="pass the question's ids only"):
        engine.model.generate(torch.tensor([context + question]), **cached(session.cache()), max_new_tokens=2)


def test_a_batch_on_one_sequence_is_refused_by_name(family):
    engine = load(tiny.model(family))
    session = engine.prefill(tiny.tokens(40))
    questions = torch.tensor([tiny.tokens(5), tiny.tokens(5)])
    with pytest.raises(RequestError, match="not a batch of 2"):
        engine.model.generate(questions, **cached(session.cache()), max_new_tokens=2)


def test_sampling_continues_from_a_compacted_cache(family):
    engine = load(tiny.model(family))
    child = engine.prefill(tiny.tokens(60)).compact(Policy(scorer="random", keep=0.4))
    question = torch.tensor([tiny.tokens(5, seed=2)])
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(engine.model.generate(question, **cached(child.cache()), max_new_tokens=8, do_sample=True))
    assert torch.equal(made[0], made[1])


def test_a_cache_cannot_be_rolled_back(family):
    cache = load(tiny.model(family)).prefill(tiny.tokens(20)).cache()
    for undo in (lambda: cache.crop(-1), cache.reset):
        with pytest.raises(RequestError, match="take a new one"):
            undo()


def test_a_model_that_bypasses_our_attention_fails_loudly(family, monkeypatch):
    """A model that hands its keys on as copies would be masked wrongly; it must not go unnoticed."""
    update = SlotLayer.update
    monkeypatch.setattr(SlotLayer, "update", lambda self, *a, **k: tuple(t.clone() for t in update(self, *a, **k)))
    engine = load(tiny.model(family))
    with pytest.raises(RuntimeError, match="bypassed wakesight's attention"):
        engine.prefill(tiny.tokens(20))
    assert engine.pool.held_bytes == 0

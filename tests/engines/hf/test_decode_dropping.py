"""Decoding that drops: without a cut it is the session itself, what is cut is what the rule says, the session stays."""

from __future__ import annotations

import pytest
import torch

from wakesight.cache.residency.dropping import RKV, DecodeSnapKV
from wakesight.core import KeptSet
from wakesight.engines.hf.dropping import Dropping, ask_dropping
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.residency import Residency
from wakesight.testing import tiny

QUESTION = tiny.tokens(9, seed=5)
RULES = [RKV(budget=24, every=4), DecodeSnapKV(budget=24, every=4)]


@pytest.fixture(scope="module")
def doc():
    with tiny.engine("llama").prefill(tiny.tokens(70)) as session:
        yield session


def test_a_budget_for_everything_is_the_session_itself(doc):
    plain = doc.ask(QUESTION, max_new_tokens=12)

    answer = ask_dropping(doc, QUESTION, RKV(budget=200, every=4), max_new_tokens=12)

    assert (answer.tokens, answer.finish, answer.text) == (plain.tokens, plain.finish, plain.text)


@pytest.mark.parametrize("rule", RULES, ids=["rkv", "snapkv"])
@pytest.mark.parametrize("page_size", [None, 4])
def test_a_cut_frees_bytes_at_its_time_and_the_session_stays(doc, rule, page_size):
    pool = doc.engine.pool
    before, held = doc.ask(QUESTION, max_new_tokens=6).tokens, pool.held_bytes
    with Dropping(doc.engine, doc.state, rule, page_size) as decoding:
        decoding.read(QUESTION)
        bytes_before, lengths = decoding.held_bytes, []
        for token in tiny.tokens(9, seed=6):
            decoding.read([token])
            lengths.append(decoding.lengths[0][0])
        assert decoding.held_bytes < bytes_before
        assert len(set(decoding.lengths)) == 1
        assert decoding.cuts == 2

    rest = 0 if page_size is None else 83 % 4
    assert lengths[:4] == [80, 81, 82, 24 + rest]
    assert lengths[4] == 25 + rest
    assert pool.held_bytes == held
    assert doc.ask(QUESTION, max_new_tokens=6).tokens == before


@pytest.mark.parametrize("rule", RULES, ids=["rkv", "snapkv"])
def test_what_stays_is_what_the_rule_keeps(doc, rule):
    """After a cut the logits are those of a compacted session that holds the same positions."""
    engine, fed = doc.engine, tiny.tokens(4, seed=6)
    with Dropping(engine, doc.state, rule) as decoding:
        decoding.read(QUESTION)
        for token in fed[:3]:
            decoding.read([token])
        keys = [slots.read("key").clone() for slots in decoding._state.slots]
        decoding.read(fed[3:])
        positions = []
        for before, slots in zip(keys, decoding._state.slots, strict=True):
            newest = slots.read("key")[:, -1:]
            whole = torch.cat([before, newest], dim=1)
            same = (whole[:, :, None] == slots.read("key")[:, None]).all(-1)  # [kv_head, whole, held]
            positions.append(tuple(same.any(2)[head].nonzero().flatten() for head in range(len(same))))
        got = decoding.read([7])

    with engine.prefill([*doc.tokens, *QUESTION, *fed]) as other:
        child = other.state.compacted(KeptSet(tuple(positions)), 8)
        cache = engine.continuing([child])
        ids = torch.tensor([[7]])
        expected = engine.forward(engine.model, ids, cache, len(other.tokens), logits_to_keep=1).logits[0, -1]
        child.release()
    assert all(len(head) == 24 for layer in positions for head in layer)
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))


def test_a_cut_without_its_queries_is_a_bug(doc):
    with Dropping(doc.engine, doc.state, RULES[0]) as decoding:
        decoding.read([3])
        with pytest.raises(RuntimeError, match="last 8 tokens"):
            decoding.cut()


def test_what_cannot_be_dropped_from_is_refused(doc):
    residency = Residency(pages=2, attend=2)
    with (
        doc.compact(Policy(unit="page", evicted="demote", residency=residency)) as demoted,
        pytest.raises(RequestError, match="take the whole session"),
    ):
        Dropping(doc.engine, demoted.state, RULES[0])
    with (
        tiny.engine("qwen4_exp").prefill(tiny.tokens(20)) as whole_only,
        pytest.raises(RequestError, match="nothing can be dropped"),
    ):
        Dropping(whole_only.engine, whole_only.state, RULES[0])

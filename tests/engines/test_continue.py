"""Contexts that go on: append, ask, compact again. What was dropped once stays away."""

from __future__ import annotations

import functools

import pytest
import torch

from wakesight.core import KeptSet
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.scores.table import SCORERS
from wakesight.testing import tiny
from wakesight.testing.artifacts import fitted
from wakesight.testing.laws import Masked, relative_gap, state_digest

TOLERANCE = 1e-5
N, FIRST, SECOND = 120, tiny.tokens(70, seed=11), tiny.tokens(9, seed=12)
QUESTION = tiny.tokens(5, seed=2)
PREFIX = 6
SOME = ("llama", "gemma3", "qwen3_5", "falcon_h1")
EVICTING = [family for family in tiny.FAMILIES if family != "qwen4_exp"]


@functools.lru_cache(maxsize=2)
def engine_of(family: str):
    return fitted(tiny.engine(family))


@functools.lru_cache(maxsize=2)
def masked(family: str) -> Masked:
    return Masked(tiny.model(family), tiny.tokens(N))


def prefilled(family: str, tokens=None, **options):
    session = engine_of(family).prefill(tiny.tokens(N) if tokens is None else tokens, **options)
    session.state.prefix = PREFIX
    return session


def heads_of(kept: KeptSet) -> list[set[int]]:
    return [set(head.tolist()) for layer in kept.positions for head in layer]


@pytest.mark.parametrize("chunk", [64, 512])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_appending_to_a_whole_session_equals_reading_all_at_once(family, chunk):
    record = list(SCORERS) if family in EVICTING else []
    session = prefilled(family, record=record, chunk=chunk)
    session.append(FIRST, chunk=chunk)
    session.append(SECOND)
    once = prefilled(family, [*tiny.tokens(N), *FIRST, *SECOND], record=record)

    assert session.tokens == once.tokens
    assert session.stats.kept_entries == once.stats.kept_entries
    assert session.kept is None
    assert relative_gap(session.logits(QUESTION), once.logits(QUESTION)) < TOLERANCE
    assert session.ask(QUESTION, max_new_tokens=6).tokens == once.ask(QUESTION, max_new_tokens=6).tokens
    if family not in EVICTING:
        return  # no scorer runs on it
    mine, theirs = session.signals(), once.signals()
    assert set(mine.streams) == set(theirs.streams)
    for name in theirs.streams:
        for a, b in zip(mine[name], theirs[name], strict=True):
            assert a.shape == b.shape, name
            if a.numel():
                assert relative_gap(a, b) < 10 * TOLERANCE, name  # covariances square what keys are apart


@pytest.mark.parametrize("allocation", ["flat", "global"])
@pytest.mark.parametrize("family", EVICTING)
def test_a_child_reads_on_without_what_it_dropped(family, allocation):
    """The new tokens are computed while the dropped entries are gone, as the mask says; twice, with a drop between."""
    child = prefilled(family).compact(Policy(scorer="knorm", keep=0.3, allocation=allocation))
    first = child.kept
    child.append(FIRST)
    after = child.kept

    assert heads_of(after) == [head | set(range(N, N + len(FIRST))) for head in heads_of(first)]
    expected = masked(family).logits(QUESTION, after, [(first, FIRST)])
    assert relative_gap(child.logits(QUESTION), expected) < TOLERANCE
    unmasked = masked(family).logits(QUESTION, after, [(None, FIRST)])
    assert relative_gap(unmasked, expected) > 10 * TOLERANCE  # that the new tokens missed something shows

    grandchild = child.compact(Policy(scorer="keydiff", keep=0.25, allocation=allocation))
    second = grandchild.kept
    grandchild.append(SECOND)
    later = [(first, FIRST), (second, SECOND)]
    expected = masked(family).logits(QUESTION, grandchild.kept, later)
    assert relative_gap(grandchild.logits(QUESTION), expected) < TOLERANCE
    assert grandchild.tokens == (*tiny.tokens(N), *FIRST, *SECOND)


@pytest.mark.parametrize("parent", ["flat", "global"])
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("family", SOME)
def test_compacting_again_counts_in_the_body_so_far(family, scorer, parent):
    child = prefilled(family, record=[scorer]).compact(Policy(scorer=scorer, keep=0.4, allocation=parent))
    dropped = [set(range(N)) - head for head in heads_of(child.kept)]
    child.append(FIRST)
    held, body = heads_of(child.kept), N + len(FIRST) - PREFIX
    digest = state_digest(child.state)

    for keep in (0.15, 0.45, 1.0):
        grandchild = child.compact(Policy(scorer=scorer, keep=keep))
        per_head = round(keep * body)
        kept = heads_of(grandchild.kept)
        assert [len(head) - PREFIX for head in kept] == [min(per_head, len(head) - PREFIX) for head in held]
        assert all(set(range(PREFIX)) <= head for head in kept)
        for mine, theirs, gone in zip(kept, held, dropped, strict=True):
            assert mine <= theirs
            assert not mine & gone
        if keep == 1.0:
            assert kept == held
            assert torch.equal(grandchild.logits(QUESTION), child.logits(QUESTION))
        expected = masked(family).logits(QUESTION, grandchild.kept, [(_before(child.kept), FIRST)])
        assert relative_gap(grandchild.logits(QUESTION), expected) < TOLERANCE
        grandchild.close()
    assert state_digest(child.state) == digest


def _before(kept: KeptSet) -> KeptSet:
    """What a kept set held when the context had N tokens."""
    return KeptSet(tuple(tuple(head[head < N] for head in layer) for layer in kept.positions))


@pytest.mark.parametrize("scorer", SCORERS)
def test_old_and_new_entries_compete(scorer):
    """Something of both stays with every scorer, and score-based allocations meet their exact total."""
    child = prefilled("llama", record=[scorer]).compact(Policy(scorer=scorer, keep=0.6))
    child.append(FIRST)
    body = N + len(FIRST) - PREFIX
    held = [len(head) - PREFIX for head in heads_of(child.kept)]
    for allocation in ("flat", "ada", "global"):
        kept = heads_of(child.compact(Policy(scorer=scorer, keep=0.4, allocation=allocation)).kept)
        assert sum(len(head) - PREFIX for head in kept) == round(0.4 * body) * len(held)
        assert any(position >= N for head in kept for position in head)
        if scorer != "streaming":  # the most recent ones, by design
            assert any(PREFIX <= position < N for head in kept for position in head)


def test_appending_to_a_child_leaves_its_parent_and_siblings_alone():
    for family in SOME:
        parent = prefilled(family, record=["h2o", "expected_attention"])
        sibling = parent.compact(Policy(scorer="h2o", keep=0.4))
        child = parent.compact(Policy(scorer="h2o", keep=0.4))
        before = [state_digest(session.state) for session in (parent, sibling)]
        signals = {name: [t.clone() for t in parent.signals()[name]] for name in parent.signals().streams}

        child.append(FIRST)
        child.ask(QUESTION, max_new_tokens=4)
        child.close()

        assert [state_digest(session.state) for session in (parent, sibling)] == before
        now = parent.signals()
        for name, tensors in signals.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, now[name], strict=True)), name


def test_a_failed_append_leaves_no_trace(monkeypatch):
    session = prefilled("qwen3_5", record=["h2o"])
    child = session.compact(Policy(scorer="knorm", keep=0.4, allocation="global"))
    forward, calls = child.engine.forward, []

    def failing(*arguments, **keywords):
        calls.append(1)
        if len(calls) % 2 == 0:
            raise MemoryError
        return forward(*arguments, **keywords)

    for one in (session, child):
        before, answer = state_digest(one.state), one.ask(QUESTION, max_new_tokens=4).tokens
        monkeypatch.setattr(child.engine, "forward", failing)
        with pytest.raises(Exception, match="out of memory in append"):
            one.append(FIRST, chunk=64)
        monkeypatch.undo()
        for bad, words in (([], "nothing to append"), ([1, 999], "outside the model's vocabulary")):
            with pytest.raises(RequestError, match=words):
                one.append(bad)
        with pytest.raises(RequestError, match="at most 1024"):
            one.append(tiny.tokens(1000))
        assert state_digest(one.state) == before
        assert one.ask(QUESTION, max_new_tokens=4).tokens == answer
        one.append(FIRST)  # and it still can


def test_a_sparse_indexer_reads_on_whole():
    session = prefilled("qwen4_exp")
    same = session.compact(Policy(keep=1.0))
    same.append(FIRST)
    once = prefilled("qwen4_exp", [*tiny.tokens(N), *FIRST])
    assert relative_gap(same.logits(QUESTION), once.logits(QUESTION)) < TOLERANCE
    with pytest.raises(RequestError, match="cannot be evicted"):
        same.compact(Policy(keep=0.5))

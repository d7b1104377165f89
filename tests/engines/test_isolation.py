"""A session answers every question from the same state, whatever was asked, forked or dropped in between."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import cached, state_digest

N = 150
SCORERS = ("random", "streaming", "knorm", "keydiff", "snapkv")


def question(seed: int) -> list[int]:
    return tiny.tokens(3 + seed % 5, seed=100 + seed)


def live_tensors() -> tuple[int, int]:
    """Count and bytes of all tensors that Python still holds."""
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor)
    }
    return len(storages), sum(storages.values())


@pytest.mark.parametrize("keep", [1.0, 0.3])
def test_question_b_after_a_equals_a_fresh_b_bit_for_bit(engine, keep):
    policy = Policy(scorer="random", keep=keep)
    used, fresh = (engine.prefill(tiny.tokens(N)).compact(policy) for _ in range(2))

    used.ask(question(1), max_new_tokens=20)
    used.logits(question(2))
    used.ask(question(4), max_new_tokens=90)  # longer than the growth slack

    assert torch.equal(used.logits(question(3)), fresh.logits(question(3)))
    assert used.ask(question(3), max_new_tokens=20).tokens == fresh.ask(question(3), max_new_tokens=20).tokens


def test_a_failed_question_leaves_no_trace(engine, monkeypatch):
    session = engine.prefill(tiny.tokens(N))
    before, expected = state_digest(session.state), session.ask(question(1)).tokens

    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.ask(question(2), stream=stop)

    assert state_digest(session.state) == before
    assert session.ask(question(1)).tokens == expected


def test_a_session_cannot_be_asked_while_it_answers(engine):
    session = engine.prefill(tiny.tokens(N))
    with pytest.raises(RequestError, match="is answering"):
        session.ask(question(1), stream=lambda piece: session.ask(question(2)))


def test_children_outlive_their_parent(engine):
    parent = engine.prefill(tiny.tokens(N))
    child = parent.compact(Policy(scorer="random", keep=0.5))
    expected = child.logits(question(1))

    parent.close()

    assert torch.equal(child.logits(question(1)), expected)
    with pytest.raises(RequestError, match="closed"):
        parent.ask(question(1))


def test_closing_everything_returns_everything(engine):
    gc.collect()
    ledger, census = (engine.pool.held_bytes, engine.pool.leases), live_tensors()

    with engine.prefill(tiny.tokens(N)) as parent, parent.compact(Policy(keep=0.5)) as child:
        child.ask(question(1))
        cache = child.cache()
        engine.model.generate(torch.tensor([question(2)]), **cached(cache), max_new_tokens=4, do_sample=False)
        del cache
    del parent, child
    gc.collect()

    assert (engine.pool.held_bytes, engine.pool.leases) == ledger
    assert live_tensors() == census


class Forks(RuleBasedStateMachine):
    """Up to 50 children of one context, forked, asked and dropped in any order."""

    family = ""

    @initialize()
    def prefill(self) -> None:
        self.engine = tiny.engine(self.family)
        gc.collect()
        self.start = (self.engine.pool.held_bytes, self.engine.pool.leases)
        self.parent = self.engine.prefill(tiny.tokens(N))
        self.whole = self.engine.pool.held_bytes
        self.digest = state_digest(self.parent.state)
        self.answers: dict[tuple[str, float, int], tuple[int, ...]] = {}
        self.children: list[Session] = []

    @precondition(lambda self: len(self.children) < 50)
    @rule(scorer=st.sampled_from(SCORERS), keep=st.sampled_from((0.05, 0.3, 0.7, 1.0)))
    def fork(self, scorer: str, keep: float) -> None:
        self.children.append(self.parent.compact(Policy(scorer=scorer, keep=keep)))

    @precondition(lambda self: self.children)
    @rule(pick=st.integers(0, 49), seed=st.integers(0, 3), length=st.integers(1, 80))
    def ask(self, pick: int, seed: int, length: int) -> None:
        child = self.children[pick % len(self.children)]
        made = child.ask(question(seed), max_new_tokens=length).tokens
        key = (str(child.policy.scorer), child.policy.keep, seed)
        known = self.answers.setdefault(key, made)
        shared = min(len(known), len(made))
        assert made[:shared] == known[:shared]
        self.answers[key] = max(known, made, key=len)

    @precondition(lambda self: self.children)
    @rule(pick=st.integers(0, 49))
    def drop(self, pick: int) -> None:
        self.children.pop(pick % len(self.children)).close()

    @rule(seed=st.integers(0, 3))
    def ask_the_parent(self, seed: int) -> None:
        self.parent.ask(question(seed), max_new_tokens=5)

    @invariant()
    def parent_is_untouched(self) -> None:
        if hasattr(self, "parent"):
            assert state_digest(self.parent.state) == self.digest

    def teardown(self) -> None:
        if hasattr(self, "parent"):
            for child in self.children:
                child.close()
            assert self.engine.pool.held_bytes == self.whole
            self.parent.close()
            assert (self.engine.pool.held_bytes, self.engine.pool.leases) == self.start
            self.engine.close()


_settings = settings(
    max_examples=8,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class _Llama(Forks):
    family = "llama"


class _Hybrid(Forks):
    family = "qwen3_5"


TestForksOfLlama = _Llama.TestCase
TestForksOfLlama.settings = _settings
TestForksOfHybrid = _Hybrid.TestCase
TestForksOfHybrid.settings = _settings


def test_fifty_children_in_random_order(engine):
    """Fork 50, answer each, drop them in a random order: the parent's hash, the ledger and a census of tensors."""
    gc.collect()
    ledger, census = (engine.pool.held_bytes, engine.pool.leases), live_tensors()
    parent = engine.prefill(tiny.tokens(N))
    digest = state_digest(parent.state)

    children = [parent.compact(Policy(scorer=SCORERS[i % 5], keep=0.05 + 0.019 * i)) for i in range(50)]
    for i in torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist():
        children[i].ask(question(i), max_new_tokens=3)
        assert state_digest(parent.state) == digest
        children[i].close()

    assert (
        engine.pool.held_bytes
        == sum(s.held_bytes + s.slack_bytes for s in parent.state.slots) + parent.stats.state_bytes + ledger[0]
    )
    parent.close()
    del parent, children
    assert (engine.pool.held_bytes, engine.pool.leases) == ledger
    assert live_tensors() == census

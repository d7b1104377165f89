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


@pytest.fixture(scope="module", params=("llama", "qwen3_5", "falcon_h1"))
def engine(request):
    return tiny.engine(request.param)


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
    before, expected = state_digest(session.state), session.ask(question(1), max_new_tokens=30).tokens

    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.ask(question(2), stream=stop)

    assert state_digest(session.state) == before
    assert session.ask(question(1), max_new_tokens=30).tokens == expected


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


@pytest.mark.parametrize("keep", [1.0, 0.3])
def test_an_append_reaches_nobody_else(engine, keep):
    """A child and its parent read on apart; a grandchild stays as it was made."""
    parent = engine.prefill(tiny.tokens(N))
    child = parent.compact(Policy(scorer="random", keep=keep))
    grandchild = child.compact(Policy(scorer="knorm", keep=0.2))
    before = [session.logits(question(1)) for session in (parent, child, grandchild)]

    child.append(tiny.tokens(200, seed=2))
    assert torch.equal(parent.logits(question(1)), before[0])
    assert torch.equal(grandchild.logits(question(1)), before[2])
    assert not torch.equal(child.logits(question(1)), before[1])

    after = child.logits(question(1))
    parent.append(tiny.tokens(30, seed=3))
    assert torch.equal(child.logits(question(1)), after)
    assert torch.equal(grandchild.logits(question(1)), before[2])


def test_closing_everything_returns_everything(engine):
    gc.collect()
    ledger, census = (engine.pool.held_bytes, engine.pool.leases), live_tensors()

    with engine.prefill(tiny.tokens(N)) as parent, parent.compact(Policy(keep=0.5)) as child:
        child.ask(question(1))
        with child.compact(Policy(keep=0.2)) as grandchild:
            grandchild.append(tiny.tokens(70, seed=2))
        cache = child.cache()
        engine.model.generate(torch.tensor([question(2)]), **cached(cache), max_new_tokens=4, do_sample=False)
        del cache
    del parent, child, grandchild
    gc.collect()

    assert (engine.pool.held_bytes, engine.pool.leases) == ledger
    assert live_tensors() == census


def within(part, whole) -> bool:
    """True if every position of `part` is one of `whole`, head by head."""
    pairs = zip(part.positions, whole.positions, strict=True)
    return all(set(a.tolist()) <= set(b.tolist()) for one, all_ in pairs for a, b in zip(one, all_, strict=True))


class Forks(RuleBasedStateMachine):
    """Up to 50 sessions that go back to one context: forked, compacted again, read on, asked and dropped in any order.

    A session's history (how it was compacted, what it read on) decides its answers, whatever else happened;
    and nothing but its own append changes what a session holds.
    """

    family = ""

    @initialize()
    def prefill(self) -> None:
        self.engine = tiny.engine(self.family)
        gc.collect()
        self.start = (self.engine.pool.held_bytes, self.engine.pool.leases)
        self.parent = self.engine.prefill(tiny.tokens(N))
        self.whole = self.engine.pool.held_bytes
        self.digest = state_digest(self.parent.state)
        self.answers: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.children: list[Session] = []
        self.histories: dict[Session, tuple[object, ...]] = {}
        self.digests: dict[Session, str] = {}

    def enter(self, session: Session, history: tuple[object, ...]) -> None:
        self.children.append(session)
        self.histories[session] = history
        self.digests[session] = state_digest(session.state)

    def child(self, pick: int) -> Session:
        return self.children[pick % len(self.children)]

    @precondition(lambda self: len(self.children) < 50)
    @rule(
        scorer=st.sampled_from(SCORERS),
        keep=st.sampled_from((0.05, 0.3, 0.7, 1.0)),
        allocation=st.sampled_from(("flat", "ada")),
    )
    def fork(self, scorer: str, keep: float, allocation: str) -> None:
        made = self.parent.compact(Policy(scorer=scorer, keep=keep, allocation=allocation))
        self.enter(made, (scorer, keep, allocation))

    @precondition(lambda self: 0 < len(self.children) < 50)
    @rule(pick=st.integers(0, 49), scorer=st.sampled_from(SCORERS), keep=st.sampled_from((0.05, 0.2, 0.5, 1.0)))
    def compact_again(self, pick: int, scorer: str, keep: float) -> None:
        child = self.child(pick)
        made = child.compact(Policy(scorer=scorer, keep=keep))
        assert within(made.kept, child.kept)
        share = round(keep * child.state.logical_length)
        held = [[min(share, heads) for heads in layer] for layer in child.stats.kept_entries]
        assert made.stats.kept_entries == held
        self.enter(made, (*self.histories[child], scorer, keep))

    @precondition(lambda self: self.children)
    @rule(pick=st.integers(0, 49), seed=st.integers(0, 3), length=st.integers(1, 80))
    def append(self, pick: int, seed: int, length: int) -> None:
        child = self.child(pick)
        if child.state.logical_length + length > 800:
            return
        before = child.kept
        child.append(tiny.tokens(length, seed=500 + seed))
        assert within(before, child.kept)
        self.histories[child] = (*self.histories[child], "append", seed, length)
        self.digests[child] = state_digest(child.state)

    @precondition(lambda self: self.children)
    @rule(pick=st.integers(0, 49))
    def append_too_much(self, pick: int) -> None:
        with pytest.raises(RequestError, match="outside the model's vocabulary"):
            self.child(pick).append([1, 2, 999])

    @precondition(lambda self: self.children)
    @rule(pick=st.integers(0, 49), seed=st.integers(0, 3), length=st.sampled_from((1, 4, 20, 90)))
    def ask(self, pick: int, seed: int, length: int) -> None:
        child = self.child(pick)
        made = child.ask(question(seed), max_new_tokens=length).tokens
        key = (*self.histories[child], "ask", seed)
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
    def nobody_else_is_touched(self) -> None:
        if hasattr(self, "parent"):
            assert state_digest(self.parent.state) == self.digest
            for child in self.children:
                assert state_digest(child.state) == self.digests[child]

    @invariant()
    def the_ledger_is_what_the_sessions_hold(self) -> None:
        if hasattr(self, "parent"):
            states = [session.state for session in (self.parent, *self.children)]
            fixed = {id(lease): lease.bytes for state in states for lease in state.states.values()}
            slots = sum(slots.held_bytes + slots.slack_bytes for state in states for slots in state.slots)
            assert self.engine.pool.held_bytes - self.start[0] == slots + sum(fixed.values())

    def teardown(self) -> None:
        if hasattr(self, "parent"):
            for child in self.children:
                child.close()
            assert self.engine.pool.held_bytes == self.whole
            self.parent.close()
            assert (self.engine.pool.held_bytes, self.engine.pool.leases) == self.start
            self.engine.close()


_settings = settings(
    max_examples=6,
    stateful_step_count=40,
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

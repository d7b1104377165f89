"""What may happen at the same time, and what is refused: threads, callbacks, copies, models in two hands."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch

from wakesight.engines.batch import SessionBatch
from wakesight.engines.hf.engine import load
from wakesight.engines.session import Session
from wakesight.errors import RequestError, WorkError
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import cached, state_digest

QUESTION = tiny.tokens(5, seed=3)


@pytest.fixture
def engine():
    return tiny.engine("qwen3_5")


def in_threads(*calls) -> list[object]:
    """Run all at once, switching as often as Python can; the result or the RequestError of each."""
    found: list[object] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def one(index: int, call) -> None:
        with torch.no_grad():
            gate.wait()
            try:
                found[index] = call()
            except RequestError as refusal:
                found[index] = refusal

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=one, args=(i, call)) for i, call in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return found


def test_a_second_thread_is_refused_and_harms_nothing(engine):
    session = engine.prefill(tiny.tokens(150))
    expected, before = session.ask(QUESTION, max_new_tokens=8).tokens, state_digest(session.state)
    refused = 0
    for _ in range(10):
        for answer in in_threads(*[lambda: session.ask(QUESTION, max_new_tokens=8).tokens] * 3):
            if isinstance(answer, RequestError):
                assert "is answering or being changed" in str(answer)
                refused += 1
            else:
                assert answer == expected
    assert refused
    assert state_digest(session.state) == before


@pytest.mark.parametrize("other", ["ask", "append", "compact", "close", "logits", "cache"])
def test_nothing_else_happens_while_a_session_reads_on(engine, other, tmp_path):
    more = tiny.tokens(128, seed=5)
    expected = engine.prefill(tiny.tokens(100) + more)
    calls = {
        "ask": lambda s: s.ask(QUESTION, max_new_tokens=4),
        "append": lambda s: s.append(more),
        "compact": lambda s: s.compact(Policy(scorer="random", keep=0.5)),
        "close": lambda s: s.close(),
        "logits": lambda s: s.logits(QUESTION),
        "cache": lambda s: s.cache(),
    }
    for _ in range(5):
        session = engine.prefill(tiny.tokens(100))
        found = in_threads(lambda s=session: s.append(more, chunk=64), lambda s=session: calls[other](s))
        if isinstance(found[0], RequestError) or session._state is None:
            continue  # the other one came first, or closed it afterwards
        if other == "append" and found[1] is None:
            continue  # one after the other: read twice
        assert len(session.tokens) == 228
        assert {length for heads in session.state.physical_lengths for length in heads} == {228}
        gap = (session.logits(QUESTION) - expected.logits(QUESTION)).abs().max()
        assert gap < 1e-4


def test_different_sessions_of_one_engine_answer_in_different_threads(engine):
    sessions = [engine.prefill(tiny.tokens(100, seed=seed)) for seed in range(3)]
    expected = [session.ask(QUESTION, max_new_tokens=8).tokens for session in sessions]
    for _ in range(5):
        assert in_threads(*[lambda s=s: s.ask(QUESTION, max_new_tokens=8).tokens for s in sessions]) == expected


def test_a_batch_takes_its_rows_as_a_session_does(engine):
    session = engine.prefill(tiny.tokens(100))
    with pytest.raises(RequestError, match="is answering"):
        session.ask(QUESTION, stream=lambda piece: SessionBatch([session]).cache())
    with pytest.raises(RequestError, match="occurs twice"):
        SessionBatch([session, session])
    with pytest.raises(RequestError, match="different engines"):
        SessionBatch([session, tiny.engine("qwen3_5").prefill(tiny.tokens(100))])


def test_a_batch_is_continued_as_a_whole_or_not_at_all(engine, monkeypatch):
    batch = engine.prefill_batch([tiny.tokens(60), tiny.tokens(80)])
    for texts in (["fine"], ["fine", tiny.tokens(2000)], ["fine", [99999]], ["fine", []]):
        with pytest.raises(RequestError):
            batch.append(texts)
        assert [len(row.tokens) for row in batch] == [60, 80]
    batch.append([[1, 2], [3]])
    assert [len(row.tokens) for row in batch] == [62, 81]

    real, seen = engine.extend, []

    def extend(*given):
        if seen:
            raise WorkError("out of memory")
        seen.append(given)
        return real(*given)

    monkeypatch.setattr(engine, "extend", extend)
    with pytest.raises(WorkError, match="1 of 2 rows were continued"):
        batch.append([[1], [2]])


def test_a_session_is_no_value_to_copy(engine):
    session = engine.prefill(tiny.tokens(40))
    for make in (copy.copy, copy.deepcopy, lambda one: one.__reduce_ex__(2)):
        with pytest.raises(RequestError, match="cannot be copied or pickled"):
            make(session)


def test_a_copy_of_an_engine_s_model_is_a_plain_model_of_its_own(engine):
    ids = torch.tensor([QUESTION])
    twin = copy.deepcopy(engine.model)
    assert torch.allclose(twin(input_ids=ids).logits, engine.model(input_ids=ids).logits, atol=1e-6)
    for weight in twin.parameters():
        weight.zero_()
    assert twin(input_ids=ids).logits.abs().max() == 0
    assert engine.model(input_ids=ids).logits.abs().max() > 0


def test_a_model_has_one_engine_and_a_cache_one_model():
    model = tiny.model("llama")
    first = load(model)
    with pytest.raises(RequestError, match="belongs to an engine already"):
        load(model)
    cache = first.prefill(tiny.tokens(40)).cache()
    other = load(tiny.model("llama", seed=1))
    with pytest.raises(RequestError, match="made by another model"):
        other.model.generate(torch.tensor([QUESTION]), max_new_tokens=2, **cached(cache))
    first.close()
    assert load(model).prefill(tiny.tokens(40)).ask(QUESTION, max_new_tokens=2).tokens
    for call in (lambda: first.prefill(tiny.tokens(40)), lambda: Session.load("x", first)):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_a_context_may_be_read_in_inference_mode_and_asked_outside(engine):
    with torch.inference_mode():
        session = engine.prefill(tiny.tokens(100))
        child = session.compact(Policy(scorer="random", keep=0.5))
    expected = engine.prefill(tiny.tokens(100)).ask(QUESTION, max_new_tokens=6).tokens
    assert session.ask(QUESTION, max_new_tokens=6).tokens == expected
    child.append(tiny.tokens(10))
    assert child.ask(QUESTION, max_new_tokens=6).tokens
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RequestError, match="autocast"):
        session.ask(QUESTION)


def test_what_a_policy_protects_stays_protected(engine):
    child = engine.prefill(tiny.tokens(200)).compact(Policy(scorer="random", keep=0.3, protect=50))
    again = child.compact(Policy(scorer="random", keep=0.1))
    for layer in again.kept.positions:
        for head in layer:
            assert head[:50].tolist() == list(range(50))

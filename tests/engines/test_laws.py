"""The laws of design section 7 on tiny models of every family."""

from __future__ import annotations

import pytest
import torch

from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import cached, clear_margin, greedy, masked_logits, relative_gap, same_but_for_ties

TOLERANCE = 1e-5
N = 300


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(family):
    """transformers as it comes: the same weights, its own attention."""
    return tiny.model(family)


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def either(request, family):
    return tiny.engine(family, attention=request.param)


@pytest.mark.parametrize("questions", [1, 20])
@pytest.mark.parametrize("chunk", [64, 512])
def test_a_whole_session_equals_plain_transformers(either, plain, chunk, questions):
    context, question = tiny.tokens(N), tiny.tokens(questions, seed=2)
    expected = plain(input_ids=torch.tensor([context + question])).logits[0, -questions:]

    found = either.prefill(context, chunk=chunk).logits(question)

    assert relative_gap(found, expected) < TOLERANCE


@pytest.mark.parametrize("chunk", [64, 512])
def test_greedy_tokens_equal_plain_transformers(either, plain, chunk):
    context, question = tiny.tokens(N), tiny.tokens(20, seed=3)
    expected, rows = greedy(plain, context + question, 24)
    clear = [clear_margin(row) for row in rows]
    until = clear.index(False) if False in clear else len(clear)

    made = either.prefill(context, chunk=chunk).ask(question, max_new_tokens=24)

    ends = expected.index(257) if 257 in expected else 24
    assert until > 5
    assert list(made.tokens[:until]) == expected[: min(until, ends)]


@pytest.mark.parametrize("questions", [1, 20])
def test_keeping_everything_is_bit_identical_to_the_whole_session(either, questions):
    session = either.prefill(tiny.tokens(N))
    question = tiny.tokens(questions, seed=4)

    for allocation in ("flat", "pyramid"):
        child = session.compact(Policy(scorer="random", keep=1.0, allocation=allocation))
        assert torch.equal(child.logits(question), session.logits(question))
        assert child.ask(question, max_new_tokens=8).tokens == session.ask(question, max_new_tokens=8).tokens


@pytest.mark.parametrize("questions", [1, 5, 50])
@pytest.mark.parametrize("allocation", ["flat", "pyramid", "uneven", "nothing in the last layer"])
def test_dropping_equals_masking_on_the_full_cache(either, plain, allocation, questions):
    context, question = tiny.tokens(N), tiny.tokens(questions, seed=5)
    session = either.prefill(context)
    layers = len(either.geometry.attention_layers)
    if allocation in ("flat", "pyramid"):
        policy = Policy(scorer="random", keep=0.3, allocation=allocation)
    else:
        counts = [17, 211, 64][:layers] if allocation == "uneven" else [120] * (layers - 1) + [0]
        policy = Policy(scorer="random", allocation=tuple(counts))
    child = session.compact(policy)

    found = child.logits(question)

    assert relative_gap(found, masked_logits(plain, context, question, child.kept)) < TOLERANCE
    whole = session.logits(question)
    assert relative_gap(found, whole) > 100 * TOLERANCE  # dropping must show, or this test could not fail


@pytest.mark.parametrize("scorer", ["streaming", "knorm", "keydiff", "snapkv"])
def test_every_scorer_obeys_the_masking_law(either, plain, scorer):
    context, question = tiny.tokens(N), tiny.tokens(5, seed=6)
    child = either.prefill(context).compact(Policy(scorer=scorer, keep=0.2))

    expected = masked_logits(plain, context, question, child.kept)

    assert relative_gap(child.logits(question), expected) < TOLERANCE


@pytest.mark.parametrize("keep", [0.1, 0.37, 1.0])
def test_held_bytes_shrink_by_what_was_dropped(engine, keep):
    session = engine.prefill(tiny.tokens(N))
    prefix = 7
    child = session.compact(Policy(scorer="random", keep=keep, protect=prefix))
    kept = prefix + round(keep * (N - prefix))

    measured = sum(lease.bytes for slots in child.state.slots for lease in slots._payloads.values())
    stats = child.stats

    assert stats.kv_bytes_kept + stats.kv_bytes_slack == measured  # what is reported is what is allocated
    assert abs(stats.kv_bytes_kept / session.stats.kv_bytes_kept - kept / N) < 0.01
    assert stats.kv_bytes_full == session.stats.kv_bytes_full == session.stats.kv_bytes_kept
    assert stats.kv_bytes_freed == stats.kv_bytes_full - stats.kv_bytes_kept
    assert stats.kept_entries == [[kept] * heads for heads in engine.geometry.kv_heads]
    assert child.kept.counts == stats.kept_entries


def test_chunked_and_one_shot_prefill_keep_the_same_set(engine):
    context = tiny.tokens(N)
    sessions = [engine.prefill(context, chunk=chunk) for chunk in (512, 64)]
    for name in ("knorm", "keydiff", "snapkv", "streaming", "random"):
        policy = Policy(scorer=name, keep=0.25)
        one, many = (session.compact(policy).kept for session in sessions)
        assert same_but_for_ties(one, many, policy.scorer_method.score(sessions[0].signals())), name


def test_the_model_continues_a_session_in_its_own_generate(engine):
    context, question = tiny.tokens(N), tiny.tokens(9, seed=7)
    for session in (engine.prefill(context), engine.prefill(context).compact(Policy(scorer="random", keep=0.3))):
        expected = session.ask(question, max_new_tokens=10)
        cache = session.cache()
        made = engine.model.generate(torch.tensor([question]), **cached(cache), max_new_tokens=10, do_sample=False)
        tokens = [t for t in made[0, len(question) :].tolist() if t != 257]
        assert tokens == list(expected.tokens)
        assert session.ask(question, max_new_tokens=10).tokens == expected.tokens  # the copy, not the session, grew
        assert cache.get_seq_length() == N + 9 + len(made[0]) - 9 - 1


def test_decoding_never_copies_the_cache(engine):
    """The storage stays where it is for as many tokens as the growth slack holds."""
    session = engine.prefill(tiny.tokens(N))
    places = [slots.storage("key").data_ptr() for slots in session.state.slots]

    session.ask(tiny.tokens(4, seed=8), max_new_tokens=engine.growth - 8)

    assert [slots.storage("key").data_ptr() for slots in session.state.slots] == places


def test_answers_longer_than_the_slack_grow_the_storage_and_change_nothing(family):
    small = tiny.engine(family, growth=0)
    roomy = tiny.engine(family, growth=256)
    question = tiny.tokens(30, seed=9)
    answers = [e.prefill(tiny.tokens(64)).ask(question, max_new_tokens=200).tokens for e in (small, roomy)]
    assert answers[0] == answers[1]

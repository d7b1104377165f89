"""Laws beyond the matrix of test_families.py: eager attention, uneven counts, storage, transformers' own generate."""

from __future__ import annotations

import pytest
import torch

from wakesight.budget.table import ALLOCATIONS
from wakesight.policy import Policy
from wakesight.scores.table import SCORERS
from wakesight.testing import tiny
from wakesight.testing.artifacts import fitted, scores_of
from wakesight.testing.laws import (
    Masked,
    cached,
    clear_margin,
    greedy,
    masked_logits,
    relative_gap,
    same_but_for_ties,
    state_digest,
)

TOLERANCE = 1e-5
N = 300
END = 257
RECORD = ("h2o", "expected_attention", "gatesight", "gatesight+")
VALUES = ("expected_attention", "gatesight+")  # scorers that latent attention has nothing to read for


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_5", "kimi_linear", "falcon_h1", "jamba"])
def family(request) -> str:
    if request.param not in tiny.FAMILIES:
        pytest.skip(f"this transformers has no {request.param}")
    return request.param


@pytest.fixture(scope="module")
def plain(family):
    """transformers as it comes: the same weights, its own attention."""
    return tiny.model(family)


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def either(request, family):
    with torch.no_grad():
        return fitted(tiny.engine(family, attention=request.param))


@pytest.fixture(scope="module")
def session(either):
    with torch.no_grad():
        return either.prefill(tiny.tokens(N), record=RECORD)


@pytest.fixture(scope="module")
def masked(plain):
    with torch.no_grad():
        return Masked(plain, tiny.tokens(N))


@pytest.mark.parametrize("questions", [1, 20])
@pytest.mark.parametrize("chunk", [64, 512])
def test_both_attentions_equal_plain_transformers(either, plain, chunk, questions):
    context, question = tiny.tokens(N), tiny.tokens(questions, seed=2)
    expected = plain(input_ids=torch.tensor([context + question])).logits[0, -questions:]

    assert relative_gap(either.prefill(context, chunk=chunk).logits(question), expected) < TOLERANCE


def test_long_greedy_answers_equal_plain_transformers(either, plain, session):
    question = tiny.tokens(20, seed=3)
    expected, rows = greedy(plain, [*session.tokens, *question], 24)
    clear = [clear_margin(row) for row in rows]
    until = clear.index(False) if False in clear else len(clear)

    made = session.ask(question, max_new_tokens=24)

    ends = expected.index(END) if END in expected else 24
    assert until > 5
    assert list(made.tokens[:until]) == expected[: min(until, ends)]


@pytest.mark.parametrize("questions", [1, 50])
@pytest.mark.parametrize("allocation", ["flat", "global", "uneven", "nothing in the last layer"])
def test_dropping_equals_masking_on_the_full_cache(session, masked, allocation, questions):
    question = tiny.tokens(questions, seed=5)
    layers = len(session.engine.geometry.attention_layers)
    if allocation in ("flat", "global"):
        policy = Policy(scorer="knorm", keep=0.3, allocation=allocation)
    else:
        counts = [17, 211, 64][:layers] if allocation == "uneven" else [120] * (layers - 1) + [0]
        policy = Policy(scorer="random", allocation=tuple(counts))
    child = session.compact(policy)

    found = child.logits(question)

    assert relative_gap(found, masked.logits(question, child.kept)) < TOLERANCE
    assert relative_gap(found, session.logits(question)) > 100 * TOLERANCE  # or this test could not fail


@pytest.mark.parametrize("scorer", SCORERS)
def test_every_scorer_obeys_the_masking_law(session, masked, scorer):
    if scorer in VALUES and session.engine.geometry.family == "kimi_linear":
        pytest.skip("latent attention has no values that this scorer could read")
    question = tiny.tokens(5, seed=6)
    child = session.compact(Policy(scorer=scorer, keep=0.2))

    assert relative_gap(child.logits(question), masked.logits(question, child.kept)) < TOLERANCE


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_every_allocation_obeys_the_masking_law(session, masked, allocation):
    """Fitted scores among them, which the measured tables were made for."""
    question, heads = tiny.tokens(5, seed=6), session.engine.geometry.kv_heads
    child = session.compact(Policy(scorer="gatesight", keep=0.3, allocation=allocation))

    found = child.logits(question)

    most = round(0.3 * N) * sum(heads)
    assert most - max(heads) < sum(map(sum, child.kept.counts)) <= most
    assert relative_gap(found, masked.logits(question, child.kept)) < TOLERANCE
    assert relative_gap(found, session.logits(question)) > 100 * TOLERANCE


def possible(engine) -> list[str]:
    latent = engine.geometry.family == "kimi_linear"
    return [name for name in SCORERS if not (latent and name in VALUES)]


def test_keeping_everything_changes_no_bit_whatever_the_method(session):
    question = tiny.tokens(5, seed=6)
    expected = session.logits(question)
    for name in possible(session.engine):
        policy = Policy(scorer=name, keep=1.0)
        with session.compact(policy.at(allocation=policy.natural_allocation)) as same:
            assert torch.equal(same.logits(question), expected), name


def test_no_question_reaches_a_scorer_and_no_scorer_touches_the_parent(family):
    """A session that was asked before it is scored keeps what one keeps that never was; no pass leaves a trace."""
    engine, digests = fitted(tiny.engine(family)), []
    asked, quiet = (engine.prefill(tiny.tokens(N), record=RECORD) for _ in range(2))
    asked.ask(tiny.tokens(7, seed=10), max_new_tokens=4)
    before = state_digest(quiet.state)
    for name in possible(engine):
        policy = Policy(scorer=name, keep=0.3)
        policy = policy.at(allocation=policy.natural_allocation)
        one, other = asked.compact(policy), quiet.compact(policy)
        assert state_digest(one.state) == state_digest(other.state), name
        assert state_digest(asked.state) == state_digest(quiet.state) == before, name
        one.ask(tiny.tokens(5, seed=11), max_new_tokens=3)
        assert state_digest(one.state) == state_digest(other.state), name
        digests.append(state_digest(other.state))
    assert len(set(digests)) == len(digests)  # methods that all kept the same would prove little


def test_the_masked_reference_serves_any_number_of_kept_sets(session, masked, plain):
    """One context pass, many masks: as good as a pass for each."""
    question = tiny.tokens(5, seed=6)
    for keep in (0.2, 0.6):
        kept = session.compact(Policy(scorer="random", keep=keep)).kept
        once = masked_logits(plain, session.tokens, question, kept)
        assert torch.equal(masked.logits(question, kept), once)
    whole = plain(input_ids=torch.tensor([[*session.tokens, *question]])).logits[0, N:]
    assert relative_gap(masked.logits(question, None), whole) < TOLERANCE


def test_chunked_and_one_shot_prefill_keep_the_same_set(family):
    engine = fitted(tiny.engine(family))
    names = possible(engine)
    sessions = [engine.prefill(tiny.tokens(N), chunk=chunk, record=names) for chunk in (512, 64)]
    for name in names:
        policy = Policy(scorer=name, keep=0.25)
        one, many = (session.compact(policy).kept for session in sessions)
        assert same_but_for_ties(one, many, scores_of(sessions[0], policy.scorer_method)), name


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_model_continues_a_session_in_its_own_generate(family):
    engine, question = tiny.engine(family), tiny.tokens(9, seed=7)
    whole = engine.prefill(tiny.tokens(100))
    small = [] if engine.only_whole else [whole.compact(Policy(scorer="knorm", keep=0.3, allocation="global"))]
    for session in (whole, *small):
        expected, before = session.ask(question, max_new_tokens=10), state_digest(session.state)
        cache = session.cache()
        made = engine.model.generate(torch.tensor([question]), **cached(cache), max_new_tokens=10, do_sample=False)
        tokens = [t for t in made[0, len(question) :].tolist() if t != END]
        assert tokens == list(expected.tokens)
        assert state_digest(session.state) == before  # the copy, not the session, grew
        assert cache.get_seq_length() == 100 + len(made[0]) - 1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decoding_never_copies_the_cache(family):
    """The storage stays where it is for as many tokens as the growth slack holds."""
    engine = tiny.engine(family)
    session = engine.prefill(tiny.tokens(100))
    places = [slots.storage("key").data_ptr() for slots in session.state.slots]

    session.ask(tiny.tokens(4, seed=8), max_new_tokens=engine.growth - 8)

    assert [slots.storage("key").data_ptr() for slots in session.state.slots] == places


def test_answers_longer_than_the_slack_grow_the_storage_and_change_nothing(family):
    question = tiny.tokens(30, seed=9)
    policy = Policy(scorer="knorm", keep=0.5, allocation="global")
    answers = []
    for growth in (0, 256):
        session = tiny.engine(family, growth=growth).prefill(tiny.tokens(64))
        answers.append([one.ask(question, max_new_tokens=40).tokens for one in (session, session.compact(policy))])
    assert answers[0] == answers[1]

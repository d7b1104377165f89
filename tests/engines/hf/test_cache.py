"""Several sequences as one transformers Cache: rows apart and together, beams, and what it refuses."""

from __future__ import annotations

import gc

import pytest
import torch

from wakesight.engines.hf.cache import SessionCache, is_question_only
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import cached, relative_gap, state_digest

FAMILIES = tuple(f for f in ("llama", "qwen3_5", "falcon_h1", "gemma3", "kimi_linear", "jamba") if f in tiny.FAMILIES)
EVEN, UNEVEN = Policy(scorer="random", keep=0.5), Policy(scorer="knorm", keep=0.3, allocation="ada")


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    return tiny.engine(request.param)


@pytest.fixture
def sessions(engine):
    """A whole context, an evenly and an unevenly compacted one; of different lengths."""
    whole = engine.prefill(tiny.tokens(45))
    even = engine.prefill(tiny.tokens(70, seed=2)).compact(EVEN)
    uneven = engine.prefill(tiny.tokens(90, seed=3)).compact(UNEVEN)
    return [whole, even, uneven]


def cache_of(engine, sessions) -> SessionCache:
    return engine.cache([session.state for session in sessions])


def contents(cache: SessionCache) -> list[str]:
    """A digest of every row: all it holds, and how long it is."""
    found = []
    for index in range(cache.rows):
        row = cache.row(index)
        strips = [strip for layer in row.attention for name in ("key", "value") for strip in layer.rows[0].strips(name)]
        fixed = [tensor for _, tensor in sorted(row.state_tensors().items())]
        found.append(repr((row.tokens, row.logical_lengths, [t.tolist() for t in (*strips, *fixed)])))
    return found


def step(engine, cache: SessionCache, ids: torch.Tensor) -> torch.Tensor:
    return engine.model(input_ids=ids, **cached(cache), use_cache=True).logits


def test_rows_of_a_cache_know_their_own_lengths(engine, sessions):
    cache = cache_of(engine, sessions)
    ragged = [len(set(layer.rows[2].lengths)) > 1 for layer in cache.attention]
    assert any(ragged) == (engine.geometry.kv_heads[0] > 1)  # latent attention has one head
    assert cache.rows == 3
    assert cache.logical_lengths == [45, 70, 90]
    assert cache.get_seq_length() == 90
    assert cache.tokens == [session.tokens for session in sessions]


def test_a_batch_step_equals_each_row_alone(engine, sessions):
    questions = torch.tensor([tiny.tokens(6, seed=20 + r) for r in range(3)])
    cache = cache_of(engine, sessions)

    found = torch.cat([step(engine, cache, questions[:, :5]), step(engine, cache, questions[:, 5:])], dim=1)

    assert cache.logical_lengths == [51, 76, 96]
    for r, session in enumerate(sessions):
        assert relative_gap(found[r], session.logits(questions[r].tolist())) < 1e-5
    cache.check_attended()


def test_padded_rows_equal_each_row_alone(engine, sessions):
    lengths, width = (6, 2, 4), 6
    rows = [tiny.tokens(n, seed=30 + n) for n in lengths]
    ids = torch.tensor([[258] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    cache = cache_of(engine, sessions)

    found = engine.model(input_ids=ids, attention_mask=mask, **cached(cache), use_cache=True).logits

    assert cache.logical_lengths == [45 + 6, 70 + 2, 90 + 4]
    for r, session in enumerate(sessions):
        assert relative_gap(found[r, -lengths[r] :], session.logits(rows[r])) < 1e-5
        assert bool((found[r, : -lengths[r]] == 0).all())


def test_a_cache_is_a_copy(engine, sessions):
    before = [state_digest(session.state) for session in sessions]
    cache = cache_of(engine, sessions)

    step(engine, cache, torch.tensor([tiny.tokens(80, seed=1)] * 3))

    assert [state_digest(session.state) for session in sessions] == before


def test_rows_taken_apart_and_put_back_are_the_cache_again(engine, sessions):
    cache, twin = cache_of(engine, sessions), cache_of(engine, sessions)
    before = contents(cache)

    cache.take_rows([cache.row(index) for index in range(3)])

    assert contents(cache) == before
    ids = torch.tensor([[5], [6], [7]])
    assert torch.equal(step(engine, cache, ids), step(engine, twin, ids))


def test_a_row_reads_on_alone_and_joins_the_others(engine, sessions):
    question = tiny.tokens(5, seed=3)
    cache = cache_of(engine, sessions)
    rows = [cache.row(index) for index in range(3)]

    step(engine, rows[1], torch.tensor([question]))
    cache.take_rows(rows)
    assert cache.logical_lengths == [45, 75, 90]
    found = step(engine, cache, torch.tensor([[5], [6], [7]]))

    assert relative_gap(found[1, -1], sessions[1].logits([*question, 6])[-1]) < 1e-5
    assert relative_gap(found[2, -1], sessions[2].logits([7])[-1]) < 1e-5


def test_single_caches_side_by_side_are_a_cache_of_several_rows(engine, sessions):
    whole = cache_of(engine, sessions)
    parts = [cache_of(engine, [session]) for session in sessions]
    assert SessionCache.joined(parts[:1]) is parts[0]
    assert contents(SessionCache.joined(parts)) == contents(whole)


def test_going_on_with_some_rows_leaves_their_content(engine, sessions):
    cache = cache_of(engine, sessions)
    before = contents(cache)

    cache.batch_select_indices(torch.tensor([2, 0]))

    assert contents(cache) == [before[2], before[0]]
    found = step(engine, cache, torch.tensor([[7], [5]]))
    assert relative_gap(found[0], sessions[2].logits([7])) < 1e-5
    assert relative_gap(found[1], sessions[0].logits([5])) < 1e-5


def test_repeated_rows_have_equal_content_and_go_their_own_ways(engine, sessions):
    cache = cache_of(engine, sessions)
    before = contents(cache)

    cache.batch_repeat_interleave(2)

    assert contents(cache) == [row for row in before for _ in range(2)]
    found = step(engine, cache, torch.tensor([[1], [2], [3], [4], [5], [6]]))
    for r in range(6):
        assert relative_gap(found[r], sessions[r // 2].logits([r + 1])) < 1e-5


def test_beams_equal_rows_that_are_read_anew(engine, sessions):
    """Random beams over several steps, two contexts side by side: each beam is its own history of tokens."""
    beams, rows = 3, [sessions[0], sessions[2]]
    cache = cache_of(engine, rows)
    cache.batch_repeat_interleave(beams)
    noise = torch.Generator().manual_seed(4)
    histories: list[list[int]] = [[] for _ in range(2 * beams)]

    for _ in range(5):
        fresh = torch.randint(0, 256, (2 * beams, 1), generator=noise)
        found = step(engine, cache, fresh)
        histories = [[*history, int(token)] for history, token in zip(histories, fresh, strict=True)]
        for r, history in enumerate(histories):
            assert relative_gap(found[r, -1], rows[r // beams].logits(history)[-1]) < 1e-5
        picks = [base + int(torch.randint(0, beams, (), generator=noise)) for base in (0, beams) for _ in range(beams)]
        cache.reorder_cache(torch.tensor(picks))
        histories = [histories[pick] for pick in picks]


def test_beam_search_of_a_whole_session_is_transformers_own(engine):
    context, question = tiny.tokens(60), tiny.tokens(5, seed=2)
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 258}
    plain = tiny.model(engine.name.removeprefix("tiny-"))
    expected = plain.generate(torch.tensor([context + question]), **settings)[0, len(context) :]

    cache = engine.prefill(context).cache()
    found = engine.model.generate(torch.tensor([question]), **cached(cache), **settings)

    assert torch.equal(found[0], expected)


def test_a_row_never_continues_as_another_context(engine, sessions):
    cache = cache_of(engine, sessions[:2])
    before = contents(cache)
    with pytest.raises(RequestError, match="cannot continue as a row of another session"):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert contents(cache) == before


def test_a_row_never_continues_as_a_row_that_kept_other_entries(engine):
    """Rows share what lies before the question only if one was forked from the other."""
    whole = engine.prefill(tiny.tokens(60))
    cache = cache_of(engine, [whole.compact(EVEN), whole.compact(UNEVEN)])
    with pytest.raises(RequestError, match="cannot continue as a row of another"):
        cache.reorder_cache(torch.tensor([1, 1]))


def test_a_cache_cannot_be_rolled_back(engine, sessions):
    cache = cache_of(engine, sessions)
    for undo in (lambda: cache.crop(-1), cache.reset):
        with pytest.raises(RequestError, match="take a new one"):
            undo()


def test_the_memory_of_a_cache_returns_with_it(engine, sessions):
    gc.collect()
    ledger = (engine.pool.held_bytes, engine.pool.leases)
    cache = cache_of(engine, sessions)
    cache.batch_repeat_interleave(2)
    step(engine, cache, torch.tensor([[5]] * 6))
    assert engine.pool.held_bytes > ledger[0]

    del cache
    gc.collect()

    assert (engine.pool.held_bytes, engine.pool.leases) == ledger


def test_a_layer_that_was_left_out_is_named(engine, sessions):
    cache = cache_of(engine, sessions[:1])
    step(engine, cache, torch.tensor([[5]]))
    cache.check_attended()

    cache.attention[-1].attended = False
    with pytest.raises(RuntimeError, match=rf"layers \[{cache.layers.index(cache.attention[-1])}\] bypassed"):
        cache.check_attended()
    cache.attention[-1].attended = True
    cache.attention[-1].seen[0] -= 1
    with pytest.raises(RuntimeError, match="did not store their keys"):
        cache.check_attended()


def test_a_question_may_begin_like_the_context():
    context = (1, 2, 3)
    assert is_question_only(context, [1, 2])
    assert is_question_only(context, [1, 2, 4, 5])
    assert not is_question_only(context, [1, 2, 3])
    assert not is_question_only(context, [1, 2, 3, 9])

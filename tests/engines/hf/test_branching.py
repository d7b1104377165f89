"""Continuations drawn side by side are those that each context would have drawn alone."""

from __future__ import annotations

import pytest
import torch

from wakesight.engines.base import Asked
from wakesight.engines.hf.branching import Branches, drawn_together, possible
from wakesight.engines.hf.layers import SlotLayer
from wakesight.learning.rollouts import rollouts
from wakesight.testing import tiny

HOW = {"count": 4, "tokens": 40}  # longer than the first room of a tail


@pytest.fixture(params=["qwen3_5", "llama"])
def asked(request):
    engine = tiny.engine(request.param)
    sessions = [engine.prefill(tiny.tokens(30 + 9 * n, seed=n)) for n in range(3)]
    yield engine, [Asked(session.state, tiny.tokens(1 + n, seed=9), 100 + n) for n, session in enumerate(sessions)]
    for session in sessions:
        session.close()


def alone(engine, one: Asked, past_end: bool = True) -> list[list[int]]:
    return engine.sample(one.state, one.after, HOW["count"], HOW["tokens"], one.seed, past_end)


def test_each_context_draws_what_it_draws_alone(asked):
    engine, contexts = asked
    before = [[slots.read("key").clone() for slots in one.state.slots] for one in contexts]

    found = drawn_together(engine, contexts, **HOW, past_end=True)

    assert found == [alone(engine, one) for one in contexts]
    assert found == [drawn_together(engine, [one], **HOW, past_end=True)[0] for one in contexts]
    for one, keys in zip(contexts, before, strict=True):
        assert all(torch.equal(slots.read("key"), key) for slots, key in zip(one.state.slots, keys, strict=True))


def test_rows_that_end_leave_the_others_as_they_are(asked, monkeypatch):
    """Ends are made common, so that rows of every context stop at steps of their own."""
    engine, contexts = asked
    whole = [alone(engine, one) for one in contexts]
    ends = frozenset({whole[0][1][0], whole[0][2][7], whole[1][0][5], whole[2][3][20]})
    monkeypatch.setattr(type(engine), "end_tokens", property(lambda self: ends))

    found = drawn_together(engine, contexts, **HOW)

    def cut(row: list[int]) -> list[int]:
        return row[: next((at for at, token in enumerate(row) if token in ends), len(row))]

    # rows that stop draw no further numbers, so those behind them in the same context change: compare up to there
    for rows, all_rows in zip(found, whole, strict=True):
        first = min(len(cut(row)) for row in all_rows)
        assert [row[:first] for row in rows] == [row[:first] for row in all_rows]
        assert not any(token in ends for row in rows for token in row)
    assert found[0][1] == []


def test_the_context_and_the_tails_are_one_softmax():
    """Against attention over the two put together, with rows of two contexts of different length."""
    engine = tiny.engine("llama")
    with engine.prefill(tiny.tokens(20)) as a, engine.prefill(tiny.tokens(33, seed=1)) as b:
        layers = [engine.continuing([session.state]).attention[0] for session in (a, b)]
        slots = [layer.rows[0] for layer in layers]
        branches = Branches(slots, [0, 0, 1], [20, 20, 33])
        noise = torch.Generator().manual_seed(0)
        heads, dim = engine.geometry.query_heads, engine.geometry.key_dims[0]
        kv_heads = engine.geometry.kv_heads[0]
        kept = []
        for _ in range(3):
            key, value = (torch.randn(3, kv_heads, 1, dim, generator=noise) for _ in range(2))
            query = torch.randn(3, heads, 1, dim, generator=noise)
            kept.append((key, value))
            branches.update(key, value)
            found = branches.attend(None, query, key, value, 0.3, None)
        for row, context in enumerate((0, 0, 1)):
            keys, values = (
                torch.cat([slots[context].read(name), *(pair[at][row] for pair in kept)], dim=1)
                for at, name in enumerate(("key", "value"))
            )
            grouped = query[row].view(kv_heads, -1, dim)
            expected = (grouped @ keys.transpose(1, 2) * 0.3).softmax(dim=-1) @ values
            assert torch.allclose(found[row].view(kv_heads, -1, dim), expected, atol=1e-5)
        assert isinstance(branches, SlotLayer)
        assert branches.seen == [23, 23, 36]


def test_what_cannot_run_side_by_side_runs_alone(asked):
    """Too little room for all tokens, an id that is none: no neighbour is the worse for it."""
    engine, contexts = asked
    wrong = Asked(contexts[0].state, [100_000], 5)
    assert [possible(engine, one, 40) for one in (*contexts, wrong)] == [True, True, True, False]
    assert not possible(engine, contexts[0], engine.geometry.max_positions)

    *fine, error = rollouts(engine, [*contexts, wrong], **HOW, past_end=True)

    assert fine == [list(map(list, dict.fromkeys(map(tuple, alone(engine, one))))) for one in contexts]
    assert "vocabulary" in str(error)

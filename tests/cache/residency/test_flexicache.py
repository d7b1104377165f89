"""FlexiCache's and Quest's choice of pages: the tensor form equals the plain one, and does what the paper says."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.residency.flexicache import FlexiState, flexicache, is_ranking, quest, reference

LAWS = settings(deadline=None, derandomize=True, max_examples=60)


def worths(heads: int, pages: int, seed: int) -> torch.Tensor:
    """Multiples of a quarter, so that ties occur."""
    return torch.randint(-8, 8, (heads, pages), generator=torch.Generator().manual_seed(seed)).float() / 4


def nothing(heads: int, attend: int) -> FlexiState:
    return FlexiState(torch.full((heads, attend), -1), 0)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(0, 12), st.integers(0, 10**6))
@LAWS
def test_the_tensor_form_equals_the_plain_one_over_a_whole_run(heads, attend, interval, pages, seed):
    noise = torch.Generator().manual_seed(seed)
    unstable = torch.rand(heads, generator=noise) < 0.4
    state = twin = nothing(heads, attend)._replace(ranked=int(torch.randint(0, pages + 1, (1,), generator=noise)))
    for step in range(3 * interval + 1):
        worth = worths(heads, pages + step // 2, seed + step)
        got, plain = (
            flexicache(state, worth, unstable, attend, interval),
            reference(twin, worth, unstable, attend, interval),
        )
        assert torch.equal(got.read, plain.read)
        assert torch.equal(torch.stack([got.units, got.pages]), torch.stack([plain.units, plain.pages]))
        assert torch.equal(got.state.listed, plain.state.listed)
        assert got.state[1:] == plain.state[1:]
        state, twin = got.state, plain.state


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6))
@LAWS
def test_a_step_reads_only_what_is_in_fast_memory(heads, attend, seed):
    """A stable head's pages: those listed, those written since, and what was copied after earlier steps."""
    state, stable = nothing(heads, attend), torch.zeros(heads, dtype=torch.bool)
    held: list[set[int]] = [set() for _ in range(heads)]
    known = 0
    for step in range(12):
        pages = 3 + step
        held = [own | set(range(known, pages)) for own in held]
        known = pages
        done = flexicache(state, worths(heads, pages, seed + step), stable, attend, interval=4)
        for head in range(heads):
            assert set(done.read[head].nonzero().flatten().tolist()) <= held[head]
        for unit, page in zip(done.units.tolist(), done.pages.tolist(), strict=True):
            assert page not in held[unit]
            held[unit].add(page)
        if done.state.ranked != state.ranked or step % 4 == 0:
            held = [set(row[row >= 0].tolist()) for row in done.state.listed]
        state = done.state


def test_a_ranking_takes_effect_a_step_later():
    stable = torch.tensor([False])
    state = FlexiState(torch.tensor([[0, 1]]), ranked=4)

    first = flexicache(state, torch.tensor([[0.0, 1.0, 2.0, 3.0]]), stable, attend=2)
    second = flexicache(first.state, torch.tensor([[9.0, 9.0, 0.0, 0.0]]), stable, attend=2)

    assert first.read.tolist() == [[True, True, False, False]]
    assert (first.units.tolist(), first.pages.tolist()) == ([0, 0], [2, 3])
    assert second.read.tolist() == [[False, False, True, True]]
    assert second.pages.tolist() == []


def test_rankings_come_every_sixteen_steps_from_the_first_one_on():
    state, ranked = nothing(1, 2), []
    for step in range(40):
        if is_ranking(state):
            ranked.append(step)
        state = flexicache(state, worths(1, 6, step), torch.tensor([False]), 2).state

    assert ranked == [0, 16, 32]


def test_a_page_written_since_the_ranking_is_read_by_stable_heads_alone():
    stable_and_not = torch.tensor([False, True])
    state = FlexiState(torch.tensor([[0], [-1]]), ranked=2, steps=3)

    done = flexicache(state, torch.tensor([[0.0, 5.0, 0.0, 0.0], [0.0, 5.0, 0.0, 0.0]]), stable_and_not, attend=1)

    assert done.read.tolist() == [[True, False, True, True], [False, True, False, False]]


def test_unstable_heads_read_their_best_now_and_copy_nothing():
    everyone = torch.tensor([True, True])
    worth = worths(2, 9, 0)

    done = flexicache(nothing(2, 3), worth, everyone, 3)

    assert torch.equal(done.read, quest(worth, 3))
    assert done.units.tolist() == []


def test_quest_reads_the_best_pages_and_ties_go_to_the_lower_id():
    assert quest(torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]]), 2).tolist() == [[False, True, True, False, False]]
    assert quest(torch.zeros(2, 0), 3).shape == (2, 0)
    assert quest(torch.ones(1, 2), 5).all()

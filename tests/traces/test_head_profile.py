"""FlexiCache's head profile: heads whose page sets change are found, on sets where it is known who changes."""

from __future__ import annotations

import numpy as np
import pytest

from wakesight.errors import RequestError
from wakesight.traces.head_profile import unstable_heads
from wakesight.traces.overlap import pack

PAGES = 40


def sets(changing: set[int], heads: int = 8, steps: int = 48) -> np.ndarray:
    """[step, head, 5]: five pages, the same in every step, or others in every step."""
    rng = np.random.default_rng(0)
    fixed = np.stack([rng.choice(PAGES, 5, replace=False) for _ in range(heads)])
    made = np.repeat(fixed[None], steps, axis=0)
    for head in changing:
        made[:, head] = [rng.choice(PAGES, 5, replace=False) for _ in range(steps)]
    return made


def profile(made: np.ndarray, **given) -> list[int]:
    found = unstable_heads(pack(made, PAGES), np.full(len(made), PAGES), **given)
    return np.flatnonzero(found).tolist()


@pytest.mark.parametrize("changing", [{0, 1}, {3, 6}, {2, 7}])
def test_a_quarter_of_the_heads_are_those_that_change(changing):
    assert profile(sets(changing)) == sorted(changing)


def test_a_head_that_changes_in_most_chunks_wins_over_one_that_changes_once():
    made = sets({5}, steps=64)
    made[:16, 2] = sets({2}, steps=16)[:, 2]
    made[:, 5][:16] = made[0, 5]  # in the first chunk 5 is steady

    assert profile(made, share=1 / 8) == [5]


def test_the_share_says_how_many_and_ties_go_to_the_lower_head():
    assert profile(sets(set()), share=0.5) == [0, 1, 2, 3]
    assert profile(sets({4}), share=0.0) == []
    assert profile(sets({4}), share=1.0) == list(range(8))


def test_too_few_steps_or_no_share_are_refused():
    with pytest.raises(RequestError, match="at least 16 decode steps, and 15"):
        profile(sets(set(), steps=15))
    with pytest.raises(RequestError, match=r"share=1\.5"):
        profile(sets(set()), share=1.5)

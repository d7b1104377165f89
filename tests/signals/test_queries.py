"""The query window holds the last rows, however they came."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.signals.queries import QueryWindow

LAWS = settings(deadline=None, derandomize=True, max_examples=200)


def rows(tokens: int) -> torch.Tensor:
    """[1, query_head, token, dim], every number different."""
    return torch.arange(3 * tokens * 2, dtype=torch.float32).reshape(1, 3, tokens, 2)


@given(st.integers(1, 12), st.lists(st.integers(0, 15), min_size=1, max_size=10))
@LAWS
def test_any_chunking_leaves_exactly_the_last_rows(window, chunks):
    everything = rows(sum(chunks))
    tap = QueryWindow(window)

    for chunk in everything.split(chunks, dim=2):
        tap.watch(chunk)

    assert torch.equal(tap.rows, everything[0, :, -window:])


@given(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=1, max_size=6))
@LAWS
def test_the_rows_are_a_copy(window, chunks):
    everything = rows(sum(chunks))
    expected = everything[0, :, -window:].clone()
    tap = QueryWindow(window)

    for chunk in everything.split(chunks, dim=2):
        tap.watch(chunk)
        chunk.fill_(float("nan"))  # the engine may reuse its buffers

    assert torch.equal(tap.rows, expected)
    assert tap.rows.untyped_storage().nbytes() == expected.numel() * 4  # and no view into a whole chunk


def test_nothing_watched_is_nothing_held():
    assert QueryWindow(4).rows is None

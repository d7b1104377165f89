"""The query window holds the last rows, however they came."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.signals.chunk import Chunk
from wakesight.signals.queries import QueryWindow

LAWS = settings(deadline=None, derandomize=True, max_examples=200)


def rows(tokens: int) -> torch.Tensor:
    """[query_head, token, dim], every number different."""
    return torch.arange(3 * tokens * 2, dtype=torch.float32).reshape(3, tokens, 2)


def watch(tap: QueryWindow, queries: torch.Tensor) -> None:
    """The window looks at nothing but the queries."""
    tap.watch(Chunk(queries, (), None, 0, 1.0))


@given(st.integers(1, 12), st.lists(st.integers(0, 15), min_size=1, max_size=10))
@LAWS
def test_any_chunking_leaves_exactly_the_last_rows(window, chunks):
    everything = rows(sum(chunks))
    tap = QueryWindow(window)

    for chunk in everything.split(chunks, dim=1):
        watch(tap, chunk)

    assert torch.equal(tap.rows, everything[:, -window:])


@given(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=1, max_size=6))
@LAWS
def test_the_rows_are_a_copy(window, chunks):
    everything = rows(sum(chunks))
    expected = everything[:, -window:].clone()
    tap = QueryWindow(window)

    for chunk in everything.split(chunks, dim=1):
        watch(tap, chunk)
        chunk.fill_(float("nan"))  # the engine may reuse its buffers

    assert torch.equal(tap.rows, expected)
    assert tap.rows.untyped_storage().nbytes() == expected.numel() * 4  # and no view into a whole chunk


def test_a_copy_reads_on_alone():
    everything = rows(10)
    tap = QueryWindow(4)
    watch(tap, everything[:, :5])

    child = tap.copy()
    watch(child, everything[:, 5:7])

    assert torch.equal(tap.rows, everything[:, 1:5])
    assert torch.equal(child.rows, everything[:, 3:7])


def test_nothing_watched_is_nothing_held():
    assert QueryWindow(4).rows is None

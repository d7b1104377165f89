"""Query moments against plain loops over the rows before RoPE."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wakesight.errors import WorkError
from wakesight.signals.chunk import Chunk
from wakesight.signals.query_moments import QueryMoments
from wakesight.signals.rope import rotate

HEADS, DIM = 3, 8
LENGTHS = (1, 4, 5, 6, 50)


def rows(tokens: int) -> torch.Tensor:
    """Queries before RoPE: float64 [query_head, token, dim], around a mean that is not 0."""
    noise = torch.Generator().manual_seed(tokens)
    centre = torch.randn(HEADS, 1, DIM, generator=noise, dtype=torch.float64) * 3
    return torch.randn(HEADS, tokens, DIM, generator=noise, dtype=torch.float64) + centre


def rotation(tokens: int, rotary_dim: int, factor: float = 1.0) -> torch.Tensor:
    """[2, token, rotary_dim], written out per pair."""
    table = torch.zeros(2, tokens, rotary_dim, dtype=torch.float64)
    for position in range(tokens):
        for i in range(rotary_dim):
            turn = torch.tensor(position * 100.0 ** -(i % (rotary_dim // 2)), dtype=torch.float64)
            table[:, position, i] = torch.stack([turn.cos(), turn.sin()]) * factor
    return table


def prefill(
    tap: QueryMoments, queries: torch.Tensor, table: torch.Tensor | None = None, sizes: list[int] | None = None
) -> QueryMoments:
    """Chunks of a context whose queries have been rotated by `table`; keys are not looked at."""
    if table is not None:
        queries = rotate(queries, *table.to(queries.dtype))
    start = 0
    for size in sizes or [queries.shape[1]]:
        piece = slice(start, start + size)
        tap.watch(Chunk(queries[:, piece], (), None, start, 1.0, None if table is None else table[:, piece]))
        start += size
    return tap


def loops(queries: torch.Tensor, skip: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population covariance of the rows from `skip` on, as sums over rows."""
    counted = queries.double().numpy()[:, skip:]
    heads, count, dim = counted.shape
    mean, covariance = np.zeros((heads, dim)), np.zeros((heads, dim, dim))
    for head in range(heads):
        for row in counted[head]:
            mean[head] += row / count
        for row in counted[head]:
            covariance[head] += np.outer(row - mean[head], row - mean[head]) / count
    return mean, covariance


def assert_moments(tap: QueryMoments, expected: tuple[np.ndarray, np.ndarray], tolerance: float = 1e-6) -> None:
    for found, wanted in zip((tap.mean, tap.covariance), expected, strict=True):
        assert found.shape == wanted.shape
        largest = max(np.abs(wanted).max(), 1e-9)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("rotary_dim", [None, DIM, 4])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_moments_are_those_of_the_rows_before_rope(tokens, rotary_dim):
    queries = rows(tokens)

    tap = prefill(QueryMoments(), queries, None if rotary_dim is None else rotation(tokens, rotary_dim))

    assert tap.count == max(tokens - 4, 0)
    assert tap.mean.dtype == tap.covariance.dtype == torch.float64
    assert_moments(tap, loops(queries))


@pytest.mark.parametrize("skip", [0, 1, 4])
@pytest.mark.parametrize("sizes", [[1] * 50, [3, 1, 1, 45], [2, 0, 47, 1], [49, 1]])
def test_any_chunking_gives_the_same_moments(sizes, skip):
    queries, table = rows(50), rotation(50, 4)
    whole = prefill(QueryMoments(skip), queries, table)

    tap = prefill(QueryMoments(skip), queries, table, sizes)

    assert tap.count == 50 - skip
    torch.testing.assert_close(tap.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tap.covariance, whole.covariance, rtol=1e-12, atol=1e-12)
    assert_moments(tap, loops(queries, skip))


def test_long_chunks_are_taken_in_blocks():
    queries = rows(3000)

    assert_moments(prefill(QueryMoments(), queries, rotation(3000, 4)), loops(queries))


def test_a_factor_inside_cos_and_sin_is_taken_back():
    queries = rows(50)

    assert_moments(prefill(QueryMoments(), queries, rotation(50, 4, factor=1.3)), loops(queries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrower_queries_give_float32_moments(dtype):
    """Of the rows that were rounded after RoPE: only the layer without RoPE can be compared exactly."""
    queries = rows(50).to(dtype)

    tap = prefill(QueryMoments(), queries, sizes=[20, 30])

    assert tap.mean.dtype == tap.covariance.dtype == torch.float32
    assert_moments(tap, loops(queries))


def test_a_large_common_mean_does_not_drown_the_covariance():
    """Sums of squares would leave nothing of a spread of 1 around 1e7."""
    queries = rows(200)

    tap = prefill(QueryMoments(), queries + 1e7, sizes=[10] * 20)

    np.testing.assert_allclose(tap.covariance.numpy(), loops(queries)[1], atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_no_counted_query_is_mean_and_covariance_zero(tokens):
    tap = prefill(QueryMoments(), rows(tokens), rotation(tokens, 4))

    assert tap.count == 0
    assert torch.equal(tap.mean, torch.zeros(HEADS, DIM, dtype=torch.float64))
    assert torch.equal(tap.covariance, torch.zeros(HEADS, DIM, DIM, dtype=torch.float64))


def test_one_counted_query_is_the_mean():
    queries = rows(5)

    tap = prefill(QueryMoments(), queries)

    assert torch.equal(tap.mean, queries[:, 4])
    assert not tap.covariance.any()


def test_a_copy_reads_on_alone():
    queries, table = rows(50), rotation(50, 4)
    turned = rotate(queries, *table)
    tap = prefill(QueryMoments(), queries[:, :30], table[:, :30])

    child = tap.copy()
    child.watch(Chunk(turned[:, 30:], (), None, 30, 1.0, table[:, 30:]))

    assert (tap.count, child.count) == (26, 46)
    assert_moments(tap, loops(queries[:, :30]))
    assert_moments(child, loops(queries))


def test_nothing_watched_is_said():
    with pytest.raises(WorkError, match="no query was seen yet"):
        _ = QueryMoments().mean
    with pytest.raises(WorkError, match="no query was seen yet"):
        _ = QueryMoments().covariance

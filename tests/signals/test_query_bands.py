"""Statistics of queries per frequency band against plain loops, and the frequencies against the ones put in."""

from __future__ import annotations

import cmath

import pytest
import torch

from wakesight.errors import WorkError
from wakesight.learning.query_statistics import collect, taps
from wakesight.signals.chunk import Chunk
from wakesight.signals.query_bands import QueryBands, bands
from wakesight.signals.rope import rotate

HEADS = 3


def queries(tokens: int, dim: int = 12, seed: int = 0) -> torch.Tensor:
    """Before RoPE: float64 [query_head, token, dim], around a mean that is not 0."""
    noise = torch.Generator().manual_seed(seed)
    centre = torch.randn(HEADS, 1, dim, generator=noise, dtype=torch.float64) * 2
    return torch.randn(HEADS, tokens, dim, generator=noise, dtype=torch.float64) + centre


def frequencies(rotary_dim: int, base: float = 1e4) -> torch.Tensor:
    half = rotary_dim // 2
    return torch.tensor([base ** -(i / half) for i in range(half)], dtype=torch.float64)


def rotation(start: int, stop: int, omega: torch.Tensor, factor: float = 1.0, dtype=torch.float64) -> torch.Tensor:
    angles = torch.arange(start, stop, dtype=dtype)[:, None] * omega.to(dtype)
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2) * factor


def overheard(tap: QueryBands, rows: torch.Tensor, omega, sizes, start: int = 0, factor: float = 1.0) -> QueryBands:
    """One text in chunks, from position `start`; omega None: a layer without RoPE."""
    at = 0
    for size in sizes:
        piece = rows[:, at : at + size]
        table = None if omega is None else rotation(start + at, start + at + size, omega, factor)
        turned = piece if table is None else rotate(piece, *table)
        tap.watch(Chunk(turned, (), None, start + at, 1.0, table))
        at += size
    return tap


def loops(rows: torch.Tensor, rotary_dim: int) -> tuple[list, list]:
    """Mean complex query and mean absolute value of every band, one row after the other: [head][band]."""
    half, dim = rotary_dim // 2, rows.shape[2]
    rest = (dim - rotary_dim + 1) // 2
    pairs = [(i, i + half) for i in range(half)] + [(rotary_dim + x, rotary_dim + x + rest) for x in range(rest)]
    means, sizes = [], []
    for head in rows.tolist():
        values = [[complex(row[a], row[b] if b < dim else 0.0) for a, b in pairs] for row in head]
        means.append([sum(row[f] for row in values) / len(values) for f in range(len(pairs))])
        sizes.append([sum(abs(row[f]) for row in values) / len(values) for f in range(len(pairs))])
    return means, sizes


def assert_statistics(tap: QueryBands, rows: torch.Tensor, rotary_dim: int) -> None:
    found = tap.statistics
    means, sizes = loops(rows, rotary_dim)
    assert tap.count == rows.shape[1]
    assert found.mean.dtype == found.size.dtype == torch.float32
    expected = torch.view_as_real(torch.tensor(means, dtype=torch.complex128)).float()
    torch.testing.assert_close(found.mean, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.size, torch.tensor(sizes), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotary_dim", [None, 12, 4, 2])
@pytest.mark.parametrize("sizes", [[60], [2, 1, 30, 27], [1, 59], [1] * 60])
def test_means_are_those_of_the_rows_before_rope_in_any_chunking(rotary_dim, sizes):
    rows = queries(60)

    tap = overheard(QueryBands(), rows, None if rotary_dim is None else frequencies(rotary_dim), sizes)

    assert_statistics(tap, rows, rotary_dim or 0)
    assert tap.statistics.rotary == (rotary_dim or 0) // 2


@pytest.mark.parametrize("dim", [11, 13])
def test_an_odd_dim_without_rope_is_paired_with_nothing(dim):
    rows = queries(20, dim)

    assert_statistics(overheard(QueryBands(), rows, frequencies(4), [20]), rows, 4)


def test_texts_are_merged():
    first, second, omega = queries(50), queries(70, seed=1), frequencies(4)

    tap = overheard(overheard(QueryBands(), first, omega, [50], start=3), second, omega, [40, 30], start=3)

    assert_statistics(tap, torch.cat([first, second], dim=1), 4)


def test_long_chunks_are_taken_in_blocks():
    rows = queries(2500, dim=6)

    assert_statistics(overheard(QueryBands(), rows, frequencies(4), [2500]), rows, 4)


@pytest.mark.parametrize("start", [0, 7, 1000])
@pytest.mark.parametrize("base", [100.0, 1e4, 1e7])
def test_frequencies_come_from_the_rotation(start, base):
    omega = frequencies(8, base)

    tap = overheard(QueryBands(), queries(300), omega, [100, 150, 50], start=start)

    found = tap.statistics.omega
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.cat([omega, torch.zeros(2)]).double(), rtol=1e-9, atol=1e-13)


def test_frequencies_of_float32_tables_hold_far_ahead():
    """Angles in float32 are rounded at large positions; what is recovered must still be right 65,536 positions on."""
    omega, tap = frequencies(64), QueryBands()
    for start in range(0, 8192, 512):
        table = rotation(start, start + 512, omega.float(), dtype=torch.float32)
        tap.watch(Chunk(torch.ones(1, 512, 64), (), None, start, 1.0, table))

    ahead = (tap.statistics.omega - omega.float().double()).abs() * 65_536
    assert ahead.max() < 1e-3  # radians


def test_a_frequency_of_zero_inside_the_rotated_dims_stays_zero():
    omega = torch.tensor([1.0, 0.1, 0.0, 0.0], dtype=torch.float64)

    found = overheard(QueryBands(), queries(64), omega, [64]).statistics

    assert found.rotary == 4
    torch.testing.assert_close(found.omega[:4], omega, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_square_of_the_attention_factor_is_measured_and_taken_off_the_queries(factor):
    rows = queries(40)

    tap = overheard(QueryBands(), rows, frequencies(4), [10, 30], factor=factor)

    assert tap.statistics.scale == pytest.approx(factor**2)
    assert_statistics(tap, rows, 4)


def test_a_layer_without_rope_has_no_frequencies():
    found = overheard(QueryBands(), queries(9), None, [9]).statistics

    assert (found.rotary, found.scale) == (0, 1.0)
    assert not found.omega.any()
    assert found.omega.shape == (6,)


def test_one_row_far_from_the_start_does_not_decide_a_frequency():
    omega, rows = frequencies(4), queries(40)

    tap = overheard(QueryBands(), rows, omega, [1, 39], start=500)

    torch.testing.assert_close(tap.statistics.omega[:2], omega, rtol=1e-9, atol=1e-12)
    assert_statistics(tap, rows, 4)


def test_frequencies_that_change_with_the_length_are_refused():
    tap = overheard(QueryBands(), queries(100), frequencies(4), [100])

    with pytest.raises(WorkError, match="radians off before position 200: its angle is not in proportion"):
        overheard(tap, queries(100), frequencies(4) / 4, [100], start=100)


def test_another_rotated_width_is_refused():
    tap = overheard(QueryBands(), queries(10), frequencies(4), [10])

    with pytest.raises(WorkError, match="turned 4 dims of this layer and now 0"):
        overheard(tap, queries(10), None, [10])


def test_a_copy_reads_on_alone():
    rows, omega = queries(50), frequencies(4)
    tap = overheard(QueryBands(), rows[:, :30], omega, [30])

    child = overheard(tap.copy(), rows[:, 30:], omega, [20], start=30)

    assert_statistics(tap, rows[:, :30], 4)
    assert_statistics(child, rows, 4)


def test_nothing_watched_is_said():
    with pytest.raises(WorkError, match="no query was seen yet"):
        _ = QueryBands().statistics
    with pytest.raises(WorkError, match="no query was seen yet"):
        collect(taps(1))


def test_bands_turn_by_their_frequency():
    """Rotating dims and multiplying bands by e^(i omega p) are the same thing."""
    rows, omega = queries(5), frequencies(8)
    turned = torch.view_as_complex(bands(rotate(rows, *rotation(3, 8, omega)), 8))
    still = torch.view_as_complex(bands(rows, 8))

    for token in range(5):
        for band, w in enumerate([*omega.tolist(), 0.0, 0.0]):
            expected = still[:, token, band] * cmath.exp(1j * w * (3 + token))
            torch.testing.assert_close(turned[:, token, band], expected)


def test_collected_statistics_are_named_by_layer():
    both, omega = taps(2), frequencies(4)
    overheard(both[0], queries(30), omega, [30])
    overheard(both[1], queries(30, dim=8, seed=2), None, [30])

    found = collect(both)

    assert {name: (list(t.shape), t.dtype) for name, t in found.items()} == {
        "mean.0": ([3, 6, 2], torch.float32), "abs.0": ([3, 6], torch.float32), "omega.0": ([6], torch.float64),
        "scale.0": ([], torch.float64), "rotary.0": ([], torch.int64),
        "mean.1": ([3, 4, 2], torch.float32), "abs.1": ([3, 4], torch.float32), "omega.1": ([4], torch.float64),
        "scale.1": ([], torch.float64), "rotary.1": ([], torch.int64),
    }  # fmt: skip
    assert torch.equal(found["mean.0"], both[0].statistics.mean)
    assert (int(found["rotary.0"]), int(found["rotary.1"])) == (2, 0)

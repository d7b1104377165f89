"""rho, overlap and coverage against loops and scipy."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from wakesight.learning import metrics

ROWS, ENTRIES = 5, 47


def drawn(kind: str, seed: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    if kind == "ties":
        return torch.randint(0, 6, (ROWS, ENTRIES), generator=noise).float()
    if kind == "constant":
        return torch.full((ROWS, ENTRIES), 0.5)
    return torch.randn(ROWS, ENTRIES, generator=noise)


def loop_top(values: list[float], k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


@pytest.mark.parametrize("first", ["plain", "ties"])
@pytest.mark.parametrize("second", ["plain", "ties"])
def test_rho_is_scipys_and_ranks_are_averaged(first, second):
    a, b = drawn(first, 1), drawn(second, 2)

    for row in range(ROWS):
        assert metrics.average_ranks(a)[row].tolist() == stats.rankdata(a[row].numpy()).tolist()
        assert float(metrics.spearman(a, b)[row]) == pytest.approx(stats.spearmanr(a[row], b[row]).statistic, abs=1e-12)


def test_a_constant_orders_nothing():
    assert metrics.spearman(drawn("constant", 0), drawn("plain", 1)).tolist() == [0.0] * ROWS


@pytest.mark.parametrize("kinds", [("plain", "plain"), ("ties", "plain"), ("plain", "ties"), ("constant", "ties")])
@pytest.mark.parametrize("k_frac", [0.0, 0.1, 0.5, 1.0])
def test_overlap_and_coverage_are_the_loops(kinds, k_frac):
    predicted, utility = drawn(kinds[0], 3), drawn(kinds[1], 4).abs()
    k = max(4, math.floor(k_frac * ENTRIES))
    together = metrics.measures(predicted, utility, k_frac)

    for row in range(ROWS):
        guess, truth = loop_top(predicted[row].tolist(), k), loop_top(utility[row].tolist(), k)
        overlap = len(set(guess) & set(truth)) / k
        coverage = sum(float(utility[row, i]) for i in guess) / sum(float(utility[row, i]) for i in truth)
        assert float(metrics.overlap(predicted, utility, k_frac)[row]) == overlap
        assert float(metrics.coverage(predicted, utility, k_frac)[row]) == pytest.approx(coverage, rel=1e-12)
        assert together[row, 1:].tolist() == pytest.approx([overlap, coverage], rel=1e-12)


@pytest.mark.parametrize(("entries", "k_frac", "k"), [(100, 0.29, 29), (3, 0.1, 3), (39, 0.1, 4), (1000, 0.1, 100)])
def test_k_is_at_least_4_and_floors_what_was_meant(entries, k_frac, k):
    assert metrics.best_count(entries, k_frac) == k


def test_ties_go_to_the_lower_index():
    assert metrics.top(torch.tensor([[1.0, 2, 2, 0, 2]]), 2).tolist() == [[1, 2]]


def test_a_head_without_utility_counts_as_covered():
    assert metrics.coverage(drawn("plain", 0), torch.zeros(ROWS, ENTRIES)).tolist() == [1.0] * ROWS

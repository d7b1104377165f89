"""Rows from counts, and seconds from fetches, by hand."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wakesight.errors import RequestError
from wakesight.simulate.costs import CostModel
from wakesight.simulate.sweep import Run, rows, sweep
from wakesight.simulate.tally import Tally, row
from wakesight.testing.wants import random_wants


def tally(accesses, misses, first, fetches, resident, start=0, reversible=True):
    return Tally(*(np.array(x) for x in (accesses, misses, first, fetches, resident)), start, reversible)


ONE = tally([4, 4], [0, 2], [4, 1], [0, 2], [3, 4])
TWO = tally([1, 1, 2], [0, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 2])


def test_a_row_sums_counts_and_averages_memory_over_runs():
    costs = CostModel(bandwidth=1000, latency=0.5, overlap=0.5, step_time=1.0, page_bytes=500)
    found = row("reactive", 8, [ONE, TWO], costs)
    assert asdict(found) == {
        "policy": "reactive", "budget": 8, "runs": 2, "accesses": 12, "misses": 4, "miss_rate": 4 / 12,
        "first_touches": 7, "fetches": 3, "mean_resident_pages": (3.5 + 4 / 3) / 2, "peak_resident_pages": 4,
        "bytes_in": 1500, "bytes_out": ((5 + 2 - 4) + (2 + 1 - 2)) * 500, "stall_steps": 2,
        # 2 pages: 0.5 + 1.0 - 0.5 s; 1 page: 0.5 + 0.5 - 0.5 s
        "stall_seconds": 1.5,
    }  # fmt: skip


def test_pooled_rows_are_sums_of_the_runs():
    pytest.importorskip("numba")
    runs = [Run(f"r{seed}", "m / niah", random_wants(seed, units=2)) for seed in range(3)]
    cells = sweep(runs, ["reactive", "evict", "frozen", "full"], [2, 5])
    pooled, single = list(rows(cells, CostModel())), list(rows(cells, CostModel(), per_run=True))
    assert [(one["policy"], one["budget"]) for one in pooled] == [
        ("reactive", 2), ("reactive", 5), ("evict", 2), ("evict", 5), ("frozen", 2), ("frozen", 5), ("full", None)
    ]  # fmt: skip
    for one in pooled:
        same = [r for r in single if (r["policy"], r["budget"]) == (one["policy"], one["budget"])]
        assert [r["run"] for r in same] == ["r0", "r1", "r2"]
        for name in ("accesses", "misses", "first_touches", "fetches", "bytes_in", "bytes_out", "stall_steps", "runs"):
            assert one[name] == sum(r[name] for r in same), name
        assert one["stall_seconds"] == pytest.approx(sum(r["stall_seconds"] for r in same))
        assert one["mean_resident_pages"] == pytest.approx(np.mean([r["mean_resident_pages"] for r in same]))
        assert one["peak_resident_pages"] == max(r["peak_resident_pages"] for r in same)


def test_combos_are_pooled_apart():
    pytest.importorskip("numba")
    runs = [Run("a", "m / niah", random_wants(0)), Run("b", "m / recall", random_wants(1))]
    found = list(rows(sweep(runs, ["reactive"], [3]), CostModel()))
    assert [(one["combo"], one["runs"]) for one in found] == [("m / niah", 1), ("m / recall", 1)]


@given(st.lists(st.integers(0, 100), min_size=1), st.floats(0, 1), st.floats(0, 0.1))
def test_a_step_without_fetches_never_stalls_and_more_fetches_never_stall_less(fetches, overlap, latency):
    costs = CostModel(bandwidth=1e6, latency=latency, overlap=overlap, step_time=0.1)
    stalls = costs.stall(np.array(fetches))
    assert (stalls[np.array(fetches) == 0] == 0).all()
    assert (stalls >= 0).all()
    order = np.argsort(fetches, kind="stable")
    assert (np.diff(stalls[order]) >= 0).all()


def test_the_papers_bar_is_a_fiftieth_of_a_millisecond():
    assert CostModel().stall(np.array([64]))[0] == pytest.approx(0.022e-3, rel=0.01)


@pytest.mark.parametrize(
    ("given_costs", "says"),
    [
        ({"bandwidth": 0}, "--bandwidth-gbps"),
        ({"bandwidth": math.nan}, "--bandwidth-gbps"),
        ({"latency": -1}, "--latency-us"),
        ({"step_time": math.inf}, "--step-ms"),
        ({"overlap": 1.1}, "--overlap"),
        ({"page_bytes": 0}, "page_bytes=0"),
    ],
)
def test_bad_costs_are_refused(given_costs, says):
    with pytest.raises(RequestError, match=says):
        CostModel(**given_costs)


@pytest.mark.parametrize(
    ("specs", "budgets", "attention", "says"),
    [
        ([], [3], True, "no policy"),
        (["reactive"], [], True, "no budget"),
        (["reactive", "full"], [0], True, "holds nothing"),
        (["reactiv"], [3], True, "did you mean 'reactive'"),
        (["reactive:snapkv"], [3], False, "has not logged"),
    ],
)
def test_bad_sweeps_are_refused(specs, budgets, attention, says):
    with pytest.raises(RequestError, match=says):
        sweep([Run("a", "m / niah", random_wants(0), attention)], specs, budgets)
    with pytest.raises(RequestError, match="no run"):
        sweep([], ["full"], [])


def test_without_prompt_attention_frozen_starts_empty():
    pytest.importorskip("numba")
    trace = random_wants(2)
    with_it, without = (sweep([Run("a", "c", trace, flag)], ["frozen"], [3])[0].tallies[0] for flag in (True, False))
    assert with_it.start > without.start == 0

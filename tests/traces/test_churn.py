"""Churn: the measures by hand, the fast bodies against loops over sets, planted changes found and no others."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.errors import RequestError
from wakesight.testing.planted_traces import planted_trace
from wakesight.traces import churn, overlap
from wakesight.traces import study_reference as loops
from wakesight.traces.events import DriftRule, drift
from wakesight.traces.page_sets import by_combo, longest_stretch, read_run

PAGES = 70  # more than the bits of one word


def pack(*sets):
    """Page sets as words uint64 [set, word]."""
    most = max(map(len, sets), default=0)
    padded = np.full((len(sets), max(most, 1)), -1)
    for row, pages in zip(padded, sets, strict=True):
        row[: len(pages)] = sorted(pages)
    return overlap.pack(padded, PAGES)


def counts(first, second):
    a, b = pack(first, second)
    return overlap.shared(a, b), overlap.size(a), overlap.size(b)


sets = st.frozensets(st.integers(0, PAGES - 1), max_size=12)


def test_jaccard_by_hand():
    assert overlap.jaccard(*counts({1, 2, 3}, {2, 3, 69})) == 0.5
    assert overlap.jaccard(*counts({1}, set())) == 0
    assert math.isnan(overlap.jaccard(*counts(set(), set())))


def test_rco_by_hand():
    # K = 2, N = 10: half shared, chance 0.2 -> (0.5 - 0.2) / 0.8
    assert overlap.rco(*counts({1, 2}, {2, 3}), np.int64(10)) == pytest.approx(0.375)
    assert overlap.rco(*counts({1, 2}, {3, 4}), np.int64(10)) == 0  # below chance is not negative
    assert overlap.rco(*counts({1, 2}, {1, 2, 3, 4}), np.int64(10)) == 1  # the smaller set lies within the larger
    everything = set(range(5))
    assert overlap.rco(*counts(everything, everything), np.int64(5)) == 1  # K = N
    assert overlap.rco(*counts({0, 1}, {2, 3}), np.int64(2)) == 0
    assert overlap.rco(*counts(set(), {1}), np.int64(5)) == 0
    assert overlap.rco(*counts(set(), set()), np.int64(5)) == 1


@given(sets, sets, st.integers(1, PAGES))
def test_measures_equal_the_loops(first, second, pages):
    found = counts(first, second)
    plain = loops.jaccard(first, second)
    assert math.isnan(overlap.jaccard(*found)) if plain is None else overlap.jaccard(*found) == plain
    assert overlap.overlap(*found) == loops.overlap(first, second)
    assert overlap.rco(*found, np.int64(pages)) == pytest.approx(loops.rco(first, second, pages), abs=1e-12)


@given(st.lists(st.lists(st.integers(-1, PAGES - 1), min_size=6, max_size=6), min_size=1, max_size=5))
def test_packed_sets_hold_the_pages_and_no_padding(rows):
    words = overlap.pack(np.array(rows), PAGES)
    for row, bits in zip(rows, words, strict=True):
        held = {64 * word + bit for word, value in enumerate(bits.tolist()) for bit in range(64) if value >> bit & 1}
        assert held == {page for page in row if page >= 0}


@settings(max_examples=60)
@given(st.data(), st.integers(2, 5), st.integers(1, 6), st.sampled_from([0.3, 0.5, 0.9]))
def test_stability_and_drift_equal_the_loops(data, chunk, window, least):
    steps = data.draw(st.integers(1, 24))
    rows = [data.draw(st.lists(sets, min_size=steps, max_size=steps)) for _ in range(2)]  # [head][step]
    pages = data.draw(st.lists(st.integers(12, PAGES), min_size=steps, max_size=steps))
    words = np.stack([pack(*head) for head in rows], axis=1)

    steady = churn.stability(words, np.array(pages), chunk)
    adjacent = churn.adjacent_rco(words, np.array(pages))
    level, event = drift(words, DriftRule(window, least))

    for head, one in enumerate(rows):
        beside = [loops.rco(*one[step - 1 : step + 1], pages[step]) for step in range(1, steps)]
        assert adjacent[:, head].tolist() == pytest.approx(beside, abs=1e-12)
        assert steady[:, head].tolist() == pytest.approx(loops.stability(one, pages, chunk), abs=1e-12)
        levels, events = loops.drift(one, DriftRule(window, least))
        assert level[:, head].tolist() == pytest.approx(levels, abs=1e-12)
        assert event[:, head].tolist() == events


def test_a_drift_event_needs_a_full_window_and_moves_the_baseline():
    home, away = {1, 2}, {3, 4}
    words = pack(*[home] * 3, *[away] * 20)[:, None]
    level, event = drift(words, DriftRule(window=4, least=0.5))
    # the median of 1, 0, 0, 0 is below one half; that of 1, 1, 0, 0 is not
    assert np.flatnonzero(event[:, 0]).tolist() == [5]
    assert level[4:7, 0].tolist() == [0.5, 1.0, 0.0]
    assert not drift(pack(home, *[away] * 2)[:, None], DriftRule(window=4))[1].any()


def test_a_head_is_active_above_the_threshold_or_when_it_copies():
    trace = planted_trace(0, steps=1, layers=1, heads=3)
    trace.needle[:] = [[[0.125, 0.13, 0.0]]]
    trace.copy[:] = [[[False, False, True]]]
    found = churn.active_sets(read_run(trace), churn.ChurnRule(active=0.125))
    assert found["continuous"].tolist() == [[False, True, False]]
    assert found["binary"].tolist() == [[False, False, True]]


def test_active_sets_that_are_both_empty_are_skipped():
    active = np.array([[0, 0], [0, 0], [1, 0], [1, 1], [0, 1]], bool)
    found = churn.active_jaccard(active)
    assert math.isnan(found[0])
    assert found[1:].tolist() == [0, 0.5, 0.5]


def test_the_wanted_sets_of_a_trace_are_the_pages_of_its_positions():
    trace = planted_trace(3, steps=9)
    run = read_run(trace)
    for step in range(9):
        for head in range(6):
            pages = loops.page_set(trace.topk_idx[step, head // 3, head % 3].tolist(), 16)
            assert (run.words[step, head] == overlap.pack(np.array(sorted(pages)), int(run.pages.max()))).all()
            weights = trace.topk_val[step, head // 3, head % 3].tolist()
            assert run.entropy[step, head] == pytest.approx(loops.entropy(weights))
    assert run.pages.tolist() == [math.ceil((1280 + step) / 16) for step in range(9)]


def test_reading_in_blocks_changes_nothing(monkeypatch):
    trace = planted_trace(3, steps=11)
    whole = read_run(trace)
    monkeypatch.setattr("wakesight.traces.page_sets.BLOCK", 1000)
    parts = read_run(trace)
    assert (whole.words == parts.words).all()
    assert (whole.entropy == parts.entropy).all()


def test_a_head_that_moves_drifts_once_and_no_other_does():
    runs = [read_run(planted_trace(seed, steps=160, moves=[(60, 1, 2, 40)])) for seed in range(3)]
    found = churn.churn(runs)
    assert [row["drift_events"] for row in found["by_head"]] == [0, 0, 0, 0, 0, 3]
    assert found["drifting"]["value"] == pytest.approx(1 / 6)
    assert found["drifting_in_any_run"] == pytest.approx(1 / 6)
    assert found["chunks"] == 30


def test_heads_that_look_anywhere_are_unstable_and_heads_at_home_are_not():
    trace = planted_trace(1, steps=64, prompt_len=4096)
    noise = np.random.default_rng(0)
    trace.topk_idx[:, 1] = 16 * noise.integers(256, size=trace.topk_idx[:, 1].shape)
    found = churn.churn([read_run(trace)])
    assert [row["stability"] < 0.5 for row in found["by_head"]] == [False] * 3 + [True] * 3
    assert found["unstable"] == {"value": 0.5, "low": None, "high": None}  # one run alone has no interval


def test_jaccard_of_a_combo_pools_steps_and_the_interval_draws_runs():
    still, busy = planted_trace(0, steps=40), planted_trace(1, steps=80)
    still.copy[:] = True
    busy.copy[:] = False
    busy.copy[::2, 0, 0] = True
    busy.copy[1::2, 0, 1] = True
    found = churn.churn([read_run(still), read_run(busy)])
    binary = found["active"]["binary"]
    assert binary["jaccard"]["value"] == pytest.approx(39 / (39 + 79))
    assert (binary["jaccard"]["low"], binary["jaccard"]["high"]) == (0, 1)
    assert [one["jaccard"]["binary"] for one in found["by_run"]] == [1, 0]
    silent = churn.churn([read_run(planted_trace(0, steps=40))])["active"]["binary"]
    assert (silent["jaccard"]["value"], silent["steps_counted"], silent["steps_both_empty"]) == (None, 0, 39)
    assert found == churn.churn([read_run(still), read_run(busy)])  # seeded


def test_short_runs_have_no_stability():
    found = churn.churn([read_run(planted_trace(0, steps=9))])
    assert found["unstable"]["value"] is None
    assert {row["stability"] for row in found["by_head"]} == {None}


def test_the_pooled_stability_of_a_head_weighs_every_chunk_alike():
    runs = [read_run(planted_trace(seed, steps=steps)) for seed, steps in ((0, 16), (1, 48))]
    chunks = np.concatenate([churn.stability(run.words, run.pages) for run in runs])
    assert churn.churn(runs)["by_head"][4]["stability"] == pytest.approx(statistics.fmean(chunks[:, 4]))


def test_runs_are_pooled_by_model_and_regime():
    traces = [planted_trace(0, steps=4, regime="niah"), planted_trace(1, steps=4, regime="recall")]
    assert list(by_combo(traces)) == ["tiny / niah", "tiny / recall"]
    with pytest.raises(RequestError, match="6 and 8 heads"):
        by_combo([planted_trace(0, steps=4), planted_trace(1, steps=4, heads=4)])
    assert len(by_combo([planted_trace(0, steps=4), planted_trace(1, steps=0)])["tiny / planted"]) == 1
    with pytest.raises(RequestError, match="trace record"):
        by_combo([planted_trace(1, steps=0)])


def test_of_a_trace_with_a_gap_the_longest_stretch_is_read():
    trace = planted_trace(2, steps=10)
    object.__setattr__(trace, "step", np.array([0, 1, 2, 8, 9, 10, 11, 12, 20, 21], np.int32))
    run = read_run(trace)
    assert (run.steps, run.left_out) == (5, 5)
    assert (run.tokens == trace.tokens[3:8]).all()
    assert longest_stretch(np.arange(4)) == (0, 4)


def test_damage_is_named():
    trace = planted_trace(2, steps=10)
    trace.topk_idx[7, 0, 0, 0] = 1287
    with pytest.raises(
        RequestError, match="step 7 of the trace planted-2 names position 1287, but its context holds 1287"
    ):
        read_run(trace)
    with pytest.raises(RequestError, match="no decode step"):
        read_run(planted_trace(2, steps=0))

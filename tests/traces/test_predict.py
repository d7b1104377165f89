"""Prediction: the rules by hand, fast bodies against loops, planted wake-ups found, shuffled ones not."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.testing.planted_traces import WORDS, planted_trace
from wakesight.traces import predict as study
from wakesight.traces import study_reference as loops
from wakesight.traces.burstiness import BurstRule, bursts, busiest, coarse_trigger, concentration, fano, scattered
from wakesight.traces.events import Grader, WakeRule, f1, precision, recall, wake_events
from wakesight.traces.markers import MarkerRule, discover, marker_test, two_proportions
from wakesight.traces.page_sets import read_run
from wakesight.traces.thresholds import hindsight

QUIET = [0.0] * 8


def woken(*shares):
    return np.flatnonzero(wake_events(np.array(shares)[:, None])[:, 0]).tolist()


def test_eight_quiet_steps_and_then_a_wake():
    assert woken(*QUIET, 0.21) == [8]
    assert woken(*QUIET[1:], 0.21) == []  # seven are too few
    assert woken(*QUIET, 0.2) == []  # not above the threshold
    assert woken(*QUIET, 0.3, 0.3, *QUIET, 0.3) == [8, 18]  # awake: no second event until it is quiet again


def test_the_quiet_counter_starts_anew_between_the_thresholds_and_at_the_event():
    assert woken(*QUIET[:7], 0.05, 0.0, 0.3) == []  # 0.05 is not below 0.05
    assert woken(*QUIET, 0.1, 0.3) == []  # between the thresholds: neither quiet nor awake
    assert woken(*QUIET, 0.3, *QUIET[:7], 0.3) == [8]
    assert woken(*QUIET, 0.3, *QUIET, 0.3) == [8, 17]


@given(st.lists(st.sampled_from([0.0, 0.04, 0.05, 0.1, 0.2, 0.21]), min_size=1, max_size=40), st.integers(1, 4))
def test_wake_events_equal_the_counter(shares, quiet):
    rule = WakeRule(quiet=quiet)
    assert wake_events(np.array(shares)[:, None], rule)[:, 0].tolist() == loops.wake_events(shares, rule)


def test_a_z_score_leaves_its_own_step_out():
    values = np.array([0.0, 2.0, 0.0, 2.0, 5.0, 1.0])[:, None]
    found = study.z_scores(values, past=4)[:, 0]
    assert np.isnan(found[:4]).all()
    assert found[4] == pytest.approx(4)  # mean 1, std 1 of the four before; with itself it would be far less
    assert found[5] == pytest.approx((1 - 2.25) / math.sqrt((0.25**2 + 2.25**2 + 0.25**2 + 2.75**2) / 4))  # 2, 0, 2, 5
    flat = study.z_scores(np.array([1.0] * 4 + [1.001])[:, None], past=4)
    assert flat[4, 0] == pytest.approx(1000)  # the floor of the deviation


@given(st.data(), st.integers(1, 5))
def test_trends_and_z_scores_equal_the_loops(data, window):
    number = st.one_of(st.floats(-4, 4, width=32), st.just(math.nan))
    columns = [data.draw(st.lists(number, min_size=12, max_size=12)) for _ in range(2)]
    values = np.array(columns).T
    for fast, slow in (
        (study.trend(values, window), [loops.trend(one, window) for one in columns]),
        (study.z_scores(values, window, 0.01), [loops.z_scores(one, window, 0.01) for one in columns]),
    ):
        np.testing.assert_allclose(fast.T, slow, atol=1e-9)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_no_alarm_knows_what_comes_later(seed):
    """Cutting a run short changes no alarm before the cut."""
    trace = planted_trace(seed, steps=80, layers=1, heads=2, wakes=[(60, 0, 1)], warning=5)
    rule = study.PredictRule(alarm=study.AlarmRule(past=16, z=1.0))
    run = read_run(trace)
    early = dataclasses.replace(
        run, words=run.words[:50], entropy=run.entropy[:50], needle=run.needle[:50], pages=run.pages[:50]
    )
    whole, part = (study.alarms(study.signals(one, rule), rule.alarm) for one in (run, early))
    assert any(one.any() for one in part.values())
    for name, one in part.items():
        assert (whole[name][:50] == one).all()


def test_grading_at_lead_32():
    events, alarms = np.zeros((100, 2), bool), np.zeros((100, 2), bool)
    events[50] = True
    alarms[18, 0] = True  # 32 steps before: the first that counts
    alarms[17, 1] = alarms[50, 1] = True  # 33 before, and at the event itself: neither counts
    found = Grader(events, 32).tally(alarms)
    assert found.tolist() == [[1, 1, 1, 1], [2, 0, 1, 0]]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30), st.integers(1, 6))
def test_grades_equal_the_loops(steps, lead):
    alarms, events = zip(*steps, strict=True)
    found = Grader(np.array(events)[:, None], lead).tally(np.array(alarms)[:, None])
    assert found.tolist() == [loops.tally(alarms, events, lead)]


def test_marks_of_a_tally():
    counts = np.array([[4, 1, 2, 1], [0, 0, 2, 0], [3, 0, 0, 0], [3, 0, 2, 0]], float)
    np.testing.assert_array_equal(precision(counts), [0.25, math.nan, 0, 0])
    np.testing.assert_array_equal(recall(counts), [0.5, 0, math.nan, 0])
    np.testing.assert_allclose(f1(counts), [1 / 3, 0, math.nan, 0])


PLANTED = [(60, 0, 1), (100, 1, 2), (101, 0, 0), (150, 0, 1), (180, 1, 0)]


def test_planted_wake_ups_and_no_others_are_found():
    run = read_run(planted_trace(5, wakes=PLANTED))
    assert sorted((step, head // 3, head % 3) for step, head in np.argwhere(wake_events(run.needle))) == PLANTED


def test_a_head_that_looks_away_before_it_wakes_is_predicted():
    runs = [read_run(planted_trace(seed, wakes=PLANTED, warning=6)) for seed in range(3)]
    found = study.predict(runs)
    assert found["events"] == 15
    assert found["detectors"]["page_change"]["recall"]["value"] == 1
    assert found["detectors"]["page_change"]["precision"]["value"] > 0.3
    assert found["detectors"]["chance"]["precision"]["value"] < 0.15
    assert found["hindsight"]["page_change"]["oracle"]["f1"]["value"] == 1
    assert json.loads(json.dumps(found, allow_nan=False)) is not None


def test_without_a_warning_alarms_are_worth_what_chance_is():
    """The same alarms against events scattered at random steps."""
    noise = np.random.default_rng(1)
    wakes = [(int(step), layer, head) for layer in range(2) for head in range(3)
             for step in range(40, 400, 40) + noise.integers(-12, 12, 9)]  # fmt: skip
    found = study.predict([read_run(planted_trace(seed, steps=400, wakes=wakes)) for seed in range(4)])
    chance = found["detectors"]["chance"]["precision"]["value"]
    for name in ("page_change", "entropy_trend"):
        assert found["detectors"][name]["precision"]["value"] == pytest.approx(chance, abs=0.08)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_hindsight_is_ordered_and_true_to_its_tallies(seed, candidates):
    """A threshold per head is never worse than one for all, and that never worse than no alarm."""
    noise = np.random.default_rng(seed)
    signals = [noise.normal(size=(40, 3)) * [1, 5, 50] for _ in range(2)]
    graders = [Grader(noise.random((40, 3)) < 0.05, 4) for _ in range(2)]
    found = hindsight(signals, graders, candidates)
    marks = {name: np.nan_to_num(f1(tally.sum(axis=0).astype(float))) for name, tally in found.items()}
    assert marks["oracle"] >= marks["raw_global"] >= 0
    for tally in found.values():
        assert (tally[:, 2] == [grader.events.sum() for grader in graders]).all()
        assert (tally[:, 1] <= tally[:, 0]).all()
        assert (tally[:, 3] <= tally[:, 2]).all()


def test_heads_of_other_scales_need_thresholds_of_their_own():
    steps = np.arange(60)
    signals = [np.stack([(steps % 10 == 0) * 1.0, 100 + (steps % 10 == 5) * 1.0], axis=1)]
    events = np.stack([steps % 10 == 1, steps % 10 == 6], axis=1)
    found = hindsight(signals, [Grader(events, 1)])
    assert f1(found["oracle"][0].astype(float)) == 1
    assert f1(found["raw_global"][0].astype(float)) < 1


def test_the_ensemble_needs_two_of_four():
    def column(*ones):
        values = np.zeros((34, 1))
        values[33] = 9.0 * len(ones)
        return values

    quiet, loud = column(), column(1)
    rule = study.AlarmRule()
    one = study.alarms({"a": loud, "b": quiet, "c": quiet, "d": quiet}, rule)
    two = study.alarms({"a": loud, "b": loud, "c": quiet, "d": quiet}, rule)
    assert (one["ensemble"].sum(), two["ensemble"].sum()) == (0, 1)


def test_a_short_run_has_events_and_no_alarm():
    found = study.predict([read_run(planted_trace(0, steps=30, wakes=[(20, 0, 0)]))])
    assert (found["events"], found["silent_steps"]) == (1, 1.0)
    drift = found["detectors"]["drift"]
    assert (drift["alarms"], drift["precision"]["value"], drift["recall"]["value"]) == (0, None, 0)


def test_a_run_without_events_says_so():
    found = study.predict([read_run(planted_trace(0, steps=60))])
    assert (found["events"], found["best_signal"], found["bursts"]["z"]["value"]) == (0, None, None)
    assert found["detectors"]["chance"]["recall"]["value"] is None
    assert found["markers"]["found"] == []
    assert json.loads(json.dumps(found, allow_nan=False)) is not None


def test_two_proportions_by_hand():
    # 8 of 10 against 12 of 40, pooled 20 of 50: 0.5 / sqrt(0.24 * (1/10 + 1/40))
    assert two_proportions(8, 10, 20, 50) == pytest.approx(0.5 / math.sqrt(0.24 * 0.125))
    assert two_proportions(5, 5, 5, 5) == 0
    assert two_proportions(0, 5, 0, 9) == 0


def test_bonferroni_counts_the_tokens_that_were_tested():
    rare = [3] * 4
    tokens = np.array([1] * 10 + [2] * 40 + rare)
    followed = np.array([True] * 8 + [False] * 2 + [True] * 12 + [False] * 28 + [False] * 4)
    tested, found = discover(tokens, followed, MarkerRule(alpha=0.05))
    assert tested == 2
    assert [one["token"] for one in found] == [1]
    strict = found[0]["p"] * 2 * 0.999
    assert discover(tokens, followed, MarkerRule(alpha=strict))[1] == []  # p must be below alpha / 2


def test_which_tokens_are_tested():
    """Five times are enough, four are not; steps whose next eight reach into the second half are no evidence."""
    tokens = np.array([1] * 5 + [2] * 4 + [3] * 3 + [4] * 8 + [5] * 20)
    found = marker_test([tokens], [np.zeros((40, 2), bool)])
    assert (found["tested"], found["base_rate"]) == (1, 0)


def marked_runs(count=4, marker=WORDS + 7):
    """Runs of 400 steps in which a marker comes before each of 16 wake-ups, among few other words."""
    runs = []
    for seed in range(count):
        noise = np.random.default_rng(seed)
        steps = np.arange(20, 400, 24) + noise.integers(0, 8)
        wakes = [(int(step), int(noise.integers(2)), int(noise.integers(3))) for step in steps]
        runs.append(planted_trace(seed, steps=400, wakes=wakes, marker=marker, tokens=noise.integers(30, size=400)))
    return runs


def test_a_planted_marker_survives_and_shuffled_tokens_leave_none():
    runs = [read_run(one) for one in marked_runs()]
    events = [wake_events(run.needle) for run in runs]
    found = marker_test([run.tokens for run in runs], events)
    assert [one["token"] for one in found["found"]] == [WORDS + 7]
    assert found["held_out"]["precision"] == 1
    assert found["held_out"]["recall"] > 0.9
    survived = 0
    for seed in range(20):
        noise = np.random.default_rng(seed)
        survived += len(marker_test([noise.permutation(run.tokens) for run in runs], events)["found"])
    assert survived <= 3  # 20 families of tests at 0.05: one is expected


def test_discovery_sees_no_second_half():
    runs = [read_run(one) for one in marked_runs()]
    events = [wake_events(run.needle) for run in runs]
    before = marker_test([run.tokens for run in runs], events)
    for run, one in zip(runs, events, strict=True):
        run.tokens[200:] = 0
        one[200:] = False
    after = marker_test([run.tokens for run in runs], events)
    assert after["found"] == before["found"]
    assert after["held_out"]["events"] == 0


def test_a_burst_is_found_and_scattered_events_are_none():
    noise = np.random.default_rng(3)
    together, apart = np.zeros((500, 40), bool), np.zeros((500, 40), bool)
    together[100 + noise.integers(-2, 3, 40), np.arange(40)] = True
    apart[noise.integers(500, size=40), np.arange(40)] = True
    assert bursts([together])["z"]["value"] > 10
    assert abs(bursts([apart])["z"]["value"]) < 3
    assert bursts([together])["fano"]["value"] > 5
    assert bursts([together, apart]) == bursts([together, apart])


def test_concentration_fano_and_trigger_by_hand():
    counts = np.array([0, 3, 0, 0, 1, 0, 0, 0, 2, 0])
    assert concentration(counts, 0.2) == 5 / 6
    assert concentration(counts, 0.01) == 0.5  # at least one step
    assert fano(counts) == pytest.approx((14 / 10 - 0.36) / 0.6)
    assert busiest(100, 0.29) == 29
    assert coarse_trigger(counts, 0.1, half_window=3) == ((4, 6), (5, 10))
    assert coarse_trigger(counts, 0.2, half_window=1) == ((5, 6), (6, 10))
    assert coarse_trigger(np.array([1, 0, 0, 1]), 0.25, half_window=0) == ((1, 2), (1, 4))


@given(st.lists(st.integers(0, 10), min_size=1, max_size=5), st.integers(0, 99))
def test_a_scattered_head_keeps_its_events_at_distinct_steps(per_head, seed):
    for head in per_head:
        counts = scattered(np.array([head]), 10, np.random.default_rng(seed))
        assert (counts.sum(), counts.max(initial=0) <= 1) == (head, True)
    assert scattered(np.array(per_head), 10, np.random.default_rng(seed)).sum() == sum(per_head)


def test_scattering_is_uniform():
    noise = np.random.default_rng(0)
    seen = sum(scattered(np.array([3]), 5, noise) for _ in range(2000))
    np.testing.assert_allclose(seen / 2000, 0.6, atol=0.05)


def test_the_coarse_trigger_pools_events_and_has_an_interval():
    events = [np.zeros((100, 4), bool) for _ in range(2)]
    events[0][50] = True
    events[1][[10, 30, 50, 70], range(4)] = True
    found = bursts(events, BurstRule(fractions=(0.01,)))
    (trigger,) = found["triggers"]
    assert trigger["recall"]["value"] == 5 / 8
    assert (trigger["recall"]["low"], trigger["recall"]["high"]) == (0.25, 1)
    assert trigger["steps_covered"]["value"] == pytest.approx((9 + 9) / 200)

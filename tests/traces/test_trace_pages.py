"""Page wants equal plain loops over the log."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import small_trace

from wakesight.errors import RequestError
from wakesight.testing.wants import random_wants
from wakesight.traces import pages
from wakesight.traces.pages import wants_of
from wakesight.traces.schema import STEP_ARRAYS


def reference(trace, page_size, unit, layers):
    """[(layer, [per step [(page, weight), ...] in the promised order])] in plain loops."""
    found = []
    for layer in layers:
        groups = trace.query_heads if unit == "query_head" else trace.kv_heads[layer]
        share = trace.query_heads // groups
        for group in range(groups):
            steps = []
            for step in range(trace.steps):
                weight = defaultdict(float)
                for head in range(group * share, (group + 1) * share):
                    rows = zip(trace.topk_idx[step, layer, head], trace.topk_val[step, layer, head], strict=True)
                    for position, value in rows:
                        if position >= 0:
                            weight[int(position) // page_size] += float(value)
                steps.append(sorted(((np.float32(w), p) for p, w in weight.items())))
            found.append((layer, steps))
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.integers(1, 20), st.sampled_from(["query_head", "kv_head"]), st.integers(1, 9))
def test_wants_equal_plain_loops(seed, page_size, unit, steps):
    trace = small_trace(seed, steps=steps)

    wants = wants_of(trace, page_size, unit)

    expected = reference(trace, page_size, unit, range(trace.layers))
    assert wants.units == len(expected)
    assert wants.layer_of.tolist() == [layer for layer, _ in expected]
    for number, (_, steps_of) in enumerate(expected):
        for step, rows in enumerate(steps_of):
            page, weight = wants.at(number, step)
            assert list(zip(weight, page.tolist(), strict=True)) == rows


def test_blocks_of_steps_change_nothing(monkeypatch):
    trace = small_trace(steps=11)
    whole = wants_of(trace, 4)

    monkeypatch.setattr(pages, "BLOCK", 3)
    parts = wants_of(trace, 4)

    for name in ("offsets", "pages", "weights"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


def test_chosen_layers_keep_their_order_and_units():
    trace = small_trace()

    both, last = wants_of(trace, 4), wants_of(trace, 4, layers=[1])

    assert last.units == trace.query_heads
    for unit in range(last.units):
        for step in range(trace.steps):
            assert np.array_equal(last.at(unit, step)[0], both.at(trace.query_heads + unit, step)[0])


def test_prompt_scores_pool_over_seven_positions_then_sum_by_page():
    trace = small_trace(prompt=37)

    wants = wants_of(trace, 16, "kv_head")

    assert wants.prompt_pages == 3
    unit = 0
    for layer, groups in enumerate(trace.kv_heads):
        share = trace.query_heads // groups
        for group in range(groups):
            mass = trace.prompt_mass[layer, group * share : (group + 1) * share].astype(float).sum(axis=0)
            pooled = [max(mass[max(0, i - 3) : i + 4]) for i in range(37)]
            expected = [sum(pooled[:16]), sum(pooled[16:32]), sum(pooled[32:])]
            assert wants.prompt_scores[unit] == pytest.approx(expected, rel=1e-6)
            unit += 1


@pytest.mark.parametrize("kind", ["query_head", "kv_head"])
def test_a_start_ranks_pages_by_their_best_entry(kind):
    trace = small_trace(prompt=37, scored=32)

    wants = wants_of(trace, 8, kind)

    unit = 0
    for layer, groups in enumerate(trace.kv_heads):
        units = trace.query_heads if kind == "query_head" else groups
        for head in range(units):
            scores = trace.prompt_scores["keydiff"][layer, head * groups // units]
            best = [max(scores[first : first + 8]) for first in range(0, 32, 8)]
            order = sorted(range(4), key=lambda page: -best[page])
            assert np.argsort(-wants.starts["keydiff"][unit], kind="stable").tolist() == [*order, 4]  # 4: no score
            unit += 1
    assert unit == wants.units
    assert all((ranks >= 0).all() for ranks in wants.starts.values())


def test_without_prompt_attention_the_first_step_scores_the_prompt():
    trace = small_trace(mass=False)

    wants = wants_of(trace, 16)

    for unit in range(wants.units):
        expected = np.zeros(3, np.float32)
        page, weight = wants.at(unit, 0)
        expected[page] = weight
        assert np.array_equal(wants.prompt_scores[unit], expected)


def test_pages_in_context_count_the_open_one():
    wants = wants_of(small_trace(prompt=15, steps=3), 16)

    assert wants.pages_in_context.tolist() == [1, 1, 2]


def test_half_precision_weights_are_summed_as_they_are():
    trace = small_trace(dtype="float16")

    wants = wants_of(trace, 16)

    assert wants.weights.dtype == np.float32
    assert wants.weights.sum() == pytest.approx(float(trace.topk_val.astype(float).sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "kv_heads"}, "unknown unit 'kv_heads'.*type query_head or kv_head"),
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"layers": [0, 2]}, "has 2 layers and no layer 2"),
    ],
)
def test_bad_requests_are_named(options, message):
    with pytest.raises(RequestError, match=message):
        wants_of(small_trace(), **options)


def test_a_trace_of_shorter_lists_needs_no_padding_column():
    trace = small_trace(top=3)
    padded = dataclasses.replace(
        trace,
        topk_idx=np.pad(trace.topk_idx, ((0, 0),) * 3 + ((0, 5),), constant_values=-1),
        topk_val=np.pad(trace.topk_val, ((0, 0),) * 3 + ((0, 5),)),
    )

    assert np.array_equal(wants_of(trace, 4).pages, wants_of(padded, 4).pages)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.integers(0, 5), st.integers(1, 30), st.integers(1, 20), st.integers(0, 8))
def test_random_wants_keep_what_page_wants_promise(seed, units, steps, count, per_step):
    wants = random_wants(seed, units, steps, count, per_step)

    assert len(wants.offsets) == units * steps + 1
    for unit in range(units):
        for step in range(steps):
            page, weight = wants.at(unit, step)
            assert len(set(page.tolist())) == len(page) <= per_step
            assert all(0 <= p < wants.pages_in_context[step] for p in page)
            rows = list(zip(weight.tolist(), page.tolist(), strict=True))
            assert rows == sorted(rows)


@pytest.mark.parametrize("mass", [True, False])
def test_a_trace_whose_steps_are_all_gone_has_no_wants(mass):
    trace = small_trace(mass=mass)
    none = {name: getattr(trace, name)[:0] for name in STEP_ARRAYS}

    wants = wants_of(dataclasses.replace(trace, step=trace.step[:0], **none))

    assert (wants.steps, len(wants.pages), wants.offsets.tolist()) == (0, 0, [0])
    assert wants.prompt_scores.any() == mass

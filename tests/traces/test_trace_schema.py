"""Every mistake a log can have is named, with its place."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from small_traces import small_trace

from wakesight.errors import RequestError
from wakesight.traces.schema import check


def changed(name, at, value):
    trace = small_trace()
    array = getattr(trace, name).copy()
    array[at] = value
    return dataclasses.replace(trace, **{name: array})


def test_a_good_trace_passes_unchanged():
    trace = small_trace()

    assert check(trace) is trace
    assert trace.step.tolist() == list(range(9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"needle": np.zeros((9, 2), np.float32)}, r"needle has the shape \[9, 2\]"),
        (
            {"copy": np.zeros((8, 2, 4), bool)},
            r"copy has the shape \[8, 2, 4\]; beside needle it must have \[9, 2, 4\]",
        ),
        ({"tokens": np.zeros(9, np.float32)}, "tokens has the dtype float32; it must hold whole numbers"),
        ({"prompt_mass": np.zeros((2, 4, 36), np.float32)}, r"prompt_mass has the shape .* must have \[2, 4, 37\]"),
        (
            {"prompt_scores": {"keydiff": np.zeros((2, 3, 37), np.float32)}},
            r"prompt_scores\['keydiff'\] has the shape \[2, 3, 37\]; it must have \[2, 4, 37\]",
        ),
        ({"prompt_scores": {"keydiff": np.full((2, 4, 37), np.nan, np.float32)}}, "a score that is not finite"),
        ({"kv_heads": (2, 3)}, r"kv_heads=\[2, 3\] does not fit 2 layers of 4 query heads"),
        ({"kv_heads": (2,)}, r"kv_heads=\[2\] does not fit"),
        ({"page_size": 0}, "page_size=0"),
        ({"prompt_len": 38, "prompt_mass": None}, r"prompt_len=38 and ctx_len\[0\]=37"),
        ({"needle_spans": ((5, 38),)}, r"the needle span \[5, 38\] is not inside the prompt of 37"),
        ({"needle_spans": ((5, 5),)}, r"the needle span \[5, 5\]"),
    ],
)
def test_wrong_shapes_and_numbers_are_named(changes, message):
    with pytest.raises(RequestError, match=message):
        check(dataclasses.replace(small_trace(), **changes))


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("topk_idx", (3, 1, 2, 0), 40, r"position that the step does not see \(step 3, layer 1, head 2\)"),
        ("topk_idx", (3, 1, 2, 0), -2, r"position that the step does not see"),
        ("topk_idx", (0, 0, 1, slice(2)), 7, r"names a position twice \(step 0, layer 0, head 1\)"),
        ("topk_idx", (0, 0, 1), -1, r"a weight without a position \(step 0, layer 0, head 1\)"),
        ("topk_val", (8, 1, 3, 0), np.nan, r"below 0 or not finite \(step 8, layer 1, head 3\)"),
        ("topk_val", (8, 1, 3, 0), -0.5, r"below 0 or not finite"),
        ("topk_val", (2, 0, 0, 0), 1.5, r"sum to more than 1 \(step 2, layer 0, head 0\)"),
        ("needle", (1, 0, 0), np.inf, r"needle is below 0 or not finite \(step 1, layer 0, head 0\)"),
        ("ctx_len", 4, 40, r"ctx_len\[3\]=40 and ctx_len\[4\]=40; every step sees one more"),
    ],
)
def test_wrong_entries_are_named_with_their_place(name, at, value, message):
    with pytest.raises(RequestError, match=message):
        check(changed(name, at, value))

"""The recipe: round trips, sizes, contradictions."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import typing

import numpy
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import wakesight
from wakesight.budget.flat import Flat
from wakesight.budget.pyramid import Pyramid
from wakesight.budget.table import ALLOCATIONS
from wakesight.errors import RequestError
from wakesight.estimator.features import READERS
from wakesight.policy import Policy
from wakesight.scores.keydiff import KeyDiff
from wakesight.scores.knorm import KNorm
from wakesight.scores.snapkv import SnapKV
from wakesight.scores.table import SCORERS, scorer_spec

LAWS = settings(deadline=None, derandomize=True, max_examples=120)
VALUES = {
    int: st.integers(0, 200).map(lambda i: 2 * i + 1),  # odd and positive, which every scorer accepts
    float: st.floats(0, 1) | st.floats(1, 1e6),
    bool: st.booleans(),
    str: st.sampled_from(["", "Once more.", *READERS]),
}


@st.composite
def methods(draw, table):
    """A method of a table with any settings its fields allow."""
    module, _, attribute = table[draw(st.sampled_from(sorted(table)))].partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    hints = typing.get_type_hints(cls)
    fields = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        choices = st.sampled_from(typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else VALUES[hint]
        fields[field.name] = draw(st.one_of(st.just(field.default), choices))
    try:
        return cls(**fields)
    except RequestError:
        reject()  # a value out of this setting's range


SIZES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"keep": st.floats(0, 1, exclude_min=True)}),
    st.fixed_dictionaries({"entries": st.integers(1, 10**6)}),
    st.fixed_dictionaries({"bytes": st.integers(1, 10**12)}),
)
COUNTS = st.fixed_dictionaries({"allocation": st.lists(st.integers(0, 10**6), min_size=1, max_size=8).map(tuple)})
SHARED = st.one_of(SIZES.flatmap(lambda size: methods(ALLOCATIONS).map(lambda rule: {"allocation": rule, **size})))


def through_json(policy: Policy) -> Policy:
    return Policy.from_json(json.loads(json.dumps(policy.to_json())))


@given(methods(SCORERS), st.one_of(SHARED, COUNTS), st.one_of(st.none(), st.integers(0, 999)))
@LAWS
def test_a_policy_survives_json(method, size, protect):
    try:
        policy = Policy(scorer=method, protect=protect, **size)
    except RequestError:
        reject()  # an allocation that takes no such scorer

    back = through_json(policy)

    assert back.scorer_method == policy.scorer_method
    assert back.allocation_rule == policy.allocation_rule
    assert all(getattr(back, f) == getattr(policy, f) for f in ("keep", "entries", "bytes", "protect", "evicted"))
    assert back.to_json() == policy.to_json()


@given(methods(SCORERS), SIZES)
@LAWS
def test_a_policy_of_names_comes_back_equal(method, size):
    policy = Policy(scorer=scorer_spec(method), allocation="pyramid:beta=7", **size)

    assert through_json(policy) == policy
    assert hash(through_json(policy)) == hash(policy)


def test_a_policy_of_objects_comes_back_equal():
    policy = Policy(scorer=KNorm(), allocation=Flat(), keep=0.3)

    assert through_json(policy) == policy


def test_a_policy_is_plain_values_in_json():
    assert Policy(scorer=SnapKV(16), allocation=Pyramid(10.0), keep=0.3, protect=7).to_json() == {
        "scorer": "snapkv:window=16",
        "allocation": "pyramid:beta=10.0",
        "keep": 0.3,
        "entries": None,
        "bytes": None,
        "protect": 7,
        "unit": "entry",
        "evicted": "drop",
        "residency": None,
        "page_size": 16,
        "page_reduce": "max",
    }
    assert Policy.from_json({"scorer": "knorm", "unit": "entry"}) == Policy(scorer="knorm")  # an older record


@given(st.integers(1, 4096), st.sampled_from(["max", "mean", "sum"]), st.sampled_from(["entry", "page"]))
@LAWS
def test_a_policy_by_page_survives_json(page_size, reduce, unit):
    policy = Policy(keep=0.3, unit=unit, page_size=page_size, page_reduce=reduce)

    assert through_json(policy) == policy


def test_numpy_numbers_become_plain_ones():
    policy = Policy(entries=numpy.int64(5), protect=numpy.uint8(3), page_size=numpy.int32(8))

    assert policy == Policy(entries=5, protect=3, page_size=8)
    assert type(policy.entries) is type(policy.protect) is type(policy.page_size) is int
    assert Policy(keep=numpy.float32(0.25)) == Policy(keep=0.25)
    assert type(Policy(keep=numpy.float32(0.25)).keep) is type(Policy(keep=1).keep) is float
    assert type(Policy(bytes=numpy.int64(10**12)).bytes) is int
    counts = Policy(allocation=tuple(numpy.arange(3))).allocation
    assert counts == (0, 1, 2)
    assert all(type(count) is int for count in counts)
    assert through_json(policy) == policy


class ByLayer:
    def per_layer(self, request):
        return (request.per_head,) * request.layers


class ByHead:
    def per_head(self, request, body):
        return body.counts


@pytest.mark.parametrize("rule", [ByLayer(), ByHead()])
def test_an_object_with_either_method_is_an_allocation(rule):
    policy = Policy(allocation=rule, keep=0.3)

    assert policy.allocation_rule is rule
    with pytest.raises(RequestError, match="has no name in our tables"):
        policy.to_json()


def test_json_with_an_unknown_field_is_refused():
    with pytest.raises(RequestError, match="a policy has no field 'kept'; fields: allocation, bytes, entries"):
        Policy.from_json({"kept": 0.3})


def test_the_default_is_keydiff_shared_flat_without_a_size():
    policy = Policy()

    assert policy.scorer_method == KeyDiff()
    assert policy.allocation_rule == Flat()
    assert not policy.has_size


@pytest.mark.parametrize("size", [{"keep": 0.3}, {"entries": 5}, {"bytes": 10**6}])
@pytest.mark.parametrize("other", [{"keep": 0.7}, {"entries": 9}, {"bytes": 10**7}])
def test_a_new_size_replaces_the_old_one(size, other):
    policy = Policy(scorer="snapkv:window=16", protect=3, **size)

    changed = policy.at(**other)

    assert changed == Policy(scorer="snapkv:window=16", protect=3, **other)
    assert changed.has_size
    assert policy == Policy(scorer="snapkv:window=16", protect=3, **size)


def test_other_changes_leave_the_size():
    assert Policy(keep=0.3).at(scorer="knorm") == Policy(scorer="knorm", keep=0.3)
    assert Policy(keep=0.3).at() == Policy(keep=0.3)
    assert Policy(keep=0.3).at(allocation=(1, 2), keep=None) == Policy(allocation=(1, 2))


def test_counts_may_come_as_a_list():
    assert Policy(allocation=[3, 2, 1]) == Policy(allocation=(3, 2, 1))
    assert Policy(allocation=[3, 2, 1]).has_size


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().keep = 0.3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": 0.3, "entries": 5}, "give one size, not keep and entries"),
        ({"keep": 0.3, "entries": 5, "bytes": 9}, "give one size, not keep and entries and bytes"),
        ({"allocation": (1, 2), "keep": 0.3}, "explicit counts is the whole size; leave out keep="),
        ({"allocation": (1, 2.5)}, r"whole numbers per attention layer, got \(1, 2.5\)"),
        ({"allocation": ["1"]}, "whole numbers per attention layer"),
        ({"keep": 0}, "keep=0 is no kept fraction"),
        ({"keep": 1.5}, "keep=1.5 is no kept fraction"),
        ({"keep": math.nan}, "keep=nan is no kept fraction"),
        ({"entries": 0}, "entries=0 must be at least 1"),
        ({"bytes": -3}, "bytes=-3 must be at least 1"),
        ({"protect": -1}, "protect=-1 must not be negative"),
        ({"evicted": "demote"}, "unit='entry' cannot be demoted; use --unit page"),
        ({"evicted": "burn"}, "evicted='burn' is unknown; use evicted='drop' or evicted='demote'"),
        ({"residency": object()}, "is no residency"),
        ({"unit": "token"}, "unit='token' is unknown; use unit='entry' or unit='page'"),
        ({"page_size": 0}, "page_size=0 is no page: it counts consecutive positions, 1 to 4096; 16 is the usual"),
        ({"page_size": 4097, "unit": "page"}, "page_size=4097 is no page"),
        ({"page_reduce": "min"}, "page_reduce='min' is unknown; use 'max' or 'mean' or 'sum'"),
        ({"scorer": "keydif"}, "unknown scorer 'keydif', did you mean 'keydiff'"),
        ({"scorer": "snapkv:kernel=2"}, "odd kernel"),
        ({"allocation": "piramid"}, "unknown allocation 'piramid', did you mean 'pyramid'"),
        ({"allocation": "pyramid:beta=0"}, "must be at least 1"),
        ({"allocation": "ada:alpha=2"}, "alpha=2.0 is no share"),
    ],
)
def test_contradictions_are_refused_before_any_work(fields, message):
    with pytest.raises(RequestError, match=message):
        Policy(**fields)
    with pytest.raises(RequestError, match=message):
        Policy().at(**fields)
    with pytest.raises(RequestError, match=message):
        Policy.from_json(fields)


def test_a_field_no_policy_has_is_refused():
    with pytest.raises(RequestError, match=r"no field among \['kept'\]; fields: scorer, allocation, keep, entries"):
        Policy().at(kept=0.3)


@pytest.mark.parametrize(
    "fields",
    [
        {"entries": 2.5},
        {"entries": "5"},
        {"entries": True},
        {"entries": numpy.bool_(True)},
        {"bytes": "1e6"},
        {"protect": 2.5},
        {"scorer": None},
        {"allocation": 3},
        {"allocation": object()},
        {"allocation": (1, True)},
        {"keep": "0.3"},
        {"keep": True},
        {"keep": 1j},
        {"page_size": None},
        {"page_size": 8.0},
        {"page_reduce": None},
    ],
)
def test_fields_of_the_wrong_type_are_refused(fields):
    with pytest.raises(RequestError):
        Policy(**fields)


def test_the_front_door_names_the_same_class():
    assert wakesight.Policy is Policy


@pytest.mark.parametrize("allocation", ["utility_global", "utility_layer"])
@pytest.mark.parametrize("scorer", ["keydiff", "kvzip", "triattention", "snapkv", "h2o", "streaming"])
def test_utility_of_heads_needs_normalised_scores(scorer, allocation):
    """Also of a scorer whose scores are never below 0: attention weights have no common scale."""
    with pytest.raises(RequestError, match=f"'{scorer}' is none; use --scorer gatesight\\+, or --allocation"):
        Policy(scorer=scorer, allocation=allocation, keep=0.3)
    with pytest.raises(RequestError, match="weighs heads by their utility"):
        Policy(scorer="gatesight+", allocation=allocation, keep=0.3).at(scorer=scorer)


@pytest.mark.parametrize("allocation", ["utility_global", "utility_layer"])
@pytest.mark.parametrize("scorer", ["gatesight", "gatesight+", "random"])
def test_scorers_that_declare_it_are_taken(scorer, allocation):
    assert Policy(scorer=scorer, allocation=allocation, keep=0.3).normalised

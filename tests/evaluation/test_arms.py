"""Which arms a comparison has: methods by allocations, a method's natural one, and a method's own."""

from __future__ import annotations

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.arms import NATURAL, WHOLE, facts_of, make_arms, split_id
from wakesight.residency import Residency


def ids(methods, allocations, keeps=(0.3,), **options) -> list[str]:
    return [arm.id for arm in make_arms(methods, allocations, keeps, **options)]


def test_the_baseline_comes_first_and_then_every_combination_in_order():
    assert ids(["random", "keydiff"], ["flat", "global"], [0.1, 0.5]) == [
        WHOLE,
        *(f"{m}/{a}/drop/{p}" for m in ("random", "keydiff") for a in ("flat", "global") for p in ("0.1", "0.5")),
    ]


def test_natural_is_the_allocation_that_suits_each_scorer():
    methods = ["keydiff", "triattention", "kvzip", "gatesight", "gatesight+", "snapkv:window=16"]
    assert ids(methods, [NATURAL])[1:] == [
        "keydiff/flat/drop/0.3",
        "triattention/flat/drop/0.3",
        "kvzip/global/drop/0.3",
        "gatesight/gate/drop/0.3",
        "gatesight+/utility_global/drop/0.3",
        "snapkv:window=16/flat/drop/0.3",
    ]


def test_natural_stands_beside_others():
    assert ids(["kvzip", "gatesight"], [NATURAL, "flat"])[1:] == [
        "kvzip/global/drop/0.3", "kvzip/flat/drop/0.3", "gatesight/gate/drop/0.3", "gatesight/flat/drop/0.3",
    ]  # fmt: skip


def test_a_method_may_bring_its_own_allocation():
    found = ids(["gatesight@flat", "gatesight@gate:exponent=2", "keydiff", "kvzip@natural"], ["ada", "flat"], [0.2])
    assert found == [
        WHOLE,
        "gatesight/flat/drop/0.2",
        "gatesight/gate:exponent=2.0/drop/0.2",
        "keydiff/ada/drop/0.2",
        "keydiff/flat/drop/0.2",
        "kvzip/global/drop/0.2",
    ]
    for arm in make_arms(["gatesight:reader=age@flat"], ["ada"], [0.2])[1:]:
        facts = facts_of(arm.id)
        assert (facts.method, facts.allocation, facts.keep) == ("gatesight:reader=age", "flat", 0.2)
        assert split_id(arm.id) == (arm.family, 0.2)


@pytest.mark.parametrize(
    ("methods", "allocations", "message"),
    [
        (["kvzip"], [NATURAL, "global"], "the arm kvzip/global/drop/0.3 occurs twice"),
        (["keydiff@flat", "keydiff"], [NATURAL], "the arm keydiff/flat/drop/0.3 occurs twice"),
        (["keydiff@flatt"], ["flat"], "unknown allocation 'flatt', did you mean 'flat'"),
        (["keydiff@"], ["flat"], "unknown allocation ''"),
        (["@flat"], ["flat"], "unknown scorer ''"),
        (["keydiff@flat@ada"], ["flat"], "unknown allocation 'flat@ada'"),
        (["keydif@flat"], ["flat"], "unknown scorer 'keydif', did you mean 'keydiff'"),
        ([], ["flat"], "at least one method"),
        (["keydiff"], [], "at least one method, allocation"),
    ],
)
def test_what_makes_no_sense_is_refused(methods, allocations, message):
    with pytest.raises(RequestError, match=message):
        make_arms(methods, allocations, [0.3])


def test_arms_that_demote_stand_beside_arms_that_drop():
    found = make_arms(["keydiff"], ["flat"], [0.1], evicted=["drop", "demote"], unit=["entry", "page"])

    assert [arm.id for arm in found[1:]] == [
        "keydiff/flat/drop/0.1",
        "keydiff/flat/page16-max/drop/0.1",
        "keydiff/flat/page16-max/demote:match=bytes/0.1",
    ]
    assert [arm.match for arm in found] == ["entries", "entries", "entries", "bytes"]
    facts = facts_of(found[-1].id)
    assert (facts.method, facts.mode, facts.page, facts.keep) == ("keydiff", "demote", "16-max", 0.1)
    settings = Residency(rerank=4, attend=3, reservoir="file:/tmp", wants="oracle")
    (_, arm) = make_arms(["keydiff"], ["flat"], [0.1], evicted=["demote"], residency=settings, match="entries")
    assert arm.id == "keydiff/flat/page16-max/demote:match=entries,attend=3,rerank=4,wants=oracle/0.1"
    assert split_id(arm.id) == (arm.family, 0.1)

"""What a residency may say, and that it survives JSON, alone and in a policy."""

from __future__ import annotations

import json

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wakesight
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.residency import Residency

LAWS = settings(max_examples=50, deadline=None, derandomize=True)
COUNT = st.integers(0, 9)
RESIDENCIES = st.builds(
    Residency,
    pages=st.one_of(st.none(), st.integers(20, 99)),
    attend=st.one_of(st.none(), st.just("all"), st.integers(1, 20)),
    rerank=st.integers(1, 99),
    page_size=st.one_of(st.none(), st.integers(1, 64)),
    wants=st.sampled_from(["sketch", "oracle"]),
    reads=st.sampled_from(["wanted", "resident"]),
    sinks=COUNT,
    recent=COUNT,
    dense_layers=COUNT,
    dense_heads=st.lists(st.tuples(COUNT, COUNT), max_size=4),
    block=st.integers(1, 99),
    reservoir=st.sampled_from(["host", "file:/tmp"]),
    sketch=st.sampled_from(["same", "int8"]),
    first_touch=st.sampled_from(["free", "miss"]),
)


@given(RESIDENCIES)
@LAWS
def test_a_residency_survives_json(residency):
    back = Residency.from_json(json.loads(json.dumps(residency.to_json())))

    assert back == residency
    assert hash(back) == hash(residency)


@given(RESIDENCIES)
@LAWS
def test_a_policy_that_demotes_survives_json(residency):
    policy = Policy(keep=0.3, unit="page", evicted="demote", residency=residency)

    assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


def test_the_usual_one():
    assert Residency() == Residency(
        pages=None, attend=None, rerank=1, page_size=None, wants="sketch", victims="lru", reads="wanted", sinks=1,
        recent=0, dense_layers=0, dense_heads=(), block=32, reservoir="host", inclusive=True, sketch="same",
        first_touch="miss",
    )  # fmt: skip
    assert wakesight.Residency is Residency
    assert Policy(unit="page", evicted="demote").residency == Residency(page_size=16)


def test_numbers_become_plain_and_heads_ascend():
    residency = Residency(pages=numpy.int64(4), dense_heads=[[3, 1], (0, numpy.int32(2)), (3, 1)])

    assert type(residency.pages) is int
    assert residency.dense_heads == ((0, 2), (3, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pages": 0}, "pages=0 must be a whole number of at least 1"),
        ({"pages": True}, "pages=True must be a whole number"),
        ({"attend": 0}, 'attend=0 must be a whole number of at least 1, or "all"'),
        ({"attend": "some"}, "attend='some' must be"),
        ({"pages": 3, "attend": 4}, "attend=4 pages cannot be read where pages=3 are held; lower --attend to 3"),
        ({"rerank": 0}, "rerank=0"),
        ({"rerank": None}, "rerank=None"),
        ({"page_size": 0}, "page_size=0"),
        ({"sinks": -1}, "sinks=-1 must be a whole number of at least 0"),
        ({"recent": 1.5}, "recent=1.5"),
        ({"block": 0}, "block=0"),
        ({"wants": "guess"}, "wants='guess' is unknown; use 'sketch' or 'oracle'"),
        ({"victims": "fifo"}, "victims='fifo' is unknown; use 'lru'"),
        ({"reads": "all"}, "reads='all' is unknown"),
        ({"sketch": "int4"}, "sketch='int4' is unknown"),
        ({"first_touch": "never"}, "first_touch='never' is unknown"),
        ({"inclusive": False}, "is not built; leave it out"),
        ({"reservoir": "disk"}, "reservoir='disk' is unknown; use 'host' or 'file:FOLDER'"),
        ({"dense_heads": (1, 2)}, "must list \\(attention layer, KV head\\) pairs"),
        ({"dense_heads": 3}, "must list"),
        ({"dense_heads": ((0, -1),)}, "must list"),
    ],
)
def test_nonsense_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        Residency(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unit": "entry"}, "moves whole pages, so unit='entry' cannot be demoted; use --unit page"),
        ({"residency": object()}, "is no residency"),
        ({"residency": {"slots": 3}}, "a residency has no field 'slots'"),
        ({"residency": Residency(page_size=32), "page_size": 8}, "page_size=8 and the residency's page_size=32 differ"),
        ({"residency": Residency(page_size=5000)}, "at most 4096"),
        ({"evicted": "drop", "residency": Residency()}, "add --evicted demote"),
    ],
)
def test_a_policy_refuses_what_does_not_go_together(fields, message):
    with pytest.raises(RequestError, match=message):
        Policy(**{"keep": 0.3, "unit": "page", "evicted": "demote", **fields})


def test_there_is_one_page_size():
    small = Policy(unit="page", evicted="demote", keep=0.3, page_size=8)
    large = Policy(unit="page", evicted="demote", keep=0.3, residency=Residency(page_size=32))

    assert (small.page_size, small.residency.page_size) == (8, 8)
    assert (large.page_size, large.residency.page_size) == (32, 32)
    assert large.at(page_size=64).residency.page_size == 64
    assert large.at(keep=0.1).residency == large.residency
    assert large.at(evicted="drop").residency is None


def test_pages_are_a_size():
    assert Policy(unit="page", evicted="demote", residency=Residency(pages=3)).has_size
    assert not Policy(unit="page", evicted="demote", residency=Residency(attend=3)).has_size

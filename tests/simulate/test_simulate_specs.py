"""Names of policies and their settings."""

from __future__ import annotations

import pytest

from wakesight.cache.residency.policies import RKV, Arc, Frozen, FrozenTail, Reactive
from wakesight.errors import RequestError
from wakesight.simulate.specs import POLICIES, policy_of


def test_every_name_gives_its_policy_with_the_defaults():
    for name, target in POLICIES.items():
        policy = policy_of(name)
        assert type(policy).__name__ == target.rpartition(":")[2]
        assert policy == type(policy)()
    assert policy_of("frozen_tail") == FrozenTail() != Frozen()


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("rkv:buffer=8", RKV(buffer=8)),
        ("frozen:interval=4,unstable=0.5", Frozen(interval=4, unstable=0.5)),
        ("frozen:tail_resident=true", Frozen(tail_resident=True)),
        ("reactive:snapkv", Reactive(start="snapkv")),
        ("reactive:snapkv,first_touch=miss", Reactive("snapkv", "miss")),
        ("reactive:first_touch=miss", Reactive(first_touch="miss")),
        ("arc:snapkv", Arc(start="snapkv")),
        ("reactive:keydiff", Reactive(start="keydiff")),
    ],
)
def test_settings_follow_a_colon(spec, policy):
    assert policy_of(spec) == policy


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("lru", "unknown residency policy 'lru'"),
        ("frozn", "did you mean 'frozen'"),
        ("reactive:keydif", "did you mean 'keydiff'"),
        ("rkv:keydiff", "has no setting 'keydiff'"),
        ("rkv:buffer=0", "buffer=0"),
        ("reactive:first_touch=sometimes", "free, miss"),
    ],
)
def test_bad_names_are_refused(spec, says):
    with pytest.raises(RequestError, match=says):
        policy_of(spec)

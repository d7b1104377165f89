"""The list of scorers."""

from __future__ import annotations

import dataclasses
import re

import pytest

from wakesight.errors import RequestError
from wakesight.scores.base import has_probe, reads_of
from wakesight.scores.expected_attention import ExpectedAttention
from wakesight.scores.gatesight import GateSight, GateSightPlus
from wakesight.scores.h2o import H2O
from wakesight.scores.keydiff import KeyDiff
from wakesight.scores.knorm import KNorm
from wakesight.scores.kvzip import KVzip
from wakesight.scores.random import Random
from wakesight.scores.snapkv import SnapKV
from wakesight.scores.streaming import Streaming
from wakesight.scores.table import SCORERS, scorer, scorer_spec
from wakesight.scores.tova import TOVA
from wakesight.scores.triattention import TriAttention

KNOWN = re.escape(", ".join(sorted(SCORERS)))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("random", Random()),
        ("random:seed=-7", Random(-7)),
        ("streaming:sinks=8", Streaming(8)),
        ("knorm", KNorm()),
        ("keydiff:anchor=normalised_mean", KeyDiff("normalised_mean")),
        ("snapkv", SnapKV(32, 7, "max", "mean")),
        ("snapkv:window=16,kernel=5,pooling=avg,group=max", SnapKV(16, 5, "avg", "max")),
        ("tova", TOVA()),
        ("h2o", H2O(32, False, "mean")),
        ("h2o:window=8,normalise=True,group=max", H2O(8, True, "max")),
        ("expected_attention", ExpectedAttention(512, 4, 0.0, True, True)),
        (
            "expected_attention:horizon=64,sinks=0,epsilon=0.01,use_covariance=False,use_values=False",
            ExpectedAttention(64, 0, 0.01, False, False),
        ),
        ("kvzip", KVzip(2000, "")),
        ("kvzip:chunk=500,instruction=Say it again.", KVzip(500, "Say it again.")),
        ("triattention", TriAttention("mean", "max", False, 65_536)),
        ("triattention:aggregate=max,reach=1024", TriAttention("max", reach=1024)),
        ("gatesight", GateSight("signals")),
        ("gatesight:reader=signals+keys", GateSight("signals+keys")),
        ("gatesight+", GateSightPlus("signals+keys")),
        ("gatesight+:reader=hidden+keys", GateSightPlus("hidden+keys")),
    ],
)
def test_a_name_and_its_settings_lead_to_a_scorer(spec, expected):
    assert scorer(spec) == expected
    assert scorer_spec(expected) == spec


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_is_a_hashable_value_that_says_what_it_is_and_reads(name):
    method = scorer(name)

    assert dataclasses.is_dataclass(method)
    assert hash(method) == hash(scorer(name))
    assert has_probe(method) or reads_of(method)
    assert not type(method).__doc__.startswith(f"{type(method).__name__}(")  # a text, not what dataclass writes
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.reads = ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapvk", "unknown scorer 'snapvk', did you mean 'snapkv'.; known: " + KNOWN),
        ("", "unknown scorer ''; known: " + KNOWN),
        ("KeyDiff", "did you mean 'keydiff'"),
        ("zzz", "unknown scorer 'zzz'; known: "),
        (
            "snapkv:windw=3",
            "has no setting 'windw', did you mean 'window'.; settings: window, kernel, pooling, group",
        ),
        ("snapkv:window", "scorer 'snapkv' setting 'window' has no value; write window=32"),
        ("knorm:p=1", "scorer 'knorm' has no setting 'p'; settings: none"),
        ("snapkv:window=many", "scorer 'snapkv' setting 'window' is 'many'; it takes a value of type int"),
        ("snapkv:window=1.5", "it takes a value of type int"),
        ("snapkv:pooling=mean", "setting 'pooling' is 'mean'; it takes one of max, avg, none"),
        ("snapkv:kernel=4", "odd kernel, got window=32, kernel=4"),
        ("streaming:sinks=-1", "streaming sinks=-1 is too small: .*; use sinks=0 or more"),
        ("h2o:window=-1", "h2o window=-1 is too small"),
        ("h2o:normalise=yes", "setting 'normalise' is 'yes'; it takes true or false"),
        ("tova:window=3", "scorer 'tova' has no setting 'window'"),
        ("expected_attention:horizon=0", "horizon=0 is too small"),
        ("expected_attention:epsilon=nan", "epsilon=nan is added to attention weights"),
        ("keydiff:reads=keys", "has no setting 'reads'"),
        ("kvzip:chunk=0", "kvzip chunk=0 is too small"),
        ("gatesight:reader=signal", "no reader 'signal', did you mean 'signals'"),
        ("gatesigt", "unknown scorer 'gatesigt', did you mean 'gatesight'"),
    ],
)
def test_what_no_scorer_understands_is_refused_with_the_alternatives(spec, message):
    with pytest.raises(RequestError, match=message):
        scorer(spec)

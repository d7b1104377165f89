"""Scorer names -> classes, imported lazily; plug-ins join through the entry point group `wakesight.scorers`."""

from __future__ import annotations

from wakesight.registry import name_of, resolve, spec_of
from wakesight.scores.base import AnyScorer

SCORERS = {
    "random": "wakesight.scores.random:Random",
    "streaming": "wakesight.scores.streaming:Streaming",
    "knorm": "wakesight.scores.knorm:KNorm",
    "keydiff": "wakesight.scores.keydiff:KeyDiff",
    "snapkv": "wakesight.scores.snapkv:SnapKV",
    "tova": "wakesight.scores.tova:TOVA",
    "h2o": "wakesight.scores.h2o:H2O",
    "expected_attention": "wakesight.scores.expected_attention:ExpectedAttention",
    "kvzip": "wakesight.scores.kvzip:KVzip",
    "triattention": "wakesight.scores.triattention:TriAttention",
    "gatesight": "wakesight.scores.gatesight:GateSight",
    "gatesight+": "wakesight.scores.gatesight:GateSightPlus",
}
ENTRY_POINTS = "wakesight.scorers"


def scorer(spec: str) -> AnyScorer:
    """The scorer that `spec` names, for example "keydiff" or "snapkv:window=16"."""
    found: AnyScorer = resolve(spec, SCORERS, "scorer", ENTRY_POINTS)
    return found


def scorer_spec(method: AnyScorer) -> str | None:
    """The text form of a scorer, for records; None for a class that no table and no plug-in names."""
    name = name_of(method, SCORERS, ENTRY_POINTS)
    return name and spec_of(method, name)

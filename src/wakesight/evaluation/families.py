"""Which arms are compared with which: three families, each adjusted by Holm by itself, no pair of a task in two.

"whole": every arm against the unpruned baseline, task by task and over all. "first": every arm against the method
and allocation that was named first, at the same fraction, task by task. "pairs": over all tasks, every two arms of
one fraction; where there is one task only, those two of which neither is the first-named.

summary.json and the report both take their p-values from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.arms import WHOLE, ArmFacts, facts_of, make_arms
from wakesight.evaluation.intervals import Difference, holm
from wakesight.evaluation.scored import ALL, Scored
from wakesight.registry import read_names

FAMILIES = ("whole", "first", "pairs")
NAMED = ("methods", "allocations", "evicted")  # the arguments that say which method is the first


@dataclass(frozen=True)
class Pair:
    """a minus b on a task. p: adjusted within the family, of all pairs that have grades."""

    family: str
    task: str
    a: str
    b: str
    found: Difference
    p: float


def pairs(scored: Scored, rule: str, arguments: Mapping[str, Any]) -> list[Pair]:
    """Every comparison under a rule, family by family. arguments: the run's, of which NAMED are read."""
    made: list[Pair] = []
    for family, compared in _families(scored, first_named(scored, arguments)).items():
        found = [(one, scored.difference(rule, *one)) for one in compared]
        held = [(one, difference) for one, difference in found if difference is not None]
        adjusted = holm([difference.p_value for _, difference in held])
        made += [Pair(family, *one, found=apart, p=p) for (one, apart), p in zip(held, adjusted, strict=True)]
    return made


def _families(scored: Scored, first: str | None) -> dict[str, list[tuple[str, str, str]]]:
    """Family -> (task, a, b)."""
    evicting = sorted((arm for arm in scored.arms if arm != WHOLE), key=lambda arm: curve(facts_of(arm)) != first)
    whole = [(task, arm, WHOLE) for task in scored.compared for arm in evicting if WHOLE in scored.arms]
    equals: dict[float, list[str]] = {}
    for arm in evicting:  # the first-named stands in front
        equals.setdefault(facts_of(arm).keep, []).append(arm)
    against = [
        (task, arm, arms[0])
        for task in scored.tasks
        for arms in equals.values()
        for arm in arms[1:]
        if curve(facts_of(arms[0])) == first
    ]
    over_all = scored.tasks[0] if len(scored.tasks) == 1 else ALL
    every = [(over_all, b, a) for arms in equals.values() for a, b in itertools.combinations(arms, 2)]
    return {"whole": whole, "first": against, "pairs": [pair for pair in every if pair not in against]}


def first_named(scored: Scored, arguments: Mapping[str, Any]) -> str | None:
    """The curve that was named first, found by the code that makes a run's arms.

    Where nobody knows what was named, the first of the sorted arms. None where that method cannot be made here (a
    plug-in that is not installed): better no comparison than one with another method.
    """
    if not all(arguments.get(name) for name in NAMED):
        return next((curve(facts_of(arm)) for arm in scored.arms if arm != WHOLE), None)
    methods, allocations, evicted = (read_names(arguments[name])[:1] for name in NAMED)
    try:
        _, arm = make_arms(
            methods, allocations, [1.0], evicted=evicted, unit=read_names(arguments.get("unit") or "entry")[0],
            page_size=arguments.get("page_size") or 16,
        )  # fmt: skip
    except RequestError:
        return None
    named = facts_of(arm.id)
    if named.mode != "demote":
        return curve(named)
    wanted = (named.method, named.allocation, named.mode)
    found = (one for one in map(facts_of, scored.arms) if (one.method, one.allocation, one.mode) == wanted)
    return next(map(curve, found), None)  # how an arm demotes is in its own name


def curve(arm: ArmFacts) -> str:
    """An arm without its fraction: method, allocation, page and mode."""
    page = f"/page{arm.page}" if arm.page else ""
    return f"{arm.method}/{arm.allocation}{page}/{arm.evicted}"

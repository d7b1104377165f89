"""Rows of a run -> what the report shows: means under every grade rule, differences between arms, areas over p.

A pure function of the rows: it does not depend on their order, on when they were written, or on how the run
was interrupted, resumed or split. summary.py is the short form of the same numbers that a run folder carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wakesight.evaluation.arms import WHOLE, split_id
from wakesight.evaluation.families import FAMILIES, first_named, pairs
from wakesight.evaluation.intervals import area
from wakesight.evaluation.records import Row
from wakesight.evaluation.scored import ALL, Scored, rounded


def compare(rows: Sequence[Row], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON: per grade rule, task and arm an estimate; the paired differences of `families`; areas.

    arguments: the run's, of which the seed and what was named are read. A mean over tasks weighs every task equally.
    Rows that were skipped are counted, not scored (`Scored`).
    """
    scored = Scored.of(rows, int(arguments.get("seed") or 0))
    return {
        **scored.facts(),
        "arms": list(scored.arms),
        "tasks": list(scored.tasks),
        "kept": {arm: _kept(scored, arm) for arm in scored.arms},
        "first": first_named(scored, arguments),
        "rules": {rule: _rule(scored, rule, arguments) for rule in scored.rules},
    }


def _rule(scored: Scored, rule: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    means = {
        task: {
            arm: _plain(found) for arm in scored.arms if (found := scored.estimate(rule, task, arm)) is not None
        }
        for task in (*scored.tasks, ALL)
    }  # fmt: skip
    apart: dict[str, list[dict[str, Any]]] = {family: [] for family in FAMILIES}
    for one in pairs(scored, rule, arguments):
        cell = {"task": one.task, "a": one.a, "b": one.b, **_plain(one.found), "p_holm": rounded(one.p)}
        apart[one.family].append(cell)
    return {"means": means, "apart": apart, "areas": _areas(means, scored)}


def _kept(scored: Scored, arm: str) -> dict[str, float]:
    """Mean entries and bytes that an arm held per question."""
    own = [row for row in scored.rows if row["arm"] == arm]
    if not own:
        return {}
    return {
        name: rounded(sum(row[name] for row in own) / len(own))
        for name in ("kept", "kv_bytes_kept", "kv_bytes_full", "tokens")
    }


def _areas(means: dict[str, dict[str, Any]], scored: Scored) -> dict[str, dict[str, float]]:
    """Per task and curve, the mean height over its kept fractions."""
    curves: dict[str, list[tuple[float, str]]] = {}
    for arm in scored.arms:
        if arm != WHOLE:
            family, keep = split_id(arm)
            curves.setdefault(family, []).append((keep, arm))
    found: dict[str, dict[str, float]] = {}
    for task, by_arm in means.items():
        for family, points in curves.items():
            held = [(keep, by_arm[arm]["mean"]) for keep, arm in points if arm in by_arm]
            if held:
                found.setdefault(task, {})[family] = rounded(area(*zip(*held, strict=True)))
    return found


def _plain(value: Any) -> dict[str, Any]:
    return {name: rounded(x) if isinstance(x, float) else x for name, x in vars(value).items()}

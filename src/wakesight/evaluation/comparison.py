"""Rows of a run -> what the report shows: means under every grade rule, differences to the baseline, areas over p.

A pure function of the rows: it does not depend on their order, on when they were written, or on how the run
was interrupted, resumed or split. summary.py is the short form of the same numbers that a run folder carries.
"""

from __future__ import annotations

from typing import Any

from wakesight.evaluation.arms import WHOLE, split_id
from wakesight.evaluation.intervals import area, holm
from wakesight.evaluation.records import Row
from wakesight.evaluation.scored import ALL, Scored, rounded


def compare(rows: list[Row] | tuple[Row, ...], *, seed: int = 0) -> dict[str, Any]:
    """Plain JSON: per grade rule, task and arm an estimate; paired differences of every arm to the baseline; areas.

    A mean over tasks weighs every task equally. Rows that were skipped are counted, not scored (`Scored`).
    """
    scored = Scored.of(rows, seed)
    return {
        **scored.facts(),
        "arms": list(scored.arms),
        "tasks": list(scored.tasks),
        "kept": {arm: _kept(scored, arm) for arm in scored.arms},
        "rules": {rule: _rule(scored, rule) for rule in scored.rules},
    }


def _rule(scored: Scored, rule: str) -> dict[str, Any]:
    means = {
        task: {
            arm: _plain(found) for arm in scored.arms if (found := scored.estimate(rule, task, arm)) is not None
        }
        for task in (*scored.tasks, ALL)
    }  # fmt: skip
    apart = {
        task: {
            arm: _plain(found)
            for arm in scored.arms
            if arm != WHOLE and (found := scored.difference(rule, task, arm, WHOLE)) is not None
        }
        for task in scored.tasks
    }
    _adjust(apart)
    return {"means": means, "minus_whole": apart, "areas": _areas(means, scored)}


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


def _adjust(apart: dict[str, dict[str, Any]]) -> None:
    """Holm over the whole table."""
    cells = [cell for by_arm in apart.values() for cell in by_arm.values()]
    for cell, value in zip(cells, holm([cell["p_value"] for cell in cells]), strict=True):
        cell["p_holm"] = rounded(value)


def _plain(value: Any) -> dict[str, Any]:
    return {name: rounded(x) if isinstance(x, float) else x for name, x in vars(value).items()}

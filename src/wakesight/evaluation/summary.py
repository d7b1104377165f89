"""Rows of a run -> means with intervals, differences between arms, areas under the curve over p.

A pure function of the rows: it does not depend on their order, on when they were written, or on how the run
was interrupted, resumed or split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from wakesight.evaluation.arms import WHOLE
from wakesight.evaluation.intervals import Grades, area, difference, estimate, estimate_over_tasks, holm
from wakesight.evaluation.records import Row, canonical, unit

ALL = "mean"  # the row over all tasks


def summarise(rows: Sequence[Row], *, seed: int = 0) -> dict[str, Any]:
    """Plain JSON: per grade rule, task and arm an estimate; paired differences of every arm to the baseline; areas.

    A mean over tasks weighs every task equally. Rows that were skipped are counted, not scored; a question that
    any arm skipped counts for no arm, so that all arms stand on the same questions (an arm that skipped every
    question is left out instead).
    """
    rows = canonical(rows)
    complete = _answered_by_all(rows)
    rules = sorted({rule for row in complete for rule in row["grades"]})
    tasks = sorted({row["task"] for row in complete})
    arms = sorted({row["arm"] for row in rows}, key=_curve_order)
    return {
        "questions": len({unit(row) for row in rows}),
        "scored_questions": len({unit(row) for row in complete}),
        "contexts": len({row["context"] for row in rows}),
        "skipped": _skipped(rows),
        "sources": sorted({row["source"] for row in rows}),
        "arms": arms,
        "tasks": tasks,
        "kept": {arm: _kept(complete, arm) for arm in arms},
        "rules": {rule: _rule(complete, rule, tasks, arms, seed) for rule in rules},
    }


def _rule(rows: Sequence[Row], rule: str, tasks: Sequence[str], arms: Sequence[str], seed: int) -> dict[str, Any]:
    means: dict[str, dict[str, Any]] = {task: {} for task in (*tasks, ALL)}
    apart: dict[str, dict[str, Any]] = {task: {} for task in tasks}
    for task in tasks:
        graded = {arm: _grades(rows, task, arm, rule) for arm in arms}
        for arm in arms:
            if not graded[arm]:
                continue
            means[task][arm] = _plain(estimate(graded[arm], seed))
            if arm != WHOLE and graded.get(WHOLE):
                apart[task][arm] = _plain(difference(graded[arm], graded[WHOLE], seed))
    for arm in arms:
        graded = {task: _grades(rows, task, arm, rule) for task in tasks}
        if tasks and all(graded.values()):
            means[ALL][arm] = _plain(estimate_over_tasks(graded, seed))
    _adjust(apart)
    return {"means": means, "minus_whole": apart, "areas": _areas(means, arms)}


def compare(rows: Sequence[Row], first: str, second: str, rule: str = "official", *, seed: int = 0) -> dict[str, Any]:
    """Paired difference of two arms per task, first - second, Holm-adjusted over the tasks."""
    complete = _answered_by_all(canonical(rows))
    tasks = sorted({row["task"] for row in complete})
    apart = {
        task: {
            first: _plain(difference(_grades(complete, task, first, rule), _grades(complete, task, second, rule), seed))
        }
        for task in tasks
    }
    _adjust(apart)
    return {task: apart[task][first] for task in tasks}


def _answered_by_all(rows: Sequence[Row]) -> list[Row]:
    ran = {row["arm"] for row in rows if row["skipped"] is None}
    rows = [row for row in rows if row["arm"] in ran]
    broken = {unit(row) for row in rows if row["skipped"] is not None}
    return [row for row in rows if unit(row) not in broken]


def _grades(rows: Iterable[Row], task: str, arm: str, rule: str) -> Grades:
    """Grades of one arm in one task, by context, questions in order."""
    grades: dict[str, list[float]] = {}
    for row in rows:
        if row["task"] == task and row["arm"] == arm and rule in row["grades"]:
            grades.setdefault(row["context"], []).append(row["grades"][rule])
    return grades


def _skipped(rows: Sequence[Row]) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for row in rows:
        if row["skipped"] is not None:
            reasons[row["skipped"]] = reasons.get(row["skipped"], 0) + 1
    return dict(sorted(reasons.items()))


def _kept(rows: Sequence[Row], arm: str) -> dict[str, float]:
    """Mean entries and bytes that an arm held per question."""
    own = [row for row in rows if row["arm"] == arm]
    if not own:
        return {}
    return {
        name: _round(sum(row[name] for row in own) / len(own))
        for name in ("kept", "kv_bytes_kept", "kv_bytes_full", "tokens")
    }


def _areas(means: dict[str, dict[str, Any]], arms: Sequence[str]) -> dict[str, dict[str, float]]:
    """Per task and curve, the mean height over its kept fractions."""
    curves: dict[str, list[tuple[float, str]]] = {}
    for arm in arms:
        if arm != WHOLE:
            family, _, keep = arm.rpartition("/")
            curves.setdefault(family, []).append((float(keep), arm))
    found: dict[str, dict[str, float]] = {}
    for task, by_arm in means.items():
        for family, points in curves.items():
            held = [(keep, by_arm[arm]["mean"]) for keep, arm in points if arm in by_arm]
            if held:
                found.setdefault(task, {})[family] = _round(area(*zip(*held, strict=True)))
    return found


def _adjust(apart: dict[str, dict[str, Any]]) -> None:
    """Holm over the whole table."""
    cells = [(task, arm) for task in apart for arm in apart[task]]
    for (task, arm), value in zip(cells, holm([apart[t][a]["p_value"] for t, a in cells]), strict=True):
        apart[task][arm]["p_holm"] = _round(value)


def _curve_order(arm: str) -> tuple[int, str, float]:
    family, _, keep = arm.rpartition("/")
    return (0, "", 0.0) if arm == WHOLE else (1, family, float(keep))


def _plain(value: Any) -> dict[str, Any]:
    return {name: _round(x) if isinstance(x, float) else x for name, x in vars(value).items()}


def _round(value: float) -> float:
    return round(float(value), 6)

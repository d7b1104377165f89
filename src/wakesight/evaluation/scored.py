"""The rows that count, and what the statistics read from them: grades by task and arm, estimates, differences.

Takes rows in any order; gives numbers that depend on the rows alone. Next: families.py (which differences are
looked at), then comparison.py (for the report) and summary.py (summary.json).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from wakesight.evaluation.arms import WHOLE, split_id
from wakesight.evaluation.intervals import (
    Difference,
    Estimate,
    Grades,
    difference,
    difference_over_tasks,
    estimate,
    estimate_over_tasks,
)
from wakesight.evaluation.measures import limits
from wakesight.evaluation.records import Row, canonical, unit

ALL = "mean"  # the row over all tasks, every task weighing the same
Held = dict[tuple[str, str, str], dict[str, list[float]]]


@dataclass(frozen=True)
class Scored:
    """A run's rows, sorted out.

    every: all rows. rows: those of questions that no arm skipped, so that all arms stand on the same questions;
    an arm that skipped every question is left out of that rule, and has no rows here. arms: of `every`, curve by
    curve. tasks, rules: of `rows`.
    """

    every: tuple[Row, ...]
    rows: tuple[Row, ...]
    arms: tuple[str, ...]
    tasks: tuple[str, ...]
    rules: tuple[str, ...]
    seed: int
    _grades: Held = field(repr=False)

    @classmethod
    def of(cls, rows: Sequence[Row], seed: int = 0) -> Scored:
        every = canonical(rows)
        counted = _answered_by_all(every)
        grades: Held = {}
        for row in counted:
            for rule, value in row["grades"].items():
                of_arm = grades.setdefault((rule, row["task"], row["arm"]), {})
                of_arm.setdefault(row["context"], []).append(value)
        return cls(
            every=tuple(every),
            rows=tuple(counted),
            arms=tuple(sorted({row["arm"] for row in every}, key=_curve_order)),
            tasks=tuple(sorted({row["task"] for row in counted})),
            rules=tuple(sorted({rule for rule, _, _ in grades})),
            seed=seed,
            _grades=grades,
        )

    @property
    def compared(self) -> tuple[str, ...]:
        """What two arms are compared on: every task, and their mean where there are several to take it of."""
        return (*self.tasks, ALL) if len(self.tasks) > 1 else self.tasks

    def grades(self, rule: str, task: str, arm: str) -> Grades:
        """By context, questions in order; empty where there are none."""
        return self._grades.get((rule, task, arm), {})

    def estimate(self, rule: str, task: str, arm: str) -> Estimate | None:
        """None without grades; for ALL, if any task has none."""
        held = self._by_task(rule, task, arm)
        if held is None:
            return None
        settings = self.seed, limits(rule)
        return estimate_over_tasks(held, *settings) if task == ALL else estimate(held[task], *settings)

    def difference(self, rule: str, task: str, first: str, second: str) -> Difference | None:
        """first - second, paired; None where either has no grades."""
        a, b = self._by_task(rule, task, first), self._by_task(rule, task, second)
        if a is None or b is None:
            return None
        settings = self.seed, limits(rule)
        return difference_over_tasks(a, b, *settings) if task == ALL else difference(a[task], b[task], *settings)

    def facts(self) -> dict[str, Any]:
        """What was run and what was left out, for people and programs alike."""
        reasons: dict[str, int] = {}
        for row in self.every:
            if row["skipped"] is not None:
                reasons[row["skipped"]] = reasons.get(row["skipped"], 0) + 1
        return {
            "questions": len({unit(row) for row in self.every}),
            "scored_questions": len({unit(row) for row in self.rows}),
            "contexts": len({row["context"] for row in self.every}),
            "skipped": dict(sorted(reasons.items())),
            "sources": sorted({row["source"] for row in self.every}),
        }

    def _by_task(self, rule: str, task: str, arm: str) -> dict[str, Grades] | None:
        names = self.tasks if task == ALL else (task,)
        held = {name: self.grades(rule, name, arm) for name in names}
        return held if held and all(held.values()) else None


@overload
def rounded(value: float) -> float: ...
@overload
def rounded(value: None) -> None: ...
def rounded(value: float | None) -> float | None:
    """Six places: what a file holds of a statistic. None stays None: an interval that there is not."""
    return None if value is None else round(float(value), 6)


def counted(number: int, noun: str) -> str:
    """ "1 context", "1,200 contexts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _answered_by_all(rows: Sequence[Row]) -> list[Row]:
    ran = {row["arm"] for row in rows if row["skipped"] is None}
    rows = [row for row in rows if row["arm"] in ran]
    broken = {unit(row) for row in rows if row["skipped"] is not None}
    return [row for row in rows if unit(row) not in broken]


def _curve_order(arm: str) -> tuple[int, str, float]:
    return (0, "", 0.0) if arm == WHOLE else (1, *split_id(arm))

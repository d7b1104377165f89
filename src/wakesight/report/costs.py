"""What an arm costs: entries, bytes and seconds, as means over what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wakesight.evaluation.records import Row
from wakesight.report.folder import Run


@dataclass(frozen=True)
class Cost:
    """kept, kv_bytes_kept: as the comparison has them.

    score_s, compact_s: per context; None where nothing was measured. A scorer runs once per context
    for all its arms, so arms of one scorer share `score_s`.
    """

    tokens: float
    kept: float
    kv_bytes_kept: float
    kv_bytes_full: float
    score_s: float | None
    compact_s: float | None

    @property
    def seconds(self) -> float | None:
        return None if self.score_s is None or self.compact_s is None else self.score_s + self.compact_s


def costs(run: Run) -> dict[str, Cost]:
    """Arm -> cost, for every arm that answered something."""
    by_arm: dict[str, list[Row]] = {}
    for row in run.rows:
        by_arm.setdefault(row["arm"], []).append(row)
    return {
        arm: Cost(**held, score_s=_seconds(by_arm[arm], "score"), compact_s=_seconds(by_arm[arm], "compact"))
        for arm, held in run.comparison["kept"].items()
        if held
    }


def _seconds(rows: Iterable[Row], phase: str) -> float | None:
    """Mean over contexts: all questions of a context were asked of the same child."""
    found = {row["context"]: float(row["seconds"][phase]) for row in rows if phase in row.get("seconds", {})}
    return round(sum(found.values()) / len(found), 6) if found else None

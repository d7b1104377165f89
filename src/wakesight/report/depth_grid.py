"""Needle grids: for every arm the mean grade by depth and length, from the facts that contexts carry."""

from __future__ import annotations

from collections.abc import Mapping

from wakesight.report.folder import Run
from wakesight.report.panels import Grid


def grids(run: Run, rule: str) -> dict[str, Grid]:
    """Arm -> grid; empty unless several depths and lengths were run."""
    places = _places(run)
    lengths = tuple(sorted({length for length, _ in places.values()}))
    depths = tuple(sorted({depth for _, depth in places.values()}))
    if len(lengths) < 2 or len(depths) < 2:
        return {}
    return {arm: _grid(run, rule, arm, places, lengths, depths) for arm in run.comparison["arms"]}


def _places(run: Run) -> dict[str, tuple[int, float]]:
    """Context -> (length, depth), of contexts with one needle at a depth that was asked for."""
    places = {}
    for _, context in run.contexts:
        meta = (run.context(context) or {}).get("meta", {})
        depth, length = meta.get("depth"), meta.get("length")
        if isinstance(depth, int | float) and isinstance(length, int):
            places[context] = (length, float(depth))
    return places


def _grid(
    run: Run, rule: str, arm: str, places: Mapping[str, tuple[int, float]], lengths: tuple[int, ...],
    depths: tuple[float, ...],
) -> Grid:  # fmt: skip
    found: dict[tuple[int, float], list[float]] = {}
    for row in run.rows:
        if row["arm"] == arm and row["context"] in places and rule in row["grades"]:
            found.setdefault(places[row["context"]], []).append(row["grades"][rule])
    means = {place: sum(grades) / len(grades) for place, grades in found.items()}
    return Grid(lengths, depths, tuple(tuple(means.get((n, d)) for n in lengths) for d in depths))

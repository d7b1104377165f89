"""Figures of the churn and prediction studies: who is active, what single heads are like, what alarms are worth."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wakesight.report import drawing
from wakesight.report.palette import INK, LIGHT, MARKERS, MUTED
from wakesight.traces.study_report import NAMES

WIDTH, HEIGHT = 6.4, 3.2  # inches
Figure = Any
Study = Mapping[str, Any]


def churn_figures(found: Study) -> Iterator[tuple[str, bytes]]:
    """(file name, content), a PNG and an SVG each. found: of `churn.study`. RequestError without matplotlib."""
    yield from _files("jaccard", _jaccard, found["combos"])
    for slug, one in _slugs(found["combos"]):
        yield from _files(f"heads-{slug}", _heads, one)


def predict_figures(found: Study) -> Iterator[tuple[str, bytes]]:
    """(file name, content), a PNG and an SVG each. found: of `predict.study`. RequestError without matplotlib."""
    for slug, one in _slugs(found["combos"]):
        yield from _files(f"alarms-{slug}", _alarms, one)
        yield from _files(f"events-{slug}", _events, one)


def _files(name: str, draw: Callable[[Figure, Any], None], numbers: Any) -> Iterator[tuple[str, bytes]]:
    with drawing.style():
        figure = drawing.figure(WIDTH, HEIGHT)
        draw(figure, numbers)
        yield f"{name}.png", drawing.png(figure)
        yield f"{name}.svg", drawing.svg(figure).encode()


def _slugs(combos: Mapping[str, Study]) -> list[tuple[str, Study]]:
    """File name parts; numbered where two names come out alike."""
    found: dict[str, Study] = {}
    for name, one in combos.items():
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "runs"
        found[slug if slug not in found else f"{slug}-{len(found)}"] = one
    return list(found.items())


def _jaccard(figure: Figure, combos: Mapping[str, Study]) -> None:
    """A dot per run, a large one for all with its interval; binary and continuous active sets side by side."""
    axes = figure.subplots()
    for at, one in enumerate(combos.values()):
        for side, kind in enumerate(("binary", "continuous")):
            place, estimate = at + (side - 0.5) * 0.3, one["active"][kind]["jaccard"]
            dots = [run["jaccard"][kind] for run in one["by_run"] if run["jaccard"][kind] is not None]
            axes.plot(
                [place] * len(dots), dots, linestyle="none", marker="o", markersize=3, color=LIGHT[side], alpha=0.5
            )
            if estimate["value"] is None:
                continue
            if estimate["low"] is not None:
                axes.plot([place] * 2, [estimate["low"], estimate["high"]], color=LIGHT[side])
            label = kind if at == 0 else None
            axes.plot(
                [place], [estimate["value"]], linestyle="none", marker=MARKERS[side], markersize=7, color=LIGHT[side],
                label=label,
            )  # fmt: skip
    axes.set_xticks(range(len(combos)), list(combos))
    axes.set_xlim(-0.6, len(combos) - 0.4)
    axes.set_ylim(-0.03, 1.03)
    axes.set_title("Adjacent Jaccard of the heads that are active")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _heads(figure: Figure, one: Study) -> None:
    """Two maps over (layer, head): how stable, and how often it drifted."""
    left, right = figure.subplots(1, 2)
    _map(figure, left, _grid(one, "stability", 1.0), "Mean stability", {"cmap": "cividis", "vmin": 0, "vmax": 1})
    drifts = _grid(one, "drift_events", 1 / one["runs"])
    _map(figure, right, drifts, "Drift events per run", {"cmap": "cividis", "vmin": 0})


def _grid(one: Study, field: str, scale: float) -> list[list[float]]:
    """[layer][head]; NaN, which is drawn empty, where there is no number."""
    rows: list[list[float]] = [[] for _ in range(one["layers"])]
    for row in one["by_head"]:
        rows[row["layer"]].append(float("nan") if row[field] is None else row[field] * scale)
    return rows


def _map(figure: Figure, axes: Any, rows: list[list[float]], title: str, look: Mapping[str, Any]) -> None:
    image = axes.imshow(rows, aspect="auto", interpolation="nearest", **look)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.grid(visible=False)
    axes.set_title(title)
    axes.set_xlabel("query head")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes)


def _alarms(figure: Figure, one: Study) -> None:
    """Precision over recall of every detector, joined with what its thresholds could have reached in hindsight."""
    axes = figure.subplots()
    for index, (name, found) in enumerate(one["detectors"].items()):
        look = {"color": LIGHT[index % len(LIGHT)], "marker": MARKERS[index % len(MARKERS)], "linestyle": "none"}
        if (point := _point(found)) is not None:
            axes.plot(*point, label=NAMES[name], **look)
        best = _point(one["hindsight"][name]["oracle"]) if name in one["hindsight"] else None
        if best is not None:
            axes.plot(*best, fillstyle="none", **look)
        if point is not None and best is not None:
            axes.plot(*zip(point, best, strict=True), color=MUTED, linewidth=0.6)
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    axes.set_title("Alarms before wake-ups (hollow: best thresholds per head, in hindsight)")
    axes.set_xlabel("recall")
    axes.set_ylabel("precision")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right center", fontsize=7)


def _point(found: Study) -> tuple[float, float] | None:
    right, reached = found["precision"]["value"], found["recall"]["value"]
    return None if right is None or reached is None else (reached, right)


def _events(figure: Figure, one: Study) -> None:
    """Heads that wake at every step, a row per run."""
    axes = figure.subplots()
    most = max((max(run["events_at"], default=0) for run in one["by_run"]), default=0)
    for row, run in enumerate(one["by_run"]):
        there = [(step, count) for step, count in enumerate(run["events_at"]) if count]
        axes.vlines(
            [step for step, _ in there], row, [row + 0.85 * count / most for _, count in there], color=LIGHT[0],
            linewidth=0.9,
        )  # fmt: skip
        axes.plot([0, run["steps"]], [row, row], color=INK, linewidth=0.6)
    axes.set_yticks(range(len(one["by_run"])), [run["name"] for run in one["by_run"]], fontsize=6)
    axes.set_title(f"Heads that wake at a step (the tallest line: {most})")
    axes.set_xlabel("decode step")

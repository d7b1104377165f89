"""Figures of a run: files with several panels each, and the single panels that a page arranges by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wakesight.evaluation.arms import WHOLE
from wakesight.evaluation.scored import ALL
from wakesight.report import drawing, panels, rules
from wakesight.report.arm_names import parse
from wakesight.report.costs import costs
from wakesight.report.depth_grid import grids
from wakesight.report.folder import Run
from wakesight.report.palette import Look, looks

Draw = Callable[[Any], None]  # draws on axes
WIDTH, HEIGHT = 4.0, 2.7  # of a panel, in inches
ROW = 0.19  # height of an arm in a forest plot
SMALL = 2.9  # width of a heat map


@dataclass(frozen=True)
class Panel:
    """subject: score, differences, costs or depth. about: in words, for who cannot see it."""

    subject: str
    title: str
    about: str
    draw: Draw
    width: float = WIDTH
    height: float = HEIGHT


def run_panels(run: Run) -> list[Panel]:
    """Every panel of a run, in the order of reading."""
    styles = looks(run.comparison["arms"])
    found = [*_costs(run, styles)]
    for rule in rules.distinct(run.comparison["rules"]):
        found += [*_scores(run, rule, styles), *_differences(run, rule, styles), *_depths(run, rule)]
    return found


def figure_files(run: Run) -> Iterator[tuple[str, bytes]]:
    """(file name, content): a PNG and an SVG per subject. Raises RequestError without matplotlib."""
    styles = looks(run.comparison["arms"])
    by_subject: dict[str, list[Panel]] = {}
    for panel in run_panels(run):
        by_subject.setdefault(panel.subject, []).append(panel)
    for subject, group in by_subject.items():
        with drawing.style():
            figure = _arranged(group, styles if "depth" not in subject else {})
            yield f"{subject}.png", drawing.png(figure)
            yield f"{subject}.svg", drawing.svg(figure).encode()


def panel_svg(panel: Panel) -> str:
    """One panel as an SVG file with a transparent ground."""
    with drawing.style():
        figure = drawing.figure(panel.width, panel.height)
        panel.draw(figure.subplots())
        return drawing.svg(figure, transparent=True)


def _arranged(group: Sequence[Panel], styles: Mapping[str, Look]) -> Any:
    across = min(3 if group[0].width > SMALL else 5, len(group))
    down = math.ceil(len(group) / across)
    legend = 0.22 * math.ceil((len(styles) + 1) / 4) if styles else 0
    figure = drawing.figure(across * group[0].width, down * max(panel.height for panel in group) + legend)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axes, panel in zip(grid, group, strict=False):
        panel.draw(axes)
    for axes in grid[len(group) :]:
        axes.axis("off")
    if styles:
        panels.key(figure, styles)
    return figure


def task_title(task: str) -> str:
    return "mean over tasks" if task == ALL else task


def _scores(run: Run, rule: str, styles: Mapping[str, Look]) -> Iterator[Panel]:
    means = run.comparison["rules"][rule]["means"]
    tasks = [ALL, *run.comparison["tasks"]] if len(run.comparison["tasks"]) > 1 else run.comparison["tasks"]
    for task in tasks:
        name = task_title(task)
        about = f"{rules.title(rule)} of {name} over the kept fraction, one curve per method"
        yield Panel(f"score-{rule}", name, about, _drawing(panels.score, name, rule, means[task], styles))


def _differences(run: Run, rule: str, styles: Mapping[str, Look]) -> Iterator[Panel]:
    for task, cells in run.apart(rule, "whole").items():
        name = task_title(task)
        about = f"{rules.title(rule)} of {name}: every arm minus the whole cache, with 95% intervals"
        draw = _drawing(panels.forest, name, cells, styles)
        yield Panel(f"differences-{rule}", name, about, draw, WIDTH + 0.6, 0.8 + ROW * len(cells))


def _costs(run: Run, styles: Mapping[str, Look]) -> Iterator[Panel]:
    held = costs(run)
    seconds = {arm: one.seconds for arm, one in held.items() if one.seconds is not None and arm != WHOLE}
    megabytes = {arm: one.kv_bytes_kept / 1e6 for arm, one in held.items()}
    for title, unit, values in (
        ("Scoring and compaction", "seconds per context", seconds),
        ("KV bytes kept", "MB per context", megabytes),
    ):
        if any(arm != WHOLE for arm in values):
            about = f"{title} in {unit}, over the kept fraction"
            yield Panel("costs", title, about, _drawing(panels.over_p, title, unit, values, styles))


def _depths(run: Run, rule: str) -> Iterator[Panel]:
    found = grids(run, rule)
    values = [x for grid in found.values() for row in grid.values for x in row if x is not None]
    scale = (min(values, default=0.0), max(values, default=1.0))
    for arm, grid in found.items():
        title = parse(arm).label
        about = f"{rules.title(rule)} of {title} by needle depth and context length"
        height = 0.75 + 0.2 * len(grid.depths)
        yield Panel(f"depth-{rule}", title, about, _drawing(panels.heat, title, rule, grid, scale), SMALL, height)


def _drawing(draw: Callable[..., None], *arguments: Any) -> Draw:
    return lambda axes: draw(axes, *arguments)

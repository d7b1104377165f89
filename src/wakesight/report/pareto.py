"""Figure of a simulation: miss rate over memory, one line per policy, one panel per combo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wakesight.report import drawing
from wakesight.report.palette import DASHES, LIGHT, MARKERS

WIDTH, HEIGHT = 4.6, 3.2  # inches of a panel


def pareto_files(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """(file name, content): a PNG and an SVG. rows: of `simulate.sweep.rows`, pooled. RequestError without matplotlib.

    Lower left is better. Every budget is a point; full is one.
    """
    combos = list(dict.fromkeys(row.get("combo", "") for row in rows))
    with drawing.style():
        figure = drawing.figure(WIDTH * len(combos), HEIGHT)
        grid = figure.subplots(1, len(combos), squeeze=False)[0]
        for axes, combo in zip(grid, combos, strict=True):
            _panel(axes, [row for row in rows if row.get("combo", "") == combo])
            axes.set_title(combo or "Misses over memory")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", fontsize=7, ncols=4)
        yield "pareto.png", drawing.png(figure)
        yield "pareto.svg", drawing.svg(figure).encode()


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for index, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        points = sorted((row["mean_resident_pages"], row["miss_rate"]) for row in rows if row["policy"] == policy)
        dashes = DASHES[index // len(LIGHT) % len(DASHES)]
        axes.plot(
            [memory for memory, _ in points], [miss for _, miss in points], label=policy,
            color=LIGHT[index % len(LIGHT)], marker=MARKERS[index % len(MARKERS)],
            linestyle=(0, dashes) if dashes else "-",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("mean resident pages, all units")
    axes.set_ylabel("miss rate")
    axes.set_ylim(bottom=0)

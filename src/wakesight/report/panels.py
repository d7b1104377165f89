"""The charts themselves, each drawn on one set of axes; `figures` arranges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wakesight.evaluation.arms import WHOLE
from wakesight.report import rules
from wakesight.report.arm_names import curves, parse
from wakesight.report.palette import INK, MUTED, PAPER, Look

Cells = Mapping[str, Mapping[str, Any]]  # arm -> estimate


@dataclass(frozen=True)
class Grid:
    """Grades of one arm, by depth (down) and length (across)."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]


def score(axes: Any, title: str, rule: str, cells: Cells, looks: Mapping[str, Look]) -> None:
    """One curve per method over keep, its 95% band, and the whole cache as a dashed line."""
    for curve, points in curves(cells).items():
        look = looks[curve]
        p = [name.keep for name in points]
        line(axes, p, [cells[name.id]["mean"] for name in points], look)
        if all(cells[name.id].get("low") is not None for name in points) and len(points) > 1:
            low, high = ([cells[name.id][end] for name in points] for end in ("low", "high"))
            axes.fill_between(p, low, high, color=look.colour, alpha=0.10, linewidth=0, gid=f"curve{look.index}")
    if WHOLE in cells:
        _baseline(axes, cells[WHOLE]["mean"])
    fractions(axes, cells)
    values = [cell[end] for cell in cells.values() for end in ("mean", "low", "high") if cell.get(end) is not None]
    if rule not in rules.LOWER_IS_BETTER and values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.03, 1.03)
    axes.set_title(title)


def line(axes: Any, p: Sequence[float], values: Sequence[float], look: Look) -> None:
    """One method's curve; its group in an SVG is called by the curve's index."""
    dashes = (0, look.dashes) if look.dashes else "-"
    axes.plot(
        p, values, color=look.colour, linestyle=dashes, marker=look.marker, markeredgecolor=PAPER,
        markeredgewidth=0.6, gid=f"curve{look.index}",
    )  # fmt: skip


def fractions(axes: Any, arms: Cells | Sequence[str]) -> None:
    """A logarithmic axis of keep with a tick at every fraction that was run."""
    ticks = sorted({name.keep for name in map(parse, arms) if name.id != WHOLE})
    if not ticks:
        return
    axes.set_xscale("log")
    axes.set_xlim(ticks[0] * 0.88, ticks[-1] * 1.14)
    axes.set_xticks(ticks, [f"{p:g}" for p in ticks])
    axes.minorticks_off()
    axes.set_xlabel("keep, the kept fraction")


def _baseline(axes: Any, value: float) -> None:
    axes.axhline(value, color=INK, linestyle=(0, (5, 2)), linewidth=1.1)


def forest(axes: Any, title: str, cells: Cells, looks: Mapping[str, Look]) -> None:
    """Every arm minus the whole cache with its interval, if it has one; filled where it is significant."""
    names = [name for points in curves(cells).values() for name in points]
    for place, name in enumerate(names):
        cell, look = cells[name.id], looks[name.curve]
        clear = rules.significant(cell)
        if cell["low"] is not None:
            axes.plot([cell["low"], cell["high"]], [place, place], color=look.colour, linewidth=1.3)
        axes.plot(
            [cell["mean"]], [place], color=look.colour, marker=look.marker, markersize=5, markeredgewidth=1.1,
            markerfacecolor=look.colour if clear else PAPER, linestyle="none",
        )  # fmt: skip
    axes.axvline(0, color=INK, linewidth=1.0)
    axes.set_yticks(range(len(names)), [name.label for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("minus the whole cache")
    axes.set_title(title)


def over_p(axes: Any, title: str, unit: str, values: Mapping[str, float], looks: Mapping[str, Look]) -> None:
    """A cost (arm -> number) over keep; the whole cache's as a dashed line where it has one."""
    for curve, points in curves(values).items():
        line(axes, [name.keep for name in points], [values[name.id] for name in points], looks[curve])
    if WHOLE in values:
        _baseline(axes, values[WHOLE])
    fractions(axes, list(values))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    axes.set_title(title)


def heat(axes: Any, title: str, rule: str, grid: Grid, scale: tuple[float, float]) -> None:
    """Needle depth down, context length across; dark is bad, bright is good; empty where nothing was run."""
    import numpy as np

    shares = np.array(
        [[np.nan if x is None else rules.goodness(rule, x, *scale) for x in row] for row in grid.values], float
    )
    axes.pcolormesh(np.ma.masked_invalid(shares), cmap="cividis", vmin=0, vmax=1, edgecolors=PAPER, linewidth=1)
    small = len(grid.lengths) * len(grid.depths) <= 80
    for row, values in enumerate(grid.values):
        for column, value in enumerate(values):
            if value is not None and small:
                ink = "#ffffff" if shares[row, column] < 0.5 else "#111111"
                axes.text(column + 0.5, row + 0.5, f"{value:.2g}", ha="center", va="center", color=ink, fontsize=7.5)
    axes.set_xticks([i + 0.5 for i in range(len(grid.lengths))], [f"{n:,}" for n in grid.lengths])
    axes.set_yticks([i + 0.5 for i in range(len(grid.depths))], [f"{d:.0%}" for d in grid.depths])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("depth")
    axes.set_title(title, fontsize=8.5 * min(1, 28 / len(title)))  # a long name still fits above a small map


def key(figure: Any, looks: Mapping[str, Look], *, whole: bool = True) -> None:
    """A legend below the panels."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=look.colour, linestyle=(0, look.dashes) if look.dashes else "-", marker=look.marker,
               label=curve)
        for curve, look in looks.items()
    ]  # fmt: skip
    if whole:
        handles.append(Line2D([], [], color=INK, linestyle=(0, (5, 2)), label="whole cache"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), labelcolor=MUTED)

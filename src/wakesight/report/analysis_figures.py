"""Figures of an analysis: half-lives by depth, summary signals by depth, what single cells tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wakesight.report import drawing
from wakesight.report.palette import DASHES, INK, LIGHT, MARKERS, MUTED

WIDTH, HEIGHT = 5.2, 3.2  # inches


def figure_files(found: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """(file name, content): a PNG and an SVG each. found: of `wakesight analyze`. RequestError without matplotlib."""
    for name, draw in (("half-lives", _half_lives), ("summaries", _summaries), ("cells", _cells)):
        with drawing.style():
            figure = drawing.figure(WIDTH, HEIGHT)
            draw(figure.subplots(), found)
            yield f"{name}.png", drawing.png(figure)
            yield f"{name}.svg", drawing.svg(figure).encode()


def _half_lives(axes: Any, found: Mapping[str, Any]) -> None:
    """One dot per head over the depth of its layer, and the line above which a head is slow."""
    for depth, lives in zip(found["recurrent_layers"], found["half_life"]["by_layer"], strict=True):
        axes.plot([depth] * len(lives), lives, linestyle="none", marker="o", markersize=3, color=LIGHT[0], alpha=0.6)
    axes.axhline(found["slow_set"]["tokens"], color=INK, linestyle=(0, (5, 2)), linewidth=1.1)
    axes.axhline(found["half_life"]["median"], color=MUTED, linewidth=1.0)
    axes.set_yscale("log")
    axes.set_title("Median half-life of every recurrent head")
    axes.set_xlabel("layer")
    axes.set_ylabel("tokens")


def _summaries(axes: Any, found: Mapping[str, Any]) -> None:
    """Rank correlation of each summary signal with utility, over the depth of the attention layer."""
    depths = found["attention_layers"]
    for index, (name, one) in enumerate(found["summaries"].items()):
        there = [(depth, rho) for depth, rho in zip(depths, one["layers"], strict=True) if rho is not None]
        dashes = DASHES[index % len(DASHES)]
        axes.plot(
            [depth for depth, _ in there], [rho for _, rho in there], label=name, color=LIGHT[index % len(LIGHT)],
            marker=MARKERS[index % len(MARKERS)], linestyle=(0, dashes) if dashes else "-",
        )  # fmt: skip
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_title("Summary signals against utility")
    axes.set_xlabel("attention layer")
    axes.set_ylabel("rank correlation")
    axes.set_xticks(depths)
    axes.figure.legend(loc="outside lower center", fontsize=7, ncols=4)


def _cells(axes: Any, found: Mapping[str, Any]) -> None:
    """The strongest cell of every recurrent layer for every attention layer."""
    rows = [one["largest_by_recurrent_layer"] for one in found["cells"]["layers"]]
    image = axes.imshow(rows, aspect="auto", cmap="cividis", vmin=0, interpolation="nearest")
    axes.set_yticks(range(len(rows)), [str(depth) for depth in found["attention_layers"]])
    step = max(1, len(found["recurrent_layers"]) // 12)
    places = range(0, len(found["recurrent_layers"]), step)
    axes.set_xticks(list(places), [str(found["recurrent_layers"][at]) for at in places])
    axes.grid(visible=False)
    axes.set_title("Largest |rank correlation| of a single cell")
    axes.set_xlabel("recurrent layer")
    axes.set_ylabel("attention layer")
    axes.figure.colorbar(image, ax=axes)

"""One colour and marker per scorer, one line style per variant, the same in every figure and in the page.

The colours keep apart under the common colour blindnesses; markers and line styles say the same without colour.
A page replaces each of them by a CSS variable, so that a dark page gets the lighter set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wakesight.evaluation.arms import WHOLE
from wakesight.report.arm_names import parse

INK, MUTED, GRID, PAPER = "#1c2128", "#66707b", "#dde2e8", "#fefefd"
LIGHT = ("#0072b2", "#d55e00", "#007f5f", "#a2408f", "#a87900", "#2f8fce", "#7f1d4f", "#4f7a1d", "#6b3a1f", "#5b6570")
DARK = ("#5ab4f0", "#ff9248", "#2fcf9f", "#e08ad2", "#e3b93c", "#9fd6ff", "#f57fae", "#a5cf6a", "#d9a384", "#aab4bf")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (5, 1.2, 1, 1.2), (2.5, 1, 2.5, 3), (8, 2))
USUAL = ("keydiff", "snapkv", "expected_attention", "h2o", "streaming", "tova", "knorm", "random")
PLACES = {name: place for place, name in enumerate(USUAL[:-1])} | {"random": len(LIGHT) - 1}


@dataclass(frozen=True)
class Look:
    """index: of the curve in its run. place: index into LIGHT and DARK. dashes: of matplotlib; () is a solid line."""

    index: int
    place: int
    dashes: tuple[float, ...]

    @property
    def colour(self) -> str:
        return LIGHT[self.place]

    @property
    def marker(self) -> str:
        return MARKERS[self.place]


def looks(arms: Iterable[str]) -> dict[str, Look]:
    """Curve -> look. Known scorers look the same in every run; others take what is free, then share."""
    names = [name for name in map(parse, arms) if name.id != WHOLE]
    places: dict[str, int] = {}
    for name in sorted({name.scorer for name in names}, key=lambda scorer: (scorer not in PLACES, scorer)):
        free = [place for place in range(len(LIGHT)) if place not in places.values()]
        usual = PLACES.get(name.partition(":")[0])
        places[name] = usual if usual in free else (free or [len(places) % len(LIGHT)])[0]
    variants = sorted({name.variant for name in names}, key=lambda v: (v != "/flat", v))
    by_curve = {name.curve: name for name in names}
    return {
        curve: Look(index, places[name.scorer], DASHES[variants.index(name.variant) % len(DASHES)])
        for index, (curve, name) in enumerate(by_curve.items())
    }


def variables() -> dict[str, str]:
    """Colour of a figure -> CSS variable of the page."""
    shared = {INK: "ink", MUTED: "muted", GRID: "rule", PAPER: "paper"}
    return {colour: f"var(--{name})" for colour, name in shared.items()} | {
        colour: f"var(--m{place})" for place, colour in enumerate(LIGHT)
    }


def css(colours: tuple[str, ...]) -> str:
    """The scorers' colours as declarations of CSS variables."""
    return " ".join(f"--m{place}: {colour};" for place, colour in enumerate(colours))

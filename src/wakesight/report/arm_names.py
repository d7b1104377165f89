"""An arm's id in parts: "snapkv:window=16/ada/drop/0.3" is a curve (snapkv:window=16/ada) at p = 0.3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wakesight.evaluation.arms import WHOLE

DEFAULT_MODE = "/drop"  # goes without saying


@dataclass(frozen=True)
class ArmName:
    """curve: everything but the kept fraction, for people. scorer: the curve's colour. variant: its line style."""

    id: str
    curve: str
    scorer: str
    variant: str
    keep: float

    @property
    def label(self) -> str:
        return self.curve if self.id == WHOLE else f"{self.curve} {self.keep:g}"


def parse(arm: str) -> ArmName:
    """The parts of an arm's id."""
    if arm == WHOLE:
        return ArmName(arm, "whole cache", WHOLE, "", 1.0)
    family, _, keep = arm.rpartition("/")
    scorer, _, variant = family.partition("/")
    return ArmName(arm, curve_label(family), scorer, f"/{variant}".removesuffix(DEFAULT_MODE), float(keep))


def curve_label(family: str) -> str:
    """A family of arms (`Arm.family`) as the report calls it."""
    return family.removesuffix(DEFAULT_MODE)


def curves(arms: Iterable[str]) -> dict[str, list[ArmName]]:
    """Curve -> its arms by rising p, in the order of the arms; without the whole cache."""
    found: dict[str, list[ArmName]] = {}
    for name in map(parse, arms):
        if name.id != WHOLE:
            found.setdefault(name.curve, []).append(name)
    return {curve: sorted(points, key=lambda name: name.keep) for curve, points in found.items()}

"""Which grade rule a reader sees first, and which value of it is the better one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wakesight.evaluation.measures import LOWER_IS_BETTER as LOWER_IS_BETTER
from wakesight.evaluation.measures import TITLES
from wakesight.evaluation.measures import title as title

FAMILY_TITLES = {  # of evaluation.families, in the order of reading
    "whole": "Paired differences to the whole cache",
    "first": "Paired differences to the method that was named first",
    "pairs": "Every two methods at the same keep",
}
INTERVALS = (
    "Intervals are 95 %, from a bootstrap over contexts; wider, by Wilson's bound, where all contexts gave the same; "
    "none (-) where a task has one context only."
)
P_VALUES = "p-values are from sign flips of whole contexts, adjusted by Holm within each table of differences."


def ordered(rules: Iterable[str]) -> list[str]:
    """The rule to show first in front."""
    known = list(TITLES)
    return sorted(rules, key=lambda rule: (known.index(rule) if rule in known else len(known), rule))


def distinct(results: Mapping[str, Any]) -> dict[str, str]:
    """Rule -> title, in order, of what to show: rules that gave every arm the same results are shown once."""
    titles: dict[str, str] = {}
    for rule in ordered(results):
        twin = next((shown for shown in titles if results[shown] == results[rule]), None)
        if twin is None:
            titles[rule] = title(rule)
        else:
            titles[twin] += f" = {title(rule)}"
    return titles


def significant(cell: Mapping[str, Any]) -> bool:
    """Whether a difference stands out: its adjusted p-value is below 0.05."""
    return bool(cell["p_holm"] < 0.05)


def better(rule: str, first: float, second: float) -> bool:
    """Whether `first` is a better value than `second`."""
    return first < second if rule in LOWER_IS_BETTER else first > second


def goodness(rule: str, value: float, low: float, high: float) -> float:
    """0 (worst) to 1 (best). Shares stand on their own scale, other grades between the smallest and largest shown."""
    if low >= 0 and high <= 1 and rule not in LOWER_IS_BETTER:
        return value
    share = (value - low) / (high - low) if high > low else 1.0
    return 1 - share if rule in LOWER_IS_BETTER else share

"""What a grade rule means to a reader, and which way is up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TITLES = {
    "official": "official grade",
    "strict": "strict grade",
    "kl": "KL divergence from the whole cache (nats)",
    "top1": "same most likely token as the whole cache",
    "nll": "negative log-likelihood of the text (nats)",
}
LOWER_IS_BETTER = frozenset({"kl", "nll"})


def title(rule: str) -> str:
    return TITLES.get(rule, rule)


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


def better(rule: str, first: float, second: float) -> bool:
    """Whether `first` is a better value than `second`."""
    return first < second if rule in LOWER_IS_BETTER else first > second


def goodness(rule: str, value: float, low: float, high: float) -> float:
    """0 (worst) to 1 (best). Shares stand on their own scale, other grades between the smallest and largest shown."""
    if low >= 0 and high <= 1 and rule not in LOWER_IS_BETTER:
        return value
    share = (value - low) / (high - low) if high > low else 1.0
    return 1 - share if rule in LOWER_IS_BETTER else share

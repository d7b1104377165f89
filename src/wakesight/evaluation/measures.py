"""What the numbers of a row are: their names for people, which way is up, what they lie between."""

from __future__ import annotations

from wakesight.evaluation.intervals import Limits

# In the order of reading: the strict rule first, as summary.json's mean is under it.
TITLES = {
    "strict": "strict grade",
    "official": "official grade",
    "top1": "same most likely token as the whole cache",
    "kl": "KL divergence from the whole cache (nats)",
    "nll": "negative log-likelihood of the text (nats)",
}
MAIN = ("strict", "top1")  # what a single number of a run is under: the first that its rows have
LOWER_IS_BETTER = frozenset({"kl", "nll"})
GRADES = ("strict", "official")  # of answers; the others are measured on a given text


def title(rule: str) -> str:
    return TITLES.get(rule, rule)


def limits(rule: str) -> Limits | None:
    """What a grade of an answer lies between; None for what is measured and has no such bounds."""
    return (0.0, 1.0) if rule in GRADES else None

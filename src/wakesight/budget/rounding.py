"""Where fractions become integers, once.

`keep_to_count` turns p into R entries per head; `apportion` shares a total among layers.
All shares are exact rationals, so a total is met exactly and equal weights give equal counts.
"""

from __future__ import annotations

import bisect
import math
import numbers
from collections.abc import Sequence
from fractions import Fraction

from wakesight.errors import RequestError


def keep_to_count(keep: float, n_body: int) -> int:
    """R = round(p * n_body) entries per KV head, Python's round (half to even).

    Source: GateSight, section on budgets (rounding mode is ours).
    Raises RequestError for p outside (0, 1] or NaN, and when p keeps nothing of a non-empty body.
    """
    check_keep(keep)
    count = round(keep * n_body)
    if count == 0 and n_body > 0:
        raise RequestError(
            f"keep={keep} keeps 0 of {n_body} entries per KV head; raise --keep to at least {1 / n_body:.4g}, "
            "or give the count itself with --entries"
        )
    return count


def check_keep(keep: float) -> None:
    """Raise RequestError unless `keep` is a real number with 0 < keep <= 1; numpy's numbers count."""
    if not (isinstance(keep, numbers.Real) and not isinstance(keep, bool) and 0 < keep <= 1):
        raise RequestError(f"keep={keep} is no kept fraction: it must be above 0 and at most 1, for example --keep 0.3")


def apportion(
    weights: Sequence[float | Fraction], total: int, cap: int | Sequence[int], floor: int = 0,
    sizes: Sequence[int] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Share `total` in proportion to `weights`, every share within [floor, cap], the sum exact.

    cap: one for all, or one for each. Water-filling first (shares that overflow `cap` or fall below `floor`
    are fixed there and the rest is shared again), then largest remainder, ties to the lower index; a share
    fixed at a bound gets no remainder unit. Source: GateSight `layer_power_budget`; cap, floor and tie rule ours.

    sizes: what one unit of each share takes of the total (the KV heads of a layer); 1 each if None. With sizes that
    differ the sum of size * share may miss the total, by less than the largest size, and never passes it: a unit
    that does not fit goes to the next largest remainder.

    Raises RequestError if no shares within the bounds can reach `total`, or a weight is negative or NaN.
    """
    if any(not math.isfinite(w) or w < 0 for w in weights):
        raise RequestError(f"budget weights must be finite and not negative, got {[float(w) for w in weights]}")
    caps = [cap] * len(weights) if isinstance(cap, int) else list(cap)
    units = [1] * len(weights) if sizes is None else list(sizes)
    if not sum(units) * floor <= total <= sum(size * most for size, most in zip(units, caps, strict=True)):
        raise RequestError(
            f"{total} entries cannot be shared among {len(weights)} layers with {floor} to {cap} each; "
            "ask for fewer entries"
        )
    shares = _waterfill([Fraction(w) for w in weights], total, caps, floor, units)
    counts = [math.floor(x) for x in shares]
    left = total - sum(size * count for size, count in zip(units, counts, strict=True))
    for i in sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i)):
        if counts[i] < shares[i] and units[i] <= left:
            counts[i] += 1
            left -= units[i]
    return tuple(counts)


def _waterfill(weights: list[Fraction], total: int, caps: list[int], floor: int, sizes: list[int]) -> list[Fraction]:
    """Shares x_i = clamp(level * w_i, floor, cap_i) whose sum, each times its size, is `total`.

    Weights of 0 stay at the floor unless everybody else is full; then they share the rest equally.
    """
    heavy = [i for i, w in enumerate(weights) if w > 0]
    light = [i for i, w in enumerate(weights) if w == 0]
    for_light = max(sum(sizes[i] for i in light) * floor, total - sum(sizes[i] * caps[i] for i in heavy))
    shares = dict.fromkeys(range(len(weights)), Fraction(0))
    for members, part in ((heavy, total - for_light), (light, for_light)):
        chosen = [(weights[i] or Fraction(1), caps[i], sizes[i]) for i in members]
        found = _level(chosen, part, floor)
        shares.update(zip(members, found, strict=True))
    return list(shares.values())


def _level(shares: list[tuple[Fraction, int, int]], total: int, floor: int) -> list[Fraction]:
    """The same for weights above 0; shares: (weight, cap, size).

    The sum rises with `level`, so the level lies between two of the points where a share meets a bound;
    between those the sum is linear and the level follows exactly.
    """
    if not shares:
        return []

    def filled(level: Fraction) -> Fraction:
        return sum((size * min(max(level * w, Fraction(floor)), Fraction(cap)) for w, cap, size in shares), Fraction(0))

    bends = sorted({Fraction(bound) / w for w, cap, _ in shares for bound in (floor, cap)})
    low = bends[max(bisect.bisect_right(bends, Fraction(total), key=filled) - 1, 0)]
    free = [size * w for w, cap, size in shares if floor <= low * w < cap]
    level = low + (total - filled(low)) / sum(free) if free else low
    return [min(max(level * w, Fraction(floor)), Fraction(cap)) for w, cap, _ in shares]

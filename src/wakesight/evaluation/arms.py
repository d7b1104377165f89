"""The arms of a comparison: what is run side by side on every question."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from wakesight.errors import RequestError
from wakesight.policy import Policy

WHOLE = "whole"  # the unpruned baseline: the session itself, nothing scored and nothing dropped


@dataclass(frozen=True)
class Arm:
    """policy: None for the unpruned baseline. id: unique, readable, the same in every run of the same arm."""

    policy: Policy | None

    @property
    def id(self) -> str:
        policy = self.policy
        if policy is None:
            return WHOLE
        unit = "" if policy.unit == "entry" else f"/{policy.unit}{policy.page_size}-{policy.page_reduce}"
        return f"{policy.scorer}/{policy.allocation}{unit}/{policy.evicted}/{policy.keep:g}"

    @property
    def family(self) -> str:
        """The arm without its kept fraction: one curve over p."""
        return self.id.rpartition("/")[0] or self.id


def make_arms(
    methods: Sequence[str], allocations: Sequence[str], keeps: Sequence[float], *, evicted: Sequence[str] = ("drop",),
    unit: str = "entry", page_size: int = 16,
) -> list[Arm]:  # fmt: skip
    """The baseline and every combination, in the order given. Raises RequestError for a bad name or a repeated arm."""
    if not methods or not allocations or not keeps or not evicted:
        raise RequestError("an evaluation needs at least one method, allocation, kept fraction and evicted mode")
    arms = [Arm(None)]
    for method, allocation, mode, keep in itertools.product(methods, allocations, evicted, keeps):
        policy = Policy(scorer=method, allocation=allocation, keep=keep, evicted=mode, unit=unit, page_size=page_size)
        arms.append(Arm(policy))
    ids = [arm.id for arm in arms]
    if repeated := next((name for name in ids if ids.count(name) > 1), None):
        raise RequestError(f"the arm {repeated} occurs twice; name every method, allocation and fraction once")
    return arms

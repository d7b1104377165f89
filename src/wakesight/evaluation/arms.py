"""The arms of a comparison: what is run side by side on every question."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.residency import Residency

Match = Literal["entries", "bytes"]

NATURAL = "natural"  # among allocations: what suits the scorer
WHOLE = "whole"  # the unpruned baseline: the session itself, nothing scored and nothing dropped


@dataclass(frozen=True)
class Arm:
    """policy: None for the unpruned baseline. id: unique, readable, the same in every run of the same arm.

    match: what an arm that demotes has in common with one that drops at the same kept fraction: "bytes" of fast memory,
    everything counted, or "entries" in its slots, with what it holds beside them on top.
    """

    policy: Policy | None
    match: Match = "entries"

    @property
    def id(self) -> str:
        policy = self.policy
        if policy is None:
            return WHOLE
        unit = "" if policy.unit == "entry" else f"/{policy.unit}{policy.page_size}-{policy.page_reduce}"
        return f"{policy.scorer}/{policy.allocation}{unit}/{policy.evicted}{self._settings}/{policy.keep:g}"

    @property
    def _settings(self) -> str:
        """How an arm demotes, where it is not as usual; the reservoir's place changes no answer."""
        if self.policy is None or self.policy.residency is None:
            return ""
        said = [f"match={self.match}"]
        for field in dataclasses.fields(Residency):
            value = getattr(self.policy.residency, field.name)
            if field.name not in ("page_size", "reservoir") and value != field.default:
                said.append(f"{field.name}={value}")
        return ":" + ",".join(said).replace(" ", "").replace("/", ".")

    @property
    def family(self) -> str:
        """The arm without its kept fraction: one curve over p."""
        return self.id if self.policy is None else split_id(self.id)[0]


@dataclass(frozen=True)
class ArmFacts:
    """What an arm's id says. page: size and reduction, "16-max", of an arm by pages; else "". evicted: "drop", or how
    it demotes, "demote:match=bytes"."""

    method: str
    allocation: str
    evicted: str
    unit: str
    keep: float
    page: str = ""

    @property
    def mode(self) -> str:
        """Drop or demote."""
        return self.evicted.partition(":")[0]


def split_id(arm: str) -> tuple[str, float]:
    """An arm's id as (family, kept fraction): rows hold ids, and what is drawn from them is grouped by these."""
    family, _, keep = arm.rpartition("/")
    return family, float(keep)


def facts_of(arm: str) -> ArmFacts:
    """The parts of an arm's id. The baseline evicts nothing: its allocation, mode and unit are the policies' usual."""
    if arm == WHOLE:
        return ArmFacts(WHOLE, "flat", "drop", "entry", 1.0)
    family, keep = split_id(arm)
    *parts, evicted = family.split("/")
    page = parts.pop().removeprefix("page") if len(parts) > 2 and parts[-1].startswith("page") else ""
    return ArmFacts(parts[0], "/".join(parts[1:]), evicted, "page" if page else "entry", keep, page)


def make_arms(
    methods: Sequence[str], allocations: Sequence[str], keeps: Sequence[float], *, evicted: Sequence[str] = ("drop",),
    unit: str | Sequence[str] = "entry", page_size: int = 16, residency: Residency | None = None,
    match: Match = "bytes",
) -> list[Arm]:  # fmt: skip
    """The baseline and every combination, in the order given.

    methods: scorers, each on all `allocations`, or on one of its own: "gatesight@gate". allocations: names, of which
    NATURAL stands for the one that suits the scorer. unit: how arms that drop do so, one or several; those that demote
    do so by page, as `residency` and `match` say. Raises RequestError for a bad name or a repeated arm.
    """
    if not methods or not allocations or not keeps or not evicted:
        raise RequestError("an evaluation needs at least one method, allocation, kept fraction and evicted mode")
    arms = [Arm(None)]
    for method in methods:
        scorer, at, own = method.partition("@")
        units = [unit] if isinstance(unit, str) else list(unit)
        modes = [(mode, one) for mode in evicted for one in (["page"] if mode == "demote" else units)]
        for allocation, (mode, one), keep in itertools.product([own] if at else allocations, modes, keeps):
            how = residency if mode == "demote" else None
            policy = Policy(scorer=scorer, keep=keep, evicted=mode, unit=one, page_size=page_size, residency=how)
            rule = policy.natural_allocation if allocation == NATURAL else allocation
            arms.append(Arm(policy.at(allocation=rule), match if mode == "demote" else "entries"))
    ids = [arm.id for arm in arms]
    if repeated := next((name for name in ids if ids.count(name) > 1), None):
        raise RequestError(f"the arm {repeated} occurs twice; name every method, allocation and fraction once")
    return arms

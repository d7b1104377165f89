"""What a simulated run counted, step by step, and the sums made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wakesight.simulate.costs import CostModel


@dataclass(frozen=True, eq=False)
class Tally:
    """int64 [step] each, summed over units.

    accesses = hits + misses + first_touches (the free ones). fetches: pages brought back in this step. resident: pages
    held after the step, trimmed. start: pages held before the first step. reversible: can what leaves come back?
    Source: WakeKV, residency simulator, shared definitions.
    """

    accesses: np.ndarray
    misses: np.ndarray
    first_touches: np.ndarray
    fetches: np.ndarray
    resident: np.ndarray
    start: int
    reversible: bool

    @property
    def hits(self) -> np.ndarray:
        return np.asarray(self.accesses - self.misses - self.first_touches)

    @property
    def demotions(self) -> int:
        """Pages that went to the reservoir: what came in and is not held at the end; 0 where leaving is for good.

        A page that was fetched, used and not retained counts, too.
        """
        if not self.reversible:
            return 0
        written = int(self.first_touches.sum() + self.fetches.sum())
        end = int(self.resident[-1]) if len(self.resident) else self.start
        return self.start + written - end


@dataclass(frozen=True)
class Row:
    """One policy at one budget, over one run or several. budget: pages per unit, None for full.

    miss_rate = misses / accesses. first_touches: free ones. mean_resident_pages: sum over units, mean over steps, then
    over runs; peak_resident_pages: the largest of all steps and runs. bytes_in = fetches, bytes_out = demotions, in
    pages of the cost model. stall_steps: steps with at least one fetch; stall_seconds: `CostModel.stall`.
    """

    policy: str
    budget: int | None
    runs: int
    accesses: int
    misses: int
    miss_rate: float
    first_touches: int
    fetches: int
    mean_resident_pages: float
    peak_resident_pages: int
    bytes_in: int
    bytes_out: int
    stall_steps: int
    stall_seconds: float


def row(policy: str, budget: int | None, tallies: Sequence[Tally], costs: CostModel) -> Row:
    """Runs pooled: counts are summed, resident pages averaged. Every run weighs as much as it has accesses."""
    accesses, misses = _sum(tallies, "accesses"), _sum(tallies, "misses")
    fetches = _sum(tallies, "fetches")
    means = [float(one.resident.mean()) if len(one.resident) else float(one.start) for one in tallies]
    return Row(
        policy=policy,
        budget=budget,
        runs=len(tallies),
        accesses=accesses,
        misses=misses,
        miss_rate=misses / accesses if accesses else 0.0,
        first_touches=_sum(tallies, "first_touches"),
        fetches=fetches,
        mean_resident_pages=float(np.mean(means)) if means else 0.0,
        peak_resident_pages=max((int(one.resident.max(initial=one.start)) for one in tallies), default=0),
        bytes_in=fetches * costs.page_bytes,
        bytes_out=sum(one.demotions for one in tallies) * costs.page_bytes,
        stall_steps=sum(int((one.fetches > 0).sum()) for one in tallies),
        stall_seconds=float(sum(costs.stall(one.fetches).sum() for one in tallies)),
    )


def _sum(tallies: Sequence[Tally], name: str) -> int:
    return sum(int(getattr(one, name).sum()) for one in tallies)

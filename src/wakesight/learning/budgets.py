"""Tables for budgets from utility, measured on the training documents while their labels are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from wakesight.core import Tables
from wakesight.errors import RequestError


class UtilityTables:
    """Means over documents of the largest utility of a head (peak) and of what its best share of entries holds (mass).

    top_share: the share; raw utility, not the normalised label, so that heads can be compared.
    """

    def __init__(self, top_share: float = 0.2) -> None:
        if not 0 < top_share <= 1:
            raise RequestError(f"top_share={top_share} must lie in (0, 1]; 0.2 is the default")
        self.top_share = top_share
        self.documents = 0
        self._peak: list[Tensor] = []
        self._mass: list[Tensor] = []

    def add(self, utility: Sequence[Tensor]) -> None:
        """utility: per attention layer [kv_head, entry], raw, of the entries that can be dropped."""
        count = max(1, math.floor(self.top_share * utility[0].shape[1] + 1e-9))
        peaks = [layer.double().amax(dim=1) for layer in utility]
        masses = [layer.double().topk(count, dim=1).values.sum(dim=1) for layer in utility]
        self._peak = _added(self._peak, peaks)
        self._mass = _added(self._mass, masses)
        self.documents += 1

    def tables(self) -> Tables:
        if not self.documents:
            raise RequestError("no document was given, so there is no utility to make tables from")
        return Tables(
            utility_mass=tuple(tuple((one / self.documents).tolist()) for one in self._mass),
            utility_peak=tuple(tuple((one / self.documents).tolist()) for one in self._peak),
        )


def _added(sums: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more

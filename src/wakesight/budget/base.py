"""What an allocation is: a rule that shares one total among the attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class BudgetRequest:
    """per_head = R, the mean entries per (layer, KV head); n_body = n - prot, the most a head can keep."""

    per_head: int
    n_body: int
    layers: int  # attention layers


class Allocation(Protocol):
    """Data-free rule: integers per attention layer, shared by the heads of the layer.

    Promises: the sum is `layers * per_head`, every count lies in [0, n_body], at least 1 if R >= 1.
    """

    def per_layer(self, request: BudgetRequest) -> tuple[int, ...]: ...

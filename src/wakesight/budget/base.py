"""What an allocation is: a rule that shares one total among attention layers, or among single heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from wakesight.core import Scores, Tables


@dataclass(frozen=True)
class BudgetRequest:
    """per_head = R, the mean entries per (layer, KV head); n_body = n - prot, the most a head can keep.

    tables: what was measured of the model offline, for the rules that read it; None without an artifact.
    """

    per_head: int
    n_body: int
    layers: int  # attention layers
    tables: Tables | None = None


@dataclass(frozen=True, eq=False)
class Body:
    """The entries beyond the protected prefix, among which a budget is shared.

    scores: per attention layer [kv_head, n_body]. must: bool [n_body], entries that come first; None for none.
    held: per attention layer bool [kv_head, n_body], which entries exist; None when all do.
    """

    scores: tuple[Tensor, ...]
    must: Tensor | None = None
    held: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, scores: Scores, prefix: int, held: Sequence[Tensor] | None = None) -> Body:
        """Views of `scores` and of `held` (per layer bool [kv_head, token]) without the first `prefix` tokens."""
        must = None if scores.must_keep is None else scores.must_keep[prefix:]
        return cls(
            tuple(layer[:, prefix:] for layer in scores.layers),
            must if must is not None and bool(must.any()) else None,
            None if held is None else tuple(layer[:, prefix:] for layer in held),
        )

    @property
    def n_body(self) -> int:
        return self.scores[0].shape[1] if self.scores else 0

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """How many of these entries each head holds: [layer][kv_head]."""
        if self.held is None:
            return tuple((self.n_body,) * layer.shape[0] for layer in self.scores)
        return tuple(tuple(layer.sum(dim=1).tolist()) for layer in self.held)

    @cached_property
    def recent(self) -> tuple[Tensor, ...]:
        """Per layer bool [kv_head, must entries], the most recent first: which of those a head holds."""
        if self.must is None:
            return tuple(layer.new_zeros(layer.shape[0], 0, dtype=torch.bool) for layer in self.scores)
        where = self.must.nonzero().flatten().flip(0)
        if self.held is None:
            return tuple(layer.new_ones(layer.shape[0], len(where), dtype=torch.bool) for layer in self.scores)
        return tuple(layer[:, where.to(layer.device)] for layer in self.held)

    @cached_property
    def free(self) -> tuple[Tensor, ...]:
        """The scores, -inf where an entry does not exist or comes first anyway."""
        free = self.scores
        if self.held is not None:
            pairs = zip(free, self.held, strict=True)
            free = tuple(layer.masked_fill(~held.to(layer.device), -torch.inf) for layer, held in pairs)
        if self.must is not None:
            must = self.must
            free = tuple(layer.masked_fill(must.to(layer.device), -torch.inf) for layer in free)
        return free


@runtime_checkable
class DataFree(Protocol):
    """Rule that reads no score: integers per attention layer, shared by the heads of the layer.

    Promises: the sum is `layers * per_head`, every count lies in [0, n_body], at least 1 if R >= 1. A rule that knows
    of layers with different numbers of KV heads holds to entries instead: the sum of heads times count is at most R
    for every head, and misses that by less than the heads of one layer.
    """

    def per_layer(self, request: BudgetRequest) -> tuple[int, ...]: ...


@runtime_checkable
class ScoreBased(Protocol):
    """Rule that reads the scores: integers [layer][kv_head].

    Promises: the sum is R for every head, or all that is held if that is less; no head gets more than it
    holds. A head may get 0. A rule whose heads keep equal counts (`utility_layer`) may fall short of that sum where
    heads are uneven, and never passes it.
    """

    def per_head(self, request: BudgetRequest, body: Body) -> tuple[tuple[int, ...], ...]: ...


Allocation = DataFree | ScoreBased

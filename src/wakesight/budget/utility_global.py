"""Utility, global: the best entries of the whole cache, once every head's scores have the head's own scale."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch

from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.measured import measured
from wakesight.budget.pooled import Global
from wakesight.errors import RequestError


@dataclass(frozen=True)
class UtilityGlobal:
    """The top B of score * u_{l,h} over all (layer, KV head, position), B = R for every head.

    u is the table `utility_peak`: what scores that are normalised per head have lost. must_keep, ties and the exact
    count are those of `global`. A factor of the head does not change the order inside it, so the best of each head
    by plain score, as many as it has here, are exactly that top B.
    A policy takes it only with a scorer that declares `normalised`: of any other one it would keep the heads whose
    scores are large by nature.
    Source: ours. Raises RequestError without the table, and for scores below 0, which a factor would turn around.
    """

    needs_table: ClassVar[str] = "utility_peak"
    needs_normalised: ClassVar[bool] = True

    def per_head(self, request: BudgetRequest, body: Body) -> tuple[tuple[int, ...], ...]:
        return Global().per_head(request, scaled(request, body, "utility_global"))


def scaled(request: BudgetRequest, body: Body, asker: str) -> Body:
    """`body` with every head's scores times its `utility_peak`; a new tensor per layer. Raises as UtilityGlobal."""
    heads = [layer.shape[0] for layer in body.scores]
    table = measured(request.tables, "utility_peak", asker, request.layers, heads)
    layers = []
    for scores, peaks in zip(body.scores, table, strict=True):
        if bool((scores < 0).any()):
            raise RequestError(
                f"the allocation {asker!r} weighs scores by the utility of their head, which only scores of at least 0 "
                "allow; use --scorer gatesight, or --allocation global"
            )
        layers.append(scores * torch.tensor(peaks, dtype=scores.dtype, device=scores.device).unsqueeze(1))
    return dataclasses.replace(body, scores=tuple(layers))

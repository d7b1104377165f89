"""One pass over the labels for what every later step needs: who is there, tables, half-lives, the slow set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wakesight.core import Tables
from wakesight.errors import RequestError
from wakesight.learning.budgets import UtilityTables
from wakesight.learning.dataset import Labels, body

SLOW_TOKENS = 1000.0
LEAST_DECAY = 1e-9  # of log-decay per token: a head that never forgets gets a finite half-life, about 7e8 tokens


@dataclass(frozen=True, eq=False)
class Survey:
    """documents: (id, corpus) in order. half_lives: per recurrent layer the median over documents, [head] in tokens."""

    documents: tuple[tuple[str, str], ...]
    tables: Tables
    half_lives: tuple[tuple[float, ...], ...]

    @property
    def corpora(self) -> list[str]:
        return sorted({corpus for _, corpus in self.documents})

    def slow(self, tokens: float = SLOW_TOKENS) -> list[Tensor] | None:
        """Per recurrent layer bool [head]: a median half-life of at least so many tokens; None without signals."""
        return [torch.tensor(layer) >= tokens for layer in self.half_lives] or None

    def to_json(self) -> dict[str, Any]:
        tables = {name: value for name, value in vars(self.tables).items() if value is not None}
        return {"documents": self.documents, "tables": tables, "half_lives": self.half_lives}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Survey:
        return cls(
            tuple((one, corpus) for one, corpus in plain["documents"]),
            Tables(**plain["tables"]),
            tuple(tuple(layer) for layer in plain["half_lives"]),
        )


def half_lives(native: Tensor) -> Tensor:
    """Measured half-life per head in tokens, float64 [head]: ln(0.5) / mean g, from [token, head, 3]."""
    decay = native[..., 1].double().mean(dim=0).clamp_max(-LEAST_DECAY)
    return math.log(0.5) / decay


def survey(labels: Labels, *, top_share: float = 0.2, exclude_prefix: bool = True) -> Survey:
    """Raises RequestError if there is no document, or one id twice."""
    documents: list[tuple[str, str]] = []
    tables, measured = UtilityTables(top_share), list[list[Tensor]]()
    for document in labels.documents():
        inside = body(document, exclude_prefix)
        documents.append((document.id, document.corpus))
        tables.add([utility[:, inside] for utility in document.utility])
        if "native" in document.signals.streams:
            measured.append([half_lives(native) for native in document.signals["native"]])
    if not documents:
        raise RequestError("there are no labelled documents; make some with wakesight label")
    if len({one for one, _ in documents}) < len(documents):
        raise RequestError("two labelled documents have the same id; label them again with ids of their own")
    return Survey(tuple(documents), tables.tables(), tuple(_medians(measured)))


def _medians(measured: Sequence[Sequence[Tensor]]) -> list[tuple[float, ...]]:
    if not measured:
        return []
    layers = [torch.stack([document[m] for document in measured]) for m in range(len(measured[0]))]
    return [tuple(layer.quantile(0.5, dim=0).tolist()) for layer in layers]

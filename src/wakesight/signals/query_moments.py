"""Mean and covariance of the context's queries before RoPE: what a future query may look like."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from wakesight.errors import WorkError
from wakesight.signals.chunk import Chunk
from wakesight.signals.precision import working_dtype
from wakesight.signals.rope import unrotate

BLOCK = 1024  # queries turned into float64 at a time


class QueryMoments:
    """Moments of every query head over the context without its first `skip` tokens, whose queries are outliers.

    RoPE is taken off with the chunk's own rotation (None: the layer has none). Blocks are merged by Chan's
    update in float64, so neither chunking nor a large common mean costs precision. Mean and covariance
    (population: divided by the count) are float32, or float64 for float64 queries; both are 0 while no
    query was counted, and the covariance of one query is 0.

    Source: NVIDIA/kvpress `expected_attention_press.py`, which takes the same moments through the hidden
    states; read off the queries they also hold behind a query norm.
    """

    def __init__(self, skip: int = 4) -> None:
        self.skip = skip
        self.count = 0
        self._mean: Tensor | None = None  # float64 [query_head, dim]
        self._scatter: Tensor | None = None  # float64 [query_head, dim, dim], sum of squared deviations
        self._dtype = torch.float32

    def watch(self, chunk: Chunk) -> None:
        query_heads, new, dim = chunk.queries.shape
        if self._mean is None:
            self._dtype = working_dtype(chunk.queries.dtype)
            self._mean = chunk.queries.new_zeros(query_heads, dim, dtype=torch.float64)
            self._scatter = chunk.queries.new_zeros(query_heads, dim, dim, dtype=torch.float64)
        for first in range(max(self.skip - chunk.start, 0), new, BLOCK):
            rows = chunk.queries[:, first : first + BLOCK].double()
            if chunk.rotation is not None:
                cos, sin = chunk.rotation[:, first : first + BLOCK].double()
                rows = unrotate(rows, cos, sin)
            self._merge(rows)

    def _merge(self, rows: Tensor) -> None:
        assert self._mean is not None
        assert self._scatter is not None
        fresh = rows.shape[1]
        total = self.count + fresh
        mean = rows.mean(dim=1)
        around = rows - mean.unsqueeze(1)
        apart = mean - self._mean
        between = apart.unsqueeze(2) * apart.unsqueeze(1) * (self.count * fresh / total)
        self._scatter = self._scatter + around.mT @ around + between
        self._mean = self._mean + apart * (fresh / total)
        self.count = total

    @property
    def mean(self) -> Tensor:
        """[query_head, dim]. Raises WorkError before the first `watch`."""
        return self._watched(self._mean).to(self._dtype)

    @property
    def covariance(self) -> Tensor:
        """[query_head, dim, dim]. Raises WorkError before the first `watch`."""
        return (self._watched(self._scatter) / max(self.count, 1)).to(self._dtype)

    def _watched(self, moment: Tensor | None) -> Tensor:
        if moment is None:
            raise WorkError("no query was seen yet; prefill a context before reading query_mean or query_covariance")
        return moment

    def tensors(self) -> dict[str, Tensor]:
        """Its content for a file; {} before the first `watch`."""
        if self._mean is None or self._scatter is None:
            return {}
        return {"count": torch.tensor([self.count]), "mean": self._mean, "scatter": self._scatter}

    @classmethod
    def restored(cls, tensors: dict[str, Tensor], dtype: torch.dtype) -> QueryMoments:
        """Inverse of `tensors`, for queries of `dtype`."""
        tap = cls()
        tap._dtype = working_dtype(dtype)
        if tensors:
            tap.count, tap._mean, tap._scatter = int(tensors["count"]), tensors["mean"], tensors["scatter"]
        return tap

    def copy(self) -> QueryMoments:
        """Moments of their own with the same content, for a child that reads on."""
        return copy.copy(self)

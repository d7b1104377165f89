"""Rows that grow with the context, one or more numbers per token."""

from __future__ import annotations

import torch
from torch import Tensor

from wakesight.errors import WorkError


class Rows:
    """A tensor [token, ...] that is read in chunks: chunks are kept as they come and joined once, when read.

    So reading n tokens copies n rows, not n^2 / chunk, and no spare room is held. A tensor once given out
    never changes.
    """

    def __init__(self, *chunks: Tensor) -> None:
        self._chunks = list(chunks)

    def add(self, chunk: Tensor) -> None:
        """chunk: [new, ...], which nobody else may write to any more."""
        self._chunks.append(chunk)

    @property
    def count(self) -> int:
        """Rows so far, one per token."""
        return sum(len(chunk) for chunk in self._chunks)

    def whole(self) -> Tensor:
        """All rows in order. Raises WorkError before the first `add`."""
        if not self._chunks:
            raise WorkError("nothing was overheard yet; prefill a context before reading its signals")
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks)]
        return self._chunks[0]

    def copy(self) -> Rows:
        """Rows of their own with the same content, for a child that reads on; the tensor itself is shared."""
        return Rows(self.whole()) if self._chunks else Rows()

"""How strongly a part of the context is attended to while the model repeats it (the statistic of KVzip)."""

from __future__ import annotations

import torch
from torch import Tensor

from wakesight.errors import WorkError
from wakesight.signals.chunk import Chunk
from wakesight.signals.precision import working_dtype


class ReconstructionMax:
    """Per KV head and context position start .. stop - 1, the largest softmax weight that any query gave its key.

    prefix: positions 0 .. prefix - 1 are the protected ones. own: position of the first token behind the context.
    Every query's softmax runs over exactly three sets of keys, as far as they are held:

        0 .. prefix - 1 | start .. stop - 1 | own .. the query's own position

    and the maximum over the queries of every pass and over the query heads of the group. Positions that are not
    held stay 0. Chunks of any size give the same, up to rounding: memory is group * block *
    (prefix + stop - start + repeat input) numbers. float32, or float64 for float64 queries.

    Source: KVzip (arXiv 2505.23416; snu-mllab/KVzip `attention/score.py`).
    """

    def __init__(self, prefix: int, start: int, stop: int, own: int, block: int = 64) -> None:
        if not 0 <= prefix <= start <= stop <= own:
            raise WorkError(f"there is no part {start} .. {stop} between prefix {prefix} and context end {own}")
        self.prefix, self.start, self.stop, self.own, self.block = prefix, start, stop, own, block
        self._largest: Tensor | None = None

    def watch(self, chunk: Chunk) -> None:
        group = chunk.queries.shape[0] // len(chunk.keys)
        dtype = working_dtype(chunk.queries.dtype)
        if self._largest is None:
            size = (len(chunk.keys), self.stop - self.start)
            self._largest = torch.zeros(size, dtype=dtype, device=chunk.queries.device)
        for head, keys in enumerate(chunk.keys):
            positions = None if chunk.positions is None else chunk.positions[head]
            prefix, start, stop, own = self._slots(positions)
            queries = chunk.queries[head * group : (head + 1) * group].to(dtype) * chunk.scaling
            parts = torch.cat([keys[:prefix], keys[start:stop], keys[own:]]).to(dtype)
            fresh = self._blocks(queries, parts, prefix, prefix + stop - start)
            row = self._largest[head]
            where = slice(None) if positions is None else positions[start:stop] - self.start
            row[where] = torch.maximum(row[where], fresh)

    def _slots(self, positions: Tensor | None) -> list[int]:
        """Where prefix ends, the part starts and ends, and the own tokens start, in slots of ascending positions."""
        bounds = [self.prefix, self.start, self.stop, self.own]
        if positions is None:
            return bounds
        found: list[int] = torch.searchsorted(positions, torch.tensor(bounds, device=positions.device)).tolist()
        return found

    def _blocks(self, queries: Tensor, keys: Tensor, first: int, last: int) -> Tensor:
        """Scaled queries [group, q, dim], keys [key, dim] with the queries' own last -> [last - first], the largest."""
        new, visible = queries.shape[1], keys.shape[0] - queries.shape[1]
        largest = queries.new_zeros(last - first)
        future = torch.ones(self.block, self.block, dtype=torch.bool, device=keys.device).triu(1)
        for at in range(0, new, self.block):
            rows = queries[:, at : at + self.block]
            width = rows.shape[1]
            seen = visible + at + width
            logits = rows @ keys[:seen].T
            logits[..., seen - width :].masked_fill_(future[:width, :width], float("-inf"))
            weights = logits.softmax(dim=-1).flatten(0, 1)[:, first:last]
            largest = torch.maximum(largest, weights.amax(dim=0))
        return largest

    @property
    def largest(self) -> Tensor:
        """[kv_head, stop - start]. Raises WorkError before the first `watch`."""
        if self._largest is None:
            raise WorkError("nothing was repeated yet; read the repeat input before asking for its attention")
        return self._largest

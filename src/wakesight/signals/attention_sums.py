"""How much attention every entry received from the whole context (the accumulator of H2O)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.errors import WorkError
from wakesight.signals.chunk import Chunk
from wakesight.signals.precision import working_dtype


class AttentionSums:
    """Per query head and logical position, the sum over all queries so far of their causal softmax weight.

    A query's softmax runs over the entries its layer holds at that moment, so chunks of any size give
    the same sums, up to rounding. Costs one more pass over Q K^T of each chunk, in blocks of `block` queries:
    memory is group * block * n numbers, linear in n, and no KV head is repeated. float32, or float64 for
    float64 queries.

    Source: arXiv 2306.14048 (FMInference/H2O `modify_llama.py`), in the prefill form of Zefan-Cai/PyramidKV
    `pyramidkv_utils.py`.
    """

    def __init__(self, block: int = 64) -> None:
        self.block = block
        self._sums: Tensor | None = None

    def watch(self, chunk: Chunk) -> None:
        query_heads, new, _ = chunk.queries.shape
        dtype = working_dtype(chunk.queries.dtype)
        tokens = chunk.start + new
        sums = torch.zeros(query_heads, tokens, dtype=dtype, device=chunk.queries.device)
        group = query_heads // len(chunk.keys)
        by_head = sums.view(len(chunk.keys), group, tokens)
        for head, keys in enumerate(chunk.keys):
            queries = chunk.queries[head * group : (head + 1) * group].to(dtype) * chunk.scaling
            received = self._received(queries, keys.to(dtype))
            if chunk.positions is None:
                by_head[head] = received
            else:
                by_head[head].index_copy_(1, chunk.positions[head], received)
        if self._sums is not None:
            sums[:, : self._sums.shape[1]] += self._sums
        self._sums = sums

    def _received(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scaled queries [group, q, dim], keys [held, dim] with the queries' own last -> [group, held]."""
        group, new, _ = queries.shape
        held = keys.shape[0]
        received = queries.new_zeros(group, held)
        future = torch.ones(self.block, self.block, dtype=torch.bool, device=keys.device).triu(1)
        for first in range(0, new, self.block):
            rows = queries[:, first : first + self.block]
            width = rows.shape[1]
            seen = held - new + first + width
            logits = rows @ keys[:seen].T
            logits[..., seen - width :].masked_fill_(future[:width, :width], float("-inf"))
            received[:, :seen] += logits.softmax(dim=-1).sum(dim=1)
        return received

    def total(self, tokens: int) -> Tensor:
        """The sums of positions 0 .. tokens: [query_head, token], zeros where no key was ever held.

        The tensor never changes afterwards. Raises WorkError before the first `watch`.
        """
        if self._sums is None:
            raise WorkError("no attention was summed yet; prefill a context before reading attention_sums")
        sums = self._sums[:, :tokens]
        return F.pad(sums, (0, tokens - sums.shape[1]))

    def tensors(self) -> dict[str, Tensor]:
        """Its content for a file; {} before the first `watch`."""
        return {} if self._sums is None else {"sums": self._sums}

    @classmethod
    def restored(cls, tensors: dict[str, Tensor]) -> AttentionSums:
        """Inverse of `tensors`."""
        tap = cls()
        tap._sums = tensors.get("sums")
        return tap

    def copy(self, held: Tensor | None = None) -> AttentionSums:
        """An accumulator of its own, for a child that reads on.

        held: bool [kv_head, token], the entries that the child kept; the sums of the others are forgotten,
        as H2O drops them with their entries. None keeps all.
        """
        twin = copy.copy(self)
        if self._sums is not None and held is not None:
            sums = self.total(held.shape[1])
            kept = held.repeat_interleave(sums.shape[0] // held.shape[0], dim=0)
            twin._sums = sums.masked_fill(~kept, 0.0)
        return twin

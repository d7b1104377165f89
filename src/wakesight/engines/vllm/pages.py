"""Keys and values in vLLM's blocks, read and written as [kv_head, entry, dim].

A CPU backend packs a block for its instruction set, so where an entry lies inside a block is not assumed but asked:
numbered entries are written by the backend's own function into a scratch block, and found again there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wakesight.errors import WorkError

DIGIT = 64  # numbers are written in digits that bfloat16 holds exactly


class Pages:
    """One attention layer's storage. layer: vLLM's Attention module. block_size: tokens per block of its group."""

    def __init__(self, layer: Any, block_size: int) -> None:
        self._layer = layer
        self._block_size = block_size
        self._where: tuple[Tensor, Tensor] | None = None

    @property
    def _storage(self) -> Tensor:
        """[block, kv_head, slot, key and value dims], the kernel's blocks."""
        found = self._layer.kv_cache
        storage: Tensor = found[0] if isinstance(found, (list, tuple)) else found
        return storage

    def read(self, blocks: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_head, count, dim] of the first `count` slots of these blocks, as copies."""
        storage = self._storage
        _, heads, slots, both = storage.shape
        rows = self._kernel_blocks(blocks)
        raw = storage[rows].reshape(len(rows), heads, slots * both)
        found = []
        for where in self._layout():
            part = raw[:, :, where.flatten()].view(len(rows), heads, slots, -1)
            found.append(part.transpose(0, 1).reshape(heads, len(rows) * slots, -1)[:, :count].contiguous())
        return found[0], found[1]

    def write(self, blocks: np.ndarray, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [kv_head, entry, dim] into the first slots of `blocks`, which are the kernel's own."""
        storage, count = self._storage, keys.shape[1]
        if count == 0:  # a layer may keep nothing
            return
        slots = storage.shape[2]
        inside = torch.arange(slots, device=keys.device)
        rows = torch.from_numpy(blocks).to(keys.device, torch.long)
        places = (rows[:, None] * slots + inside).flatten()[:count].contiguous()
        self._layer.impl.do_kv_cache_update(
            self._layer, keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), storage, places
        )

    def zero(self, blocks: np.ndarray, count: int) -> None:
        """Write zeros into the first `count` slots."""
        _, heads, _, both = self._storage.shape
        nothing = torch.zeros(heads, count, both // 2, dtype=self._storage.dtype, device=self._storage.device)
        self.write(blocks, nothing, nothing)

    def _kernel_blocks(self, blocks: Sequence[int]) -> Tensor:
        """The kernel may cut a block of the group into several of its own."""
        storage = self._storage
        ratio = self._block_size // storage.shape[2]
        ids = torch.as_tensor(list(blocks), dtype=torch.long, device=storage.device)
        return (ids[:, None] * ratio + torch.arange(ratio, device=ids.device)).flatten()

    def _layout(self) -> tuple[Tensor, Tensor]:
        """Of keys and of values: int64 [slot, dim], the place of that number in a head's part of a block."""
        if self._where is None:
            _, heads, slots, both = self._storage.shape
            found = (self._find(0, heads, slots, both // 2), self._find(1, heads, slots, both // 2))
            self._where = found
        return self._where

    def _find(self, which: int, heads: int, slots: int, dim: int) -> Tensor:
        ids = torch.arange(slots * dim, device=self._storage.device)
        value = torch.zeros(2 * slots * dim, dtype=torch.long, device=ids.device)
        ours = torch.ones_like(value, dtype=torch.bool)
        for place in range(3):
            digit = (ids // DIGIT**place) % DIGIT
            raw = self._written(which, digit.view(slots, 1, dim), heads, slots, dim)
            ours &= raw >= 0
            value += raw.clamp(min=0).long() * DIGIT**place
        found = ours.nonzero().flatten()
        where = torch.empty_like(ids)
        where[value[found]] = found
        if len(found) != len(ids) or len(torch.unique(where)) != len(ids):
            raise WorkError(
                "wakesight cannot tell how this attention backend lays out a block; use the CPU or FlashAttention "
                "backend of vLLM"
            )
        return where.view(slots, dim)

    def _written(self, which: int, digits: Tensor, heads: int, slots: int, dim: int) -> Tensor:
        """The last head's part of a scratch block after the backend wrote `digits` as key or value, -1 elsewhere."""
        storage = self._storage
        scratch = torch.full((1, heads, slots, 2 * dim), -1.0, dtype=storage.dtype, device=storage.device)
        rows = torch.full((2, slots, heads, dim), -1.0, dtype=storage.dtype, device=storage.device)
        rows[which, :, -1:] = digits.to(storage.dtype)
        places = torch.arange(slots, device=storage.device)
        self._layer.impl.do_kv_cache_update(self._layer, rows[0].contiguous(), rows[1].contiguous(), scratch, places)
        return scratch[0, -1].flatten().float()


class PagedSlots:
    """A whole session's entries of one layer, with the calls that `Recording.signals` makes on stored slots."""

    def __init__(self, pages: Pages, blocks: Sequence[int], tokens: int) -> None:
        self._pages, self._blocks, self._tokens = pages, blocks, tokens

    def read(self, name: str) -> Tensor:
        """[kv_head, token, dim]. name: "key" or "value"."""
        keys, values = self._pages.read(self._blocks, self._tokens)
        return keys if name == "key" else values

    def strips(self, name: str) -> list[Tensor]:
        """Per KV head [token, dim]."""
        return list(self.read(name))

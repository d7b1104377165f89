"""Fast memory of one layer: slots for pages that come and go, and what is always read, side by side.

    slot B-1 ... slot 1  slot 0 | strip              | tail
    any pages, newest slot first| first pages, whole | recent pages, closed ones, open page | unused

Slots fill from 0, so whatever is held lies in one piece, and attention over all of it needs neither a gather nor a
mask. Slots are numbered from the right, because the piece must end where the next token goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wakesight.cache.pool import Lease, Pool
from wakesight.cache.residency.plan import PagePlan


class FastPages:
    """Keys and values [kv_head, place, page_size, dim] under one plan.

    held: tokens in strip and tail together, per KV head; they lie in a row.
    """

    def __init__(self, pool: Pool, plan: PagePlan, key: Tensor, value: Tensor) -> None:
        """key, value: [kv_head, any, dim], whose heads, dims, dtype and device are taken over."""
        self.plan = plan
        self.held = 0
        self._pool = pool
        places = (key.shape[0], plan.fast_pages, plan.page_size)
        leases: list[Lease] = []
        try:
            for like in (key, value):
                leases.append(pool.lease((*places, like.shape[2]), like.dtype, like.device))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        self._leases = leases
        self.key, self.value = (lease.tensor for lease in leases)
        self._strip = plan.strip * plan.page_size  # tokens
        self._before = plan.slots * plan.page_size  # tokens
        self._rows = [part.view(key.shape[0], -1, part.shape[3]) for part in (self.key, self.value)]

    @property
    def heads(self) -> int:
        return self.key.shape[0]

    @property
    def bytes(self) -> int:
        return sum(lease.bytes for lease in self._leases)

    @property
    def room(self) -> int:
        """Tokens that can be written before pages must leave the tail."""
        return (self.plan.strip + self.plan.tail) * self.plan.page_size - self.held

    @property
    def in_tail(self) -> int:
        """Tokens in the tail."""
        return max(0, self.held - self._strip)

    def write(self, key: Tensor, value: Tensor) -> None:
        """The next tokens, [kv_head, new, dim] each; `room` must do."""
        new, start = key.shape[1], self._before + self.held
        if new > self.room:
            raise RuntimeError(f"{new} tokens do not fit into the {self.room} that are left of strip and tail")
        for rows, fresh in zip(self._rows, (key, value), strict=True):
            rows[:, start : start + new] = fresh
        self.held += new

    def read(self, slots: int) -> tuple[Tensor, Tensor]:
        """Views [kv_head, token, dim] of slots 0 .. slots - 1 and everything in strip and tail."""
        start, stop = self._before - slots * self.plan.page_size, self._before + self.held
        return self._rows[0][:, start:stop], self._rows[1][:, start:stop]

    def in_slots(self, slots: int) -> tuple[Tensor, Tensor]:
        """Views [kv_head, token, dim] of slots 0 .. slots - 1 alone."""
        start = self._before - slots * self.plan.page_size
        return self._rows[0][:, start : self._before], self._rows[1][:, start : self._before]

    def places(self, slots: Tensor) -> Tensor:
        """int64 [kv_head, any] slots -> rows of `flat`."""
        heads = torch.arange(self.heads, device=slots.device)[:, None]
        return heads * self.plan.fast_pages + (self.plan.slots - 1 - slots)

    def flat(self) -> tuple[Tensor, Tensor]:
        """Views [kv_head * place, page_size, dim]."""
        return self.key.flatten(0, 1), self.value.flatten(0, 1)

    def gathered(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """[kv_head, token, dim]: copies of the pages at `places` [kv_head, any], then strip and tail."""
        parts = []
        for pages, rest in zip(self.flat(), self.read(0), strict=True):
            picked = pages.index_select(0, places.flatten()).view(self.heads, -1, pages.shape[2])
            parts.append(torch.cat([picked, rest], dim=1))
        return parts[0], parts[1]

    def tail_pages(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Views [kv_head, count, page_size, dim] of whole pages of the tail, from its page `start` on."""
        first = self.plan.slots + self.plan.strip + start
        return self.key[:, first : first + count], self.value[:, first : first + count]

    def drop_first(self, pages: int) -> None:
        """The first `pages` pages leave the tail; the rest moves up."""
        self._shift(pages * self.plan.page_size, self.in_tail - pages * self.plan.page_size, 0)

    def make_room(self, pages: int, tokens: int) -> None:
        """The first `tokens` tokens of the tail move `pages` pages down; what comes before them is for the caller."""
        self._shift(0, tokens, pages * self.plan.page_size)

    def cut(self, held: int) -> None:
        """Only the first `held` tokens of strip and tail stay."""
        self._poison(held, self.held)
        self.held = held

    def forget(self, empty: Tensor) -> None:
        """Under a poisoning pool slots that are empty, bool [kv_head, slot], turn NaN."""
        if self._pool.poison:
            for pages in (self.key, self.value):
                pages[:, : self.plan.slots][empty.flip(1)] = float("nan")

    def release(self) -> None:
        for lease in self._leases:
            lease.release()
        self._leases = []

    def _shift(self, source: int, tokens: int, target: int) -> None:
        """Move tokens of the tail (places counted from its start) and end the tail behind them."""
        start, before = self._before + self._strip, self.held
        for rows in self._rows:
            moved = rows[:, start + source : start + source + tokens].clone()  # source and target may overlap
            rows[:, start + target : start + target + tokens] = moved
        self.held = self._strip + target + tokens
        self._poison(self.held, before)

    def _poison(self, start: int, stop: int) -> None:
        if self._pool.poison:
            for rows in self._rows:
                rows[:, self._before + start : self._before + stop] = float("nan")

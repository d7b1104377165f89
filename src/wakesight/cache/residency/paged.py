"""One attention layer of one demoted sequence: every entry is still there, a few pages of them in fast memory.

`PagedSlots` stands where `Slots` stands in a session. It holds the strip (protected prefix and sinks), slots for pages
that come and go, and the tail (`fast.py`); every closed page also lies in the reservoir, and only there once it leaves
its slot. One pass over new tokens:

    settle    pages that closed since the last choice leave the tail (one-token passes: only when a rerank is due)
    write     the new keys and values; pages that close go to reservoir and sketches
    choose    the K best pages of every KV head; those not resident are fetched, the longest unused leave
    attend    over [chosen pages | strip | tail]; new tokens see what is before them

With `attend="all"` nothing is chosen: every page passes through the slots in waves, and the result is exact.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wakesight.cache.pool import Lease, Pool
from wakesight.cache.residency.base import SlotState
from wakesight.cache.residency.fast import FastPages
from wakesight.cache.residency.plan import PagePlan
from wakesight.cache.residency.reservoir import Reservoir, make_reservoir
from wakesight.cache.residency.sketches import Sketches
from wakesight.cache.residency.table import Done, Fetches, SlotTable
from wakesight.cache.residency.wants import best_pages, true_attention
from wakesight.cache.residency.waves import Part, merged, part
from wakesight.cache.slots import Payload, Slots
from wakesight.errors import WorkError

Kernel = Callable[..., Tensor]  # (query, key, value, scaling) -> output, the newest tokens last
COPIED = 256  # pages that a copy moves at a time
PAGES = ("page_key", "page_value")  # names in a file
NEVER_RANKED = 2**30  # passes since the last rerank, before the first


@dataclass(frozen=True)
class Traffic:
    """What a layer did since it was demoted, counted over its KV heads, in pages.

    wants = hits + misses (+ free first touches). restores: pages brought back after an answer, so that the next one
    starts alike; they are no fetches. moved_bytes: of fetches and restores, as they crossed.
    """

    wants: int = 0
    hits: int = 0
    misses: int = 0
    fetches: int = 0
    restores: int = 0
    moved_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.sub, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class _Mark:
    """Where an answer began, to go back to."""

    tokens: int
    settled: int
    pages: int
    table: SlotState
    step: int


class PagedSlots(Slots):
    """The entries of one layer under a `PagePlan`. Made by `demote`. What reads strips as a whole raises RuntimeError.

    plan: what it holds and reads. traffic: its counters. listener: is told (step, pages int64 [kv_head, K], weights)
    at every choice; for tests and traces.
    """

    def __init__(self, pool: Pool, plan: PagePlan, key: Tensor, value: Tensor) -> None:
        """Empty. key, value: [kv_head, any, dim], whose heads, dims, dtype and device are taken over."""
        super().__init__(pool)
        for name, like in (("key", key), ("value", value)):
            self._payloads[name] = Payload(like.shape[0], like.shape[2], like.dtype, like.device)
        self.plan = plan
        self.traffic = Traffic()
        self.listener: Callable[[int, Tensor, Tensor], None] | None = None
        self._fast = FastPages(pool, plan, key, value)
        self._staged: list[Lease] = []
        self._sketches: Sketches | None = None
        self._reservoir: Reservoir | None = None
        try:
            self._stage(key, value)
            if plan.sketches:
                self._sketches = Sketches(pool, plan.sketch, plan.page_size)
            self._reservoir = make_reservoir(plan.reservoir, pool, plan.page_size, key.device)
        except BaseException:
            self.release()
            raise
        self._page_bytes = plan.page_size * (key.shape[2] * key.itemsize + value.shape[2] * value.itemsize)
        self._tokens = 0  # written; `_fresh` comes on top
        self._settled = 0  # pages that have left the tail: ids 0 .. settled - 1
        self._step = 0
        self._since = NEVER_RANKED
        self._gather: Tensor | None = None  # places that are read; None: all slots in use
        self._mark: _Mark | None = None
        self._fresh: tuple[Tensor, Tensor] | None = None
        self._table = self._new_table(None)

    @classmethod
    def demote(cls, pool: Pool, plan: PagePlan, key: Tensor, value: Tensor, first: Tensor | None) -> PagedSlots:
        """All entries of a layer, [kv_head, token, dim], of which the best pages start in fast memory.

        first: int64 [kv_head, any], page ids (counted from behind the strip), the best first; the first B are resident.
        All or nothing. Raises WorkError if memory or the disk is full.
        """
        slots = cls(pool, plan, key, value)
        try:
            slots._fill(key, value)
            if plan.attend is None:  # its waves take pages in order
                first = torch.arange(slots._settled).expand(key.shape[0], -1)
            slots._table = slots._new_table(first)
            slots._copy(slots._table.resident())
        except BaseException:
            slots.release()
            raise
        return slots

    def storage(self, name: str) -> Tensor:
        """Raises RuntimeError: there is no one piece to look at."""
        raise RuntimeError(f"the {name}s of a demoted layer are not in one piece")

    # ---- what is held -------------------------------------------------------------------------------------------

    @property
    def uniform(self) -> bool:
        """False: its heads cannot be read as one view."""
        return False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Entries per KV head, in whichever memory they are."""
        return (self._tokens + self._waiting,) * self._fast.heads

    @property
    def length(self) -> int:
        return self._tokens + self._waiting

    @property
    def fast_lengths(self) -> tuple[int, ...]:
        """Entries per KV head in fast memory."""
        held = self._table.held().tolist()
        return tuple(self._fast.held + pages * self.plan.page_size for pages in held)

    @property
    def pages(self) -> int:
        """Closed pages, the strip's not counted."""
        return self._reservoir.pages if self._reservoir is not None else 0

    @property
    def held_bytes(self) -> int:
        """Fast memory: every place of the plan, in use or not, sketches and staging; growth is in `slack_bytes`."""
        return self._fast.bytes + self.sketch_bytes + self.staging_bytes

    @property
    def slack_bytes(self) -> int:
        return self._sketches.slack_bytes if self._sketches is not None else 0

    @property
    def sketch_bytes(self) -> int:
        return self._sketches.bytes if self._sketches is not None else 0

    @property
    def staging_bytes(self) -> int:
        return sum(lease.bytes for lease in self._staged)

    @property
    def reservoir_bytes(self) -> int:
        return self._reservoir.bytes if self._reservoir is not None else 0

    @property
    def table(self) -> SlotState:
        """Which page is in which slot, now."""
        return self._table.state

    # ---- the verbs of a session ---------------------------------------------------------------------------------

    def append(self, fresh: Mapping[str, Tensor]) -> None:
        """Take up new keys and values [kv_head, new, dim]; they are written when their queries `attend`, by block.

        The first one since the last `commit` or `truncate` marks where to go back to.
        """
        if self._fresh is not None:
            raise RuntimeError("the tokens before these have not attended yet")
        if self._mark is None:
            self._mark = _Mark(self._tokens, self._settled, self.pages, self._table.state, self._step)
        self._fresh = (fresh["key"], fresh["value"])

    def attend(self, query: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        """[1, query_head, q, value_dim] for the queries [1, query_head, q, dim] of the tokens just appended.

        kernel(query, key, value, scaling): causal attention over keys [1, kv_head, token, dim], the queries' own last.
        Raises WorkError if pages cannot be written or read back; `truncate` then restores what was before.
        """
        if self._fresh is None:
            raise RuntimeError("no tokens were appended for these queries")
        (key, value), new, start, outputs = self._fresh, query.shape[2], 0, []
        while start < new:
            choose = new > 1 or self._due()
            if choose:
                self._settle()
            stop = start + min(self.plan.block, self._fast.room, new - start)
            self._write(key[:, start:stop], value[:, start:stop])
            outputs.append(self._pass(query[:, :, start:stop], scaling, kernel, choose))
            start = stop
        self._fresh = None
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def commit(self) -> None:
        """What was appended stays for good."""
        self._mark, self._since = None, NEVER_RANKED

    def truncate(self, lengths: Sequence[int]) -> None:
        """Back to the state before the first `append` since the last commit, bit for bit, fast memory included.

        lengths: those of that state. A page that can no longer be read back leaves its slot empty; the tail must be
        readable, else WorkError. Raises RuntimeError for other lengths.
        """
        self._fresh = None
        mark, self._mark = self._mark, None
        before = self._tokens if mark is None else mark.tokens
        if any(length != before for length in lengths):
            raise RuntimeError(f"cannot cut a demoted layer to {tuple(lengths)} entries, only back to {before}")
        if mark is not None:
            self._restore(mark)

    def copy(self) -> PagedSlots:
        """The same in storage of its own, reservoir included. Raises WorkError on lack of memory."""
        like = self._fast.read(0)
        twin = PagedSlots(self._pool, self.plan, *like)
        try:
            for mine, its in zip((self._fast.key, self._fast.value), (twin._fast.key, twin._fast.value), strict=True):
                its.copy_(mine)
            twin._fast.held = self._fast.held
            for start in range(0, self.pages, COPIED):
                twin._close(*self._from_reservoir(start, min(start + COPIED, self.pages)))
        except BaseException:
            twin.release()
            raise
        twin._table.restore(self._table.state)
        twin._tokens, twin._settled, twin._step = self._tokens, self._settled, self._step
        return twin

    def release(self) -> None:
        """Return all memory; the reservoir's too."""
        self._fast.release()
        for lease in self._staged:
            lease.release()
        self._staged = []
        for store in (self._sketches, self._reservoir):
            if store is not None:
                store.release()

    def saved(self) -> dict[str, Tensor]:
        """Everything that a file must hold; `load` takes it back. Pages by shape alone: see `saved_pages`."""
        shapes = {name: (part.shape, part.dtype) for name, part in zip(PAGES, self._places, strict=True)}
        state, (rest_key, rest_value) = self._table.state, self._fast.read(0)
        return {
            **{
                name: torch.empty(heads, self.pages, size, dim, dtype=dtype, device="meta")
                for name, ((heads, _, size, dim), dtype) in shapes.items()
            },
            "rest_key": rest_key, "rest_value": rest_value, "slot_page": state.slot_page, "last_use": state.last_use,
            "last_weight": state.last_weight,
        }  # fmt: skip

    def saved_pages(self) -> dict[str, Callable[[], Tensor]]:
        """What reads all pages from the reservoir, [kv_head, page, page_size, dim], when it is their turn."""

        def key() -> Tensor:
            return self._from_reservoir(0, self.pages)[0]

        def value() -> Tensor:
            return self._from_reservoir(0, self.pages)[1]

        return dict(zip(PAGES, (key, value), strict=True))

    def load(self, held: Mapping[str, Tensor], settled: int, step: int) -> None:
        """Fill an empty layer with what `saved` gave, pages included. settled, step: as they were."""
        self._fast.write(held["rest_key"], held["rest_value"])
        self._close(held["page_key"], held["page_value"])
        self._settled, self._step = settled, step
        self._tokens = settled * self.plan.page_size + self._fast.held
        seen = torch.ones(self._fast.heads, self.pages, dtype=torch.bool, device=held["slot_page"].device)
        self._table.restore(SlotState(held["slot_page"], held["last_use"], held["last_weight"], seen))
        self._copy(self._table.resident())

    @property
    def counters(self) -> tuple[int, int]:
        """(settled, step), which `load` needs besides tensors."""
        return self._settled, self._step

    # ---- one pass -----------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> int:
        return 0 if self._fresh is None else self._fresh[0].shape[1]

    def _due(self) -> bool:
        """Whether a single new token comes with a choice; at the latest when the tail is full."""
        return self.plan.attend is None or self._since + 1 >= self.plan.rerank or self._fast.room < 1

    def _settle(self) -> None:
        """Closed pages but the recent ones leave the tail."""
        leaving = self.pages - self._settled - self.plan.recent
        if leaving > 0:
            self._fast.drop_first(leaving)
            self._settled += leaving

    def _write(self, key: Tensor, value: Tensor) -> None:
        self._fast.write(key, value)
        self._tokens += key.shape[1]
        closed = self._settled + self._fast.in_tail // self.plan.page_size
        if closed > self.pages:
            self._close(*self._fast.tail_pages(self.pages - self._settled, closed - self.pages))

    def _close(self, key: Tensor, value: Tensor) -> None:
        """Pages [kv_head, new, page_size, dim] go to the reservoir and into the sketches."""
        assert self._reservoir is not None
        if self._sketches is not None:
            self._sketches.append(key)
        self._reservoir.append(key, value)

    def _pass(self, query: Tensor, scaling: float, kernel: Kernel, choose: bool) -> Tensor:
        self._since = 0 if choose else self._since + 1
        if self._settled and self.plan.attend is None:
            return self._in_waves(query, scaling, kernel)
        if self._settled and choose:
            self._choose(query, scaling)
        if self._gather is not None:
            key, value = self._fast.gathered(self._gather)
        elif self._table.least < self._table.most:
            return self._masked(query, scaling)
        else:
            key, value = self._fast.read(self._table.most)
        return kernel(query, key[None], value[None], scaling)

    def _choose(self, query: Tensor, scaling: float) -> None:
        """Rank, fetch, and remember what is read until the next time."""
        assert self.plan.attend is not None
        grouped = query[0].view(self._fast.heads, -1, *query.shape[2:])
        if self._sketches is not None:
            worth = self._sketches.bounds(grouped)[:, : self._settled]
        else:
            rest = self._fast.read(0)[0]
            worth = true_attention(grouped, scaling, rest, self._settled, self._staged_keys, self.plan.staging)
        pages, weights = best_pages(worth, self.plan.attend)
        done = self._table.step(pages, weights, self._step, self.pages)
        if self.listener is not None:
            self.listener(self._step, pages, weights)
        self._step += 1
        self._execute(done, pages.numel())
        all_in_use = pages.shape[1] == self._table.least == self._table.most
        read_all = self.plan.reads == "resident" or all_in_use
        self._gather = None if read_all else self._fast.places(self._table.slots_of(pages))

    def _in_waves(self, query: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        """Every page, at most B at a time."""
        flat, new = self._rows(query), query.shape[2]
        if self._settled <= self.plan.slots:  # one wave: everything lies side by side
            self._execute(self._table.place(0, self._settled, self._step), self._settled * self._fast.heads)
            self._step += 1
            key, value = self._fast.read(self._settled)
            return kernel(query, key[None], value[None], scaling)
        total = part(flat, *self._fast.read(0), scaling, newest=new)
        for start in range(0, self._settled, self.plan.slots):
            stop = min(start + self.plan.slots, self._settled)
            self._execute(self._table.place(start, stop, self._step), (stop - start) * self._fast.heads)
            total = merged(total, part(flat, *self._fast.in_slots(stop - start), scaling))
        self._step += 1
        return self._as_output(total, query)

    def _masked(self, query: Tensor, scaling: float) -> Tensor:
        """Everything resident, where heads hold different numbers of pages."""
        most, held = self._table.most, self._table.held()
        key, value = self._fast.read(most)
        slot = most - 1 - torch.arange(key.shape[1], device=key.device) // self.plan.page_size
        hidden = slot >= held[:, None]
        return self._as_output(part(self._rows(query), key, value, scaling, query.shape[2], hidden), query)

    def _rows(self, query: Tensor) -> Tensor:
        """[1, query_head, q, dim] -> [kv_head, group * q, dim]."""
        return query[0].reshape(self._fast.heads, -1, query.shape[3])

    def _as_output(self, total: Part, query: Tensor) -> Tensor:
        return total.output.reshape(1, query.shape[1], query.shape[2], -1).to(query.dtype)

    # ---- storage ------------------------------------------------------------------------------------------------

    def _execute(self, done: Done, wanted: int) -> None:
        self._copy(done.fetches)
        moved = len(done.fetches.units) * self._page_bytes
        self.traffic += Traffic(wanted, done.hits, done.misses, done.counted, 0, moved)

    def _copy(self, fetches: Fetches) -> None:
        """Pages from the reservoir into their slots."""
        if len(fetches.units):
            assert self._reservoir is not None
            rows = fetches.units * self.plan.fast_pages + self.plan.slots - 1 - fetches.slots
            self._reservoir.fetch(fetches.units, fetches.pages, rows, *self._fast.flat())

    def _every_head(self, start: int, stop: int, row: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
        """(units, pages, rows) of pages start .. stop - 1 of every head, to rows unit * stride + row, + row + 1, ..."""
        heads = self._fast.heads
        units = torch.arange(heads).repeat_interleave(stop - start)
        offset = torch.arange(stop - start).repeat(heads)
        return units, offset + start, units * stride + row + offset

    def _from_reservoir(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies [kv_head, stop - start, page_size, dim], where fast memory is."""
        parts = [page.new_empty(self._fast.heads, stop - start, *page.shape[2:]) for page in self._places]
        if stop > start:
            assert self._reservoir is not None
            moves = self._every_head(start, stop, 0, stop - start)
            self._reservoir.fetch(*moves, parts[0].flatten(0, 1), parts[1].flatten(0, 1))
        return parts[0], parts[1]

    @property
    def _places(self) -> tuple[Tensor, Tensor]:
        return self._fast.key, self._fast.value

    def _staged_keys(self, start: int, stop: int) -> Tensor:
        assert self._reservoir is not None
        key, value = (lease.tensor for lease in self._staged)
        moves = self._every_head(start, stop, 0, self.plan.staging)
        self._reservoir.fetch(*moves, key.flatten(0, 1), value.flatten(0, 1))
        return key[:, : stop - start]

    def _stage(self, key: Tensor, value: Tensor) -> None:
        for like in (key, value) if self.plan.staging else ():
            shape = (key.shape[0], self.plan.staging, self.plan.page_size, like.shape[2])
            self._staged.append(self._pool.lease(shape, like.dtype, like.device))

    def _new_table(self, first: Tensor | None) -> SlotTable:
        order = None if first is None else first.cpu().numpy().astype(np.int32)
        device = self._fast.key.device
        return SlotTable(self._fast.heads, self.plan.slots, order, self.pages, device, self.plan.first_touch)

    def _fill(self, key: Tensor, value: Tensor) -> None:
        """A context that was read elsewhere: strip and tail to fast memory, every closed page to the reservoir."""
        tokens, size = key.shape[1], self.plan.page_size
        strip = min(tokens, self.plan.strip * size)
        pages = (tokens - strip) // size
        self._settled = max(0, pages - self.plan.recent)
        self._tokens = tokens
        for start, stop in ((0, strip), (strip + self._settled * size, tokens)):
            self._fast.write(key[:, start:stop], value[:, start:stop])
        if pages:
            body = slice(strip, strip + pages * size)
            shape = (key.shape[0], pages, size, -1)
            self._close(key[:, body].view(shape), value[:, body].view(shape))

    def _restore(self, mark: _Mark) -> None:
        self._restore_tail(mark)
        assert self._reservoir is not None
        if self._sketches is not None and self._sketches.pages > mark.pages:
            self._sketches.truncate(mark.pages)
        if self._reservoir.pages > mark.pages:
            self._reservoir.truncate(mark.pages)
        lacking = self._table.restore(mark.table)
        try:
            self._copy(lacking)
            self._count_restored(len(lacking.units))
        except WorkError:  # named again by whoever wants the page next
            self._table.clear(lacking)
        self._fast.forget(self._table.state.slot_page < 0)
        self._tokens, self._settled, self._step = mark.tokens, mark.settled, mark.step
        self._since, self._gather = NEVER_RANKED, None

    def _restore_tail(self, mark: _Mark) -> None:
        """Strip and tail as they were: pages that have left since come back, later tokens go."""
        size = self.plan.page_size
        held, shift = mark.tokens - mark.settled * size, self._settled - mark.settled
        in_tail = held - self.plan.strip * size
        if shift and in_tail > 0:
            back = min(shift, -(-in_tail // size))
            self._fast.make_room(back, max(0, in_tail - shift * size))
            first = self.plan.slots + self.plan.strip
            moves = self._every_head(mark.settled, mark.settled + back, first, self.plan.fast_pages)
            assert self._reservoir is not None
            self._reservoir.fetch(*moves, *self._fast.flat())
            self._count_restored(back * self._fast.heads)
        self._fast.cut(held)

    def _count_restored(self, pages: int) -> None:
        self.traffic += Traffic(restores=pages, moved_bytes=pages * self._page_bytes)

"""FlexiCache's arm as storage: the rule of `flexicache.py` carried out by `PagedSlots`, for benchmarks.

Heads of one layer differ in how they behave, so the layer is two `PagedSlots`, each for some of its KV heads: stable
ones hold K pages and choose every `interval` steps for the step after; unstable ones hold everything and choose at
every step (what is written later they hold from its first want on). A question's blocks choose for themselves, in
both. Such a session can be asked, not saved or copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from wakesight.cache.pool import Pool
from wakesight.cache.residency.flexicache import INTERVAL
from wakesight.cache.residency.paged import Kernel, PagedSlots, Traffic
from wakesight.cache.residency.plan import PagePlan
from wakesight.errors import RequestError


class LateSlots(PagedSlots):
    """Pages that a decode step chooses are fetched behind it and read from the next step on."""

    def attend(self, query: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        if query.shape[2] > 1 or not self._due() or self._fast.room < 1 or self._fresh is None:
            return super().attend(query, scaling, kernel)
        self._write(*self._fresh)
        output = self._pass(query, scaling, kernel, choose=False)
        self._settle()
        if self._settled:
            self._choose(query, scaling)
        self._since, self._fresh = 0, None
        return output


class HeadGroups(PagedSlots):
    """One layer whose KV heads are shared out among several storages. groups: (KV heads, their storage), all heads."""

    def __init__(self, groups: Sequence[tuple[Sequence[int], PagedSlots]]) -> None:
        self.groups = [(torch.tensor(list(heads)), slots) for heads, slots in groups]
        self._count = sum(len(heads) for heads, _ in self.groups)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,) * self._count

    @property
    def length(self) -> int:
        return self.groups[0][1].length

    @property
    def fast_lengths(self) -> tuple[int, ...]:
        found = [0] * self._count
        for heads, slots in self.groups:
            for head, length in zip(heads.tolist(), slots.fast_lengths, strict=True):
                found[head] = length
        return tuple(found)

    @property
    def pages(self) -> int:
        return self.groups[0][1].pages

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        return sum((slots.traffic for _, slots in self.groups), Traffic())

    @property
    def held_bytes(self) -> int:
        return self._sum(lambda slots: slots.held_bytes)

    @property
    def slack_bytes(self) -> int:
        return self._sum(lambda slots: slots.slack_bytes)

    @property
    def sketch_bytes(self) -> int:
        return self._sum(lambda slots: slots.sketch_bytes)

    @property
    def staging_bytes(self) -> int:
        return self._sum(lambda slots: slots.staging_bytes)

    @property
    def reservoir_bytes(self) -> int:
        return self._sum(lambda slots: slots.reservoir_bytes)

    def append(self, fresh: Mapping[str, Tensor]) -> None:
        for heads, slots in self.groups:
            slots.append({name: rows[heads.to(rows.device)] for name, rows in fresh.items()})

    def attend(self, query: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        grouped = query.view(1, self._count, -1, *query.shape[2:])  # [1, kv_head, group, q, dim]
        parts = [
            slots.attend(grouped[:, heads.to(query.device)].flatten(1, 2), scaling, kernel)
            for heads, slots in self.groups
        ]
        output = query.new_empty(*grouped.shape[:4], parts[0].shape[-1])
        for (heads, _), part in zip(self.groups, parts, strict=True):
            output[:, heads.to(query.device)] = part.view(1, len(heads), -1, *part.shape[2:])
        return output.flatten(1, 2)

    def commit(self) -> None:
        for _, slots in self.groups:
            slots.commit()

    def truncate(self, lengths: Sequence[int]) -> None:
        for heads, slots in self.groups:
            slots.truncate([lengths[head] for head in heads.tolist()])

    def release(self) -> None:
        for _, slots in self.groups:
            slots.release()

    def copy(self) -> NoReturn:
        raise RequestError("a comparison arm can be asked, not copied or saved; demote the whole session instead")

    def saved(self) -> NoReturn:
        self.copy()

    def _sum(self, what: Callable[[PagedSlots], int]) -> int:
        return sum(what(slots) for _, slots in self.groups)


def flexicache_slots(
    pool: Pool, plan: PagePlan, key: Tensor, value: Tensor, first: Tensor | None, unstable: Tensor, room: int,
    interval: int = INTERVAL,
) -> HeadGroups:  # fmt: skip
    """A layer under FlexiCache's rule.

    plan: page size, K (`attend`) and what is always read; its slots and interval are replaced. key, value: all entries,
    [kv_head, token, dim]. first: int64 [kv_head, any], pages of the stable heads' first set, the best first. unstable:
    bool [kv_head]. room: pages that an unstable head can hold. All or nothing. Raises WorkError on lack of memory.
    """
    if plan.attend is None:
        raise RequestError("flexicache chooses pages, and attend='all' does not; give a number")
    stable_plan = dataclasses.replace(plan, slots=plan.attend, rerank=interval)
    unstable_plan = dataclasses.replace(plan, slots=max(room, plan.attend), rerank=1, first_touch="free")
    everything = torch.arange(room, device=key.device).expand(key.shape[0], -1)
    groups: list[tuple[Sequence[int], PagedSlots]] = []
    try:
        for kind, its_plan, marks in ((LateSlots, stable_plan, ~unstable), (PagedSlots, unstable_plan, unstable)):
            heads = marks.nonzero().flatten().tolist()
            if heads:
                start = first if kind is LateSlots else everything[:, : (key.shape[1] // plan.page_size - plan.strip)]
                start = None if start is None else start[heads]
                groups.append((heads, kind.demote(pool, its_plan, key[heads], value[heads], start)))
    except BaseException:
        for _, slots in groups:
            slots.release()
        raise
    return HeadGroups(groups)

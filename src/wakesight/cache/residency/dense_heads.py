"""A layer in which some KV heads keep everything in fast memory and the others a few pages (`Residency.dense_heads`).

It is two storages side by side. That of the dense heads reads every page and has a slot for each, so nothing is chosen
and, until the context outgrows them, nothing moves.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from wakesight.cache.pool import Pool
from wakesight.cache.residency.flexi_slots import HeadGroups
from wakesight.cache.residency.paged import PagedSlots
from wakesight.cache.residency.plan import PagePlan

ROOM = 256  # tokens of question and answer that dense heads have slots for, too


class DenseHeads(HeadGroups):
    """Heads that keep everything beside heads that do not."""

    def copy(self) -> DenseHeads:  # type: ignore[override]
        """The same in storage of its own. Raises WorkError on lack of memory."""
        made: list[tuple[list[int], PagedSlots]] = []
        try:
            for heads, slots in self.groups:
                made.append((heads.tolist(), slots.copy()))
        except BaseException:
            for _, slots in made:
                slots.release()
            raise
        return DenseHeads(made)


def whole_slots(plan: PagePlan, tokens: int) -> int:
    """Slots of a head that keeps a context of so many tokens, and what follows."""
    return -(-(tokens + ROOM) // plan.page_size)


def demoted(pool: Pool, plan: PagePlan, key: Tensor, value: Tensor, first: Tensor | None) -> PagedSlots:
    """As `PagedSlots.demote`, but the plan's dense KV heads keep everything."""
    dense = plan.dense
    if not dense:
        return PagedSlots.demote(pool, plan, key, value, first)
    everything = dataclasses.replace(
        plan, dense=(), attend=None, slots=whole_slots(plan, key.shape[1]), wants="sketch", reads="wanted"
    )
    paged = [head for head in range(key.shape[0]) if head not in dense]
    groups: list[tuple[list[int], PagedSlots]] = []
    try:
        for heads, its_plan in ((list(dense), everything), (paged, dataclasses.replace(plan, dense=()))):
            if heads:
                at = torch.tensor(heads, device=key.device)
                order = None if first is None else first[at.to(first.device)]
                groups.append((heads, PagedSlots.demote(pool, its_plan, key[at], value[at], order)))
    except BaseException:
        for _, slots in groups:
            slots.release()
        raise
    return DenseHeads(groups)

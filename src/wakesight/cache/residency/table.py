"""Which page is in which slot: the state of one layer's step function, and what storage must do after a step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wakesight.cache.residency import on_device, policies
from wakesight.cache.residency.base import SlotState, Wants, first_slots
from wakesight.errors import RequestError
from wakesight.residency import FirstTouch


class Fetches(NamedTuple):
    """Pages that must be copied into slots, int64 [move] each."""

    units: Tensor
    pages: Tensor
    slots: Tensor


class Done(NamedTuple):
    """One step: copies, and pages counted over all units."""

    fetches: Fetches
    hits: int
    misses: int
    counted: int  # fetches as the rule counts them: a free first touch is a copy, too, and is not in here


class SlotTable:
    """Slots of every KV head. Steps replace the state and never write into it, so a snapshot is a reference.

    state: arrays as torch tensors on the layer's device.
    """

    def __init__(
        self, heads: int, slots: int, first: np.ndarray | None, pages: int, device: torch.device, touch: FirstTouch
    ) -> None:
        """first: int32 [kv_head, any], the best page first; pages: closed ones, which count as seen."""
        start = first_slots(first, heads, slots, pages, pages)
        self.state: SlotState = on_device.to(start, device)
        self._touch: FirstTouch = touch
        self._on_cpu = device.type == "cpu"
        self._rule = _rule(self._on_cpu)
        self.refresh()

    def refresh(self) -> None:
        """Read off the state what is asked for more than once."""
        held = self.held()
        self.least, self.most = int(held.min()), int(held.max())  # slots in use, per head

    def step(self, pages: Tensor, weights: Tensor, step: int, known: int) -> Done:
        """Want `pages` int64 [kv_head, K] with float32 weights. known: closed pages, ids 0 .. known - 1."""
        self._know(known)
        if self._on_cpu and self._rule is not on_device:
            return self._step_in_numpy(pages, weights, step)
        done = self._rule.lru(self.state, Wants(pages.to(torch.int32), weights), step, self._touch)
        self._take(done.state)
        moves = done.moves
        real = (moves.page_in >= 0) & (moves.slot >= 0)
        fetches = Fetches(*(column[real].long() for column in (moves.unit, moves.page_in, moves.slot)))
        counts = torch.stack([done.counts.hits, done.counts.misses, done.counts.fetches]).sum(1).tolist()
        return Done(fetches, *counts)

    def _step_in_numpy(self, pages: Tensor, weights: Tensor, step: int) -> Done:
        state = SlotState(*(array.numpy() for array in vars(self.state).values()))
        wants = Wants(pages.to(torch.int32).numpy(), weights.numpy())
        done = self._rule.lru(state, wants, step, self._touch)
        self._take(SlotState(*map(torch.from_numpy, vars(done.state).values())))
        columns = (done.moves.unit, done.moves.page_in, done.moves.slot)
        fetches = Fetches(*(torch.from_numpy(column.astype(np.int64)) for column in columns))
        return Done(fetches, int(done.counts.hits.sum()), int(done.counts.misses.sum()), int(done.counts.fetches.sum()))

    def place(self, start: int, stop: int, step: int) -> Done:
        """Pages start .. stop - 1 go to slots 0, 1, ... of every head, as a wave of `attend="all"` asks."""
        count, old = stop - start, self.state
        wave = torch.arange(start, stop, dtype=torch.int32, device=old.slot_page.device).expand(len(old.slot_page), -1)
        missing = (old.slot_page[:, :count] != wave).nonzero()
        slot_page, last_use, weight = old.slot_page.clone(), old.last_use.clone(), old.last_weight.clone()
        slot_page[:, :count], last_use[:, :count], weight[:, :count] = wave, step, 0
        self._take(SlotState(slot_page, last_use, weight, old.seen))
        units, slots = missing.unbind(1)
        return Done(Fetches(units, slots + start, slots), wave.numel() - len(units), len(units), len(units))

    def held(self) -> Tensor:
        """Pages in slots, int64 [kv_head]."""
        counts: Tensor = (self.state.slot_page >= 0).sum(1)
        return counts

    def resident(self) -> Fetches:
        """Every page that is in a slot."""
        return self._at(self.state.slot_page >= 0)

    def slots_of(self, pages: Tensor) -> Tensor:
        """int64 [kv_head, K]: where these resident pages are."""
        ascending, order = self.state.slot_page.sort(dim=1)
        found: Tensor = order.gather(1, torch.searchsorted(ascending, pages.to(ascending.dtype)))
        return found

    def restore(self, state: SlotState) -> Fetches:
        """Go back to an earlier state; returns the pages that its slots lack by now."""
        lacking = (self.state.slot_page != state.slot_page) & (state.slot_page >= 0)
        self.state = state
        self.refresh()
        return self._at(lacking)

    def clear(self, fetches: Fetches) -> None:
        """These slots are empty after all: their pages could not be read."""
        slot_page, last_use = self.state.slot_page.clone(), self.state.last_use.clone()
        slot_page[fetches.units, fetches.slots], last_use[fetches.units, fetches.slots] = -1, -2
        self._take(dataclasses.replace(self.state, slot_page=slot_page, last_use=last_use))
        self.refresh()

    def _at(self, where: Tensor) -> Fetches:
        units, slots = where.nonzero().unbind(1)
        return Fetches(units, self.state.slot_page[units, slots].long(), slots)

    def _take(self, state: SlotState) -> None:
        self.state = state
        if self.least < self.state.slot_page.shape[1]:  # slots that are full stay full
            self.refresh()

    def _know(self, pages: int) -> None:
        """Room in `seen` for so many pages, and a quarter more."""
        seen = self.state.seen
        if pages > seen.shape[1]:
            more = torch.zeros(len(seen), pages + pages // 4 - seen.shape[1], dtype=torch.bool, device=seen.device)
            self.state = dataclasses.replace(self.state, seen=torch.cat([seen, more], dim=1))


def _rule(on_cpu: bool) -> Any:
    """The numba body on a CPU, torch's elsewhere, and where numba is not installed."""
    if on_cpu:
        try:
            return policies.body("numba")
        except RequestError:
            return on_device  # several times slower per step: docs/design/reversible-cache.md
    return on_device

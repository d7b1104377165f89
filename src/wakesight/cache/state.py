"""A session's state as one value: storage per attention layer, small fixed states, two kinds of length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from wakesight.cache.compaction.gather import copy, gather
from wakesight.cache.pool import Lease, Pool
from wakesight.cache.residency.dense_heads import demoted
from wakesight.cache.residency.paged import PagedSlots, Traffic
from wakesight.cache.residency.plan import PagePlan
from wakesight.cache.slots import Slots
from wakesight.core import KeptSet


@dataclass
class SessionState:
    """Everything one sequence left behind after prefill or compaction.

    slots: one storage per attention layer; their lengths are the *physical* lengths. Some are `PagedSlots` in a demoted
        state, whose lengths count what is in the reservoir too.
    states: named snapshots of what does not grow with the context (recurrent and conv states, sliding
        windows); read-only and shared with children.
    tokens: the context's ids; its length is the *logical* length, whatever the slots hold.
    kept: which positions the slots hold; None while they hold all.
    """

    pool: Pool
    slots: tuple[Slots, ...]
    states: dict[str, Lease]
    tokens: tuple[int, ...]
    prefix: int
    kept: KeptSet | None = None

    @property
    def logical_length(self) -> int:
        return len(self.tokens)

    @property
    def physical_lengths(self) -> list[tuple[int, ...]]:
        """Held entries per attention layer and KV head."""
        return [slots.lengths for slots in self.slots]

    @property
    def demoted(self) -> bool:
        """Whether any layer keeps pages in a reservoir."""
        return any(isinstance(slots, PagedSlots) for slots in self.slots)

    @property
    def fast_lengths(self) -> list[tuple[int, ...]]:
        """Entries in fast memory per attention layer and KV head."""
        return [slots.fast_lengths if isinstance(slots, PagedSlots) else slots.lengths for slots in self.slots]

    @property
    def paged(self) -> list[PagedSlots]:
        """The layers that keep pages in a reservoir."""
        return [slots for slots in self.slots if isinstance(slots, PagedSlots)]

    @property
    def traffic(self) -> Traffic:
        """What all layers moved since they were demoted."""
        return sum((slots.traffic for slots in self.paged), Traffic())

    @property
    def state_bytes(self) -> int:
        return sum(lease.bytes for lease in self.states.values())

    def compacted(self, kept: KeptSet, slack: int) -> SessionState:
        """A child that holds only `kept`, in storage of its own; this state is only read.

        kept: logical positions, all of them held here. All or nothing: if memory runs out, nothing new
        stays allocated.
        """
        where = kept.positions if self.kept is None else _slots_of(kept, self.kept)
        return self._child(lambda layer: gather(self.slots[layer], where[layer], slack), kept)

    def demoting(
        self, plans: Sequence[PagePlan | None], first: Sequence[torch.Tensor | None], slack: int
    ) -> SessionState:  # fmt: skip
        """A child that holds every entry, a few pages of each layer in fast memory; this state is only read.

        plans: per attention layer, None for one that stays in fast memory as a whole. first: int64 [kv_head, any] page
        ids per layer, the best first. All or nothing. Raises WorkError on lack of memory or disk.
        """

        def make(layer: int) -> Slots:
            plan, source = plans[layer], self.slots[layer]
            if plan is None:
                return copy(source, slack)
            return demoted(self.pool, plan, source.read("key"), source.read("value"), first[layer])

        return self._child(make, None)

    def copy(self, slack: int) -> SessionState:
        """The same entries in storage of their own, a reservoir's too."""
        return self._child(lambda layer: copied(self.slots[layer], slack), self.kept)

    def read_on(self, tokens: Sequence[int], states: dict[str, Lease]) -> None:
        """`tokens` were appended to the slots for good; `states` replace what does not grow."""
        if self.kept is not None:
            start, stop = self.logical_length, self.logical_length + len(tokens)
            self.kept = self.kept.extended(start, stop)
        for slots in self.paged:
            slots.commit()
        for lease in self.states.values():
            lease.release()
        self.states = states
        self.tokens = (*self.tokens, *tokens)

    def truncate(self, lengths: list[tuple[int, ...]]) -> None:
        """Cut every layer back to the physical lengths it had before; () is an empty layer."""
        for slots, length in zip(self.slots, lengths, strict=True):
            slots.truncate(length or (0,) * len(slots.lengths))

    def release(self) -> None:
        """Return everything to the pool; shared states go with their last owner."""
        for slots in self.slots:
            slots.release()
        for lease in self.states.values():
            lease.release()
        self.states = {}

    def _child(self, make: Callable[[int], Slots], kept: KeptSet | None) -> SessionState:
        held: list[Slots] = []
        try:
            for layer in range(len(self.slots)):
                held.append(make(layer))
        except BaseException:
            for slots in held:
                slots.release()
            raise
        shared = {name: lease.share() for name, lease in self.states.items()}
        return SessionState(self.pool, tuple(held), shared, self.tokens, self.prefix, kept)


def copied(slots: Slots, slack: int) -> Slots:
    """The same entries in storage of their own."""
    return slots.copy() if isinstance(slots, PagedSlots) else copy(slots, slack)


def _slots_of(wanted: KeptSet, held: KeptSet) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Where the wanted positions lie in storage that holds `held`; both ascending."""
    return tuple(
        tuple(torch.searchsorted(have, want) for have, want in zip(have_layer, want_layer, strict=True))
        for have_layer, want_layer in zip(held.positions, wanted.positions, strict=True)
    )

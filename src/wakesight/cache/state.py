"""A session's state as one value: storage per attention layer, recurrent states, two lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wakesight.cache.compaction.gather import gather
from wakesight.cache.pool import Lease, Pool
from wakesight.cache.slots import Slots
from wakesight.core import KeptSet


@dataclass
class SessionState:
    """Everything a context left behind after prefill or compaction.

    slots: one storage per attention layer; their lengths are the *physical* lengths.
    recurrent: named snapshots of recurrent and conv states; read-only and shared with children.
    tokens: the context's ids; its length is the *logical* length, whatever the slots hold.
    kept: None while the state is whole.
    """

    pool: Pool
    slots: tuple[Slots, ...]
    recurrent: dict[str, Lease]
    tokens: tuple[int, ...]
    prefix: int
    kept: KeptSet | None = None

    @property
    def logical_length(self) -> int:
        return len(self.tokens)

    @property
    def physical_lengths(self) -> list[int]:
        return [slots.length for slots in self.slots]

    @property
    def recurrent_bytes(self) -> int:
        return sum(lease.bytes for lease in self.recurrent.values())

    def compacted(self, kept: KeptSet, slack: int) -> SessionState:
        """A child that holds only `kept`, in storage of its own; this state is only read.

        All or nothing: if memory runs out, nothing new stays allocated.
        """
        held: list[Slots] = []
        try:
            for slots, positions in zip(self.slots, kept.positions, strict=True):
                held.append(gather(slots, positions, self.pool, slack))
        except BaseException:
            release_all(held)
            raise
        return self._child(held, kept)

    def copy(self, slack: int) -> SessionState:
        """The same entries in storage of their own."""
        held: list[Slots] = []
        try:
            for slots in self.slots:
                held.append(Slots(self.pool, capacity=slots.length + slack))
                held[-1].append({name: slots.read(name) for name in slots.names})
        except BaseException:
            release_all(held)
            raise
        return self._child(held, self.kept)

    def release(self) -> None:
        """Return everything to the pool; shared recurrent states go with their last owner."""
        release_all(self.slots)
        for lease in self.recurrent.values():
            lease.release()
        self.recurrent = {}

    def _child(self, held: Sequence[Slots], kept: KeptSet | None) -> SessionState:
        shared = {name: lease.share() for name, lease in self.recurrent.items()}
        return SessionState(self.pool, tuple(held), shared, self.tokens, self.prefix, kept)


def release_all(slots: Sequence[Slots]) -> None:
    for one in slots:
        one.release()

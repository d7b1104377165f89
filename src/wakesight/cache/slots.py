"""One attention layer of one sequence: named payloads per slot, each KV head with a length of its own.

A payload ("key", "value", and optional extras such as raw index keys of sparse attention) is one flat
tensor [sum of capacities, dim]; every KV head owns a strip of it:

    head 0                             head 1
    0 ... length | growth ... capacity 0 ... length | growth ... capacity
    held entries | slack               held entries | slack

Heads that kept less get shorter strips, so uneven budgets free real bytes. Where all heads are alike
the strips form one [kv_head, slot, dim] view and fused kernels run on it. A payload may have a single
head for all KV heads; it follows head 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wakesight.cache.pool import Lease, Pool

GROWTH = 64  # capacities are multiples of this many slots


class Payload(NamedTuple):
    """What one payload's slots look like."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        return self.dim * self.dtype.itemsize


class Slots:
    """Storage of one layer; allocated at the first `append`, whose shapes it takes over.

    capacity: slots per head that the first allocation has at least.
    """

    def __init__(self, pool: Pool, capacity: int = 0) -> None:
        self._pool = pool
        self._wanted = capacity
        self._payloads: dict[str, Payload] = {}
        self._leases: dict[str, Lease] = {}
        self._capacities: tuple[int, ...] = ()
        self._lengths: tuple[int, ...] = ()

    @classmethod
    def adopt(
        cls, pool: Pool, tensors: Mapping[str, Tensor], heads: Mapping[str, int], lengths: Sequence[int],
        capacities: Sequence[int],
    ) -> Slots:  # fmt: skip
        """Slots over flat tensors that were laid out elsewhere (a mapped file)."""
        slots = cls(pool)
        slots._payloads = {n: Payload(heads[n], t.shape[1], t.dtype, t.device) for n, t in tensors.items()}
        slots._leases = {name: pool.adopt(tensor) for name, tensor in tensors.items()}
        slots._lengths, slots._capacities = tuple(lengths), tuple(capacities)
        return slots

    @classmethod
    def like(cls, other: Slots, lengths: Sequence[int], slack: int) -> Slots:
        """`lengths` slots per head of the same payloads as `other`, content undefined, with room for `slack` more."""
        slots = cls(other._pool)
        slots._payloads = dict(other._payloads)
        slots._lengths = tuple(lengths)
        if slots._payloads:
            slots._capacities = tuple(_rounded(length + slack) for length in lengths)
            slots._leases = slots._allocate(slots._capacities)
        return slots

    @property
    def payloads(self) -> Mapping[str, Payload]:
        return self._payloads

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._payloads)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Held entries per KV head; () before the first append."""
        return self._lengths

    @property
    def length(self) -> int:
        """The longest head's entries."""
        return max(self._lengths, default=0)

    @property
    def capacities(self) -> tuple[int, ...]:
        return self._capacities

    @property
    def uniform(self) -> bool:
        """True if all heads hold equally many entries in equal strips."""
        return len(set(self._lengths)) <= 1 and len(set(self._capacities)) <= 1

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots in use; `slack_bytes` is the rest of the storage."""
        return sum(p.slot_bytes * sum(self._lengths[: p.heads]) for p in self._payloads.values())

    @property
    def slack_bytes(self) -> int:
        return sum(lease.bytes for lease in self._leases.values()) - self.held_bytes

    def storage(self, name: str) -> Tensor:
        """The whole flat payload [sum of capacities, dim], slack included."""
        return self._leases[name].tensor

    def read(self, name: str) -> Tensor:
        """View [kv_head, length, dim] of the held slots of a `uniform` layer; it moves when the storage grows."""
        if not self.uniform:
            raise RuntimeError(f"the heads hold {self._lengths} entries; read them strip by strip")
        return self._cube(name)[:, : self._lengths[0]]

    def strip(self, name: str, head: int) -> Tensor:
        """View [length, dim] of what one head holds."""
        start = sum(self._capacities[:head])
        return self.storage(name)[start : start + self._lengths[head]]

    def strips(self, name: str) -> list[Tensor]:
        """Views [length, dim] of all heads."""
        return [self.strip(name, head) for head in range(self._payloads[name].heads)]

    def append(self, fresh: Mapping[str, Tensor]) -> None:
        """Write new slots behind the held ones of every head, or change nothing; full strips grow by a quarter.

        fresh: one tensor [kv_head, new, dim] per name, always the same names.
        """
        new = next(iter(fresh.values())).shape[1]
        if new == 0:
            return
        if not self._payloads:
            self._payloads = {n: Payload(t.shape[0], t.shape[2], t.dtype, t.device) for n, t in fresh.items()}
            self._lengths = self._capacities = (0,) * max(t.shape[0] for t in fresh.values())
        try:
            self.reserve([length + new for length in self._lengths])
        except BaseException:
            if not self._leases:
                self.release()  # as empty as before
            raise
        held, self._lengths = self._lengths, tuple(length + new for length in self._lengths)
        for name, rows in fresh.items():
            if self.uniform:
                self._cube(name)[:, held[0] : held[0] + new].copy_(rows)
            else:
                for head, row in enumerate(rows):
                    self.strip(name, head)[held[head] :].copy_(row)

    def reserve(self, lengths: Sequence[int]) -> None:
        """Make room for `lengths` slots per head in all, or change nothing. Held slots keep their content.

        Storage grows by a quarter as a whole, the same number of slots behind every head, so that all heads
        fill up at the same time and a short head's growth does not stretch a long one.
        """
        if all(need <= have for need, have in zip(lengths, self._capacities, strict=True)):
            return
        more = sum(self._capacities) // (4 * len(self._capacities)) if self._leases else self._wanted
        grown = tuple(
            max(have, _rounded(max(need, held + more)))
            for need, have, held in zip(lengths, self._capacities, self._lengths, strict=True)
        )
        leases = self._allocate(grown)
        old = {name: self.strips(name) for name in self._leases}
        before, self._leases, self._capacities = self._leases, leases, grown
        for name, strips in old.items():
            for head, strip in enumerate(strips):
                self.strip(name, head).copy_(strip)
        for lease in before.values():
            lease.release()

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget what lies behind `lengths` slots per head; under a poisoning pool it turns NaN."""
        if any(want > have for want, have in zip(lengths, self._lengths, strict=True)):
            raise RuntimeError(f"cannot cut heads of {self._lengths} slots to {tuple(lengths)}")
        if self._pool.poison:
            for name in (name for name, payload in self._payloads.items() if payload.dtype.is_floating_point):
                for strip, length in zip(self.strips(name), lengths, strict=False):
                    strip[length:].fill_(float("nan"))
        self._lengths = tuple(lengths)

    def zero_slack(self) -> None:
        """Write zeros over the growth slack, which may hold what other programs left in memory."""
        for name, payload in self._payloads.items():
            start = 0
            for length, capacity in zip(self._lengths[: payload.heads], self._capacities, strict=False):
                self.storage(name)[start + length : start + capacity].zero_()
                start += capacity

    def release(self) -> None:
        """Return the storage to the pool; the slots are empty afterwards."""
        for lease in self._leases.values():
            lease.release()
        self._payloads, self._leases, self._lengths, self._capacities = {}, {}, (), ()

    def _cube(self, name: str) -> Tensor:
        """[kv_head, capacity, dim] of a uniform layer."""
        payload = self._payloads[name]
        return self.storage(name).view(payload.heads, -1, payload.dim)

    def _allocate(self, capacities: Sequence[int]) -> dict[str, Lease]:
        leases: dict[str, Lease] = {}
        try:
            for name, payload in self._payloads.items():
                slots = sum(capacities[: payload.heads])
                leases[name] = self._pool.lease((slots, payload.dim), payload.dtype, payload.device)
        except BaseException:
            for lease in leases.values():
                lease.release()
            raise
        return leases


def _rounded(slots: int) -> int:
    return -(-max(slots, 1) // GROWTH) * GROWTH

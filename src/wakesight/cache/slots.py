"""One attention layer's storage: named payloads per slot, grown in advance, cut back after an answer.

    slot:   0 ................ length ........... capacity
            | held entries     | growth slack     |

A payload is a tensor [batch, kv_head, capacity, dim]. "key" and "value" are always there; extra
payloads of the same slots (raw index keys of sparse attention, say) travel under their own name.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from wakesight.cache.pool import Lease, Pool

GROWTH = 64  # capacities are multiples of this many slots


class Slots:
    """Storage of one layer; allocated at the first `append`, whose shapes it takes over."""

    def __init__(self, pool: Pool, capacity: int = 0) -> None:
        self._pool = pool
        self._wanted = capacity
        self._payloads: dict[str, Lease] = {}
        self.length = 0

    @property
    def capacity(self) -> int:
        return next(iter(self._payloads.values())).tensor.shape[2] if self._payloads else 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._payloads)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all heads and payloads."""
        return sum(lease.bytes for lease in self._payloads.values()) // self.capacity if self.capacity else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots in use; `slack_bytes` is the rest of the storage."""
        return self.slot_bytes * self.length

    @property
    def slack_bytes(self) -> int:
        return self.slot_bytes * (self.capacity - self.length)

    def read(self, name: str) -> Tensor:
        """View [batch, kv_head, length, dim] of the held slots; it moves when the storage grows."""
        return self._payloads[name].tensor[:, :, : self.length]

    def storage(self, name: str) -> Tensor:
        """The whole payload tensor, slack included, for code that fills slots itself."""
        return self._payloads[name].tensor

    def append(self, payloads: Mapping[str, Tensor]) -> None:
        """Write new slots behind the held ones; storage grows by a quarter when it is full.

        payloads: one tensor [batch, kv_head, new, dim] per name, always the same names.
        """
        new = next(iter(payloads.values())).shape[2]
        self.reserve(self.length + new, payloads)
        for name, fresh in payloads.items():
            self._payloads[name].tensor[:, :, self.length : self.length + new].copy_(fresh)
        self.length += new

    def reserve(self, length: int, like: Mapping[str, Tensor] | None = None) -> None:
        """Make room for `length` slots in all. Held slots keep their content. `like` gives shapes the first time."""
        if length <= self.capacity and self._payloads:
            return
        capacity = _rounded(max(length, 1, self._wanted if not self._payloads else self.capacity + self.capacity // 4))
        old = dict(self._payloads)
        shapes = like if like is not None and not old else {name: lease.tensor for name, lease in old.items()}
        grown: dict[str, Lease] = {}
        try:
            for name, tensor in shapes.items():
                batch, heads, _, dim = tensor.shape
                grown[name] = self._pool.lease((batch, heads, capacity, dim), tensor.dtype, tensor.device)
                if name in old:
                    grown[name].tensor[:, :, : self.length].copy_(old[name].tensor[:, :, : self.length])
        except BaseException:
            for lease in grown.values():
                lease.release()
            raise
        self._payloads = grown
        for lease in old.values():
            lease.release()

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on; under a poisoning pool their content turns NaN."""
        if self._pool.poison:
            for lease in self._payloads.values():
                lease.tensor[:, :, length : self.length].fill_(float("nan"))
        self.length = length

    def release(self) -> None:
        """Return the storage to the pool; the slots are empty afterwards."""
        for lease in self._payloads.values():
            lease.release()
        self._payloads = {}
        self.length = 0


def _rounded(slots: int) -> int:
    return -(-slots // GROWTH) * GROWTH

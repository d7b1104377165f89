"""What is known of a page without reading it: per KV head the least and the greatest of its keys, number by number.

From them follows, for any query q, an upper bound of q.k over the page's keys: where q is positive the greatest number
counts, where it is negative the least. Pages are wanted by that bound.

Source: Quest (Tang et al., 2024, https://arxiv.org/abs/2406.10774); the int8 form is ours.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wakesight.cache.pool import Lease, Pool
from wakesight.cache.residency.growth import grown
from wakesight.errors import RequestError

SketchKind = Literal["same", "int8"]
LEVELS = 126  # of 127: rounding outward may need one more


class Encoded(NamedTuple):
    """Sketches of some pages. numbers: [kv_head, page, 2 * dim], the greatest, then the least.

    scale: float32 [kv_head, page], what numbers are multiples of; None where they stand for themselves.
    """

    numbers: Tensor
    scale: Tensor | None


def encode(key: Tensor, kind: SketchKind) -> Encoded:
    """The sketches of pages `key` [kv_head, page, page_size, dim].

    "same": in the keys' own dtype, exact. "int8": the greatest rounded up and the least rounded down, so what is read
    back never lies inside the true range. A page with a number that is not finite has a bound that is not.
    """
    numbers = torch.cat([key.amax(dim=2), key.amin(dim=2)], dim=-1)
    if kind == "same":
        return Encoded(numbers, None)
    numbers, dim = numbers.float(), key.shape[-1]
    largest = numbers.abs().amax(dim=-1)
    scale = (largest / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)  # clamp keeps NaN; a page of zeros has some
    unit = scale[..., None]
    greatest, least = (numbers[..., :dim] / unit).ceil(), (numbers[..., dim:] / unit).floor()
    # the quotient is rounded too: where its product with the scale falls short, one step more
    greatest += (greatest * unit < numbers[..., :dim]).float()
    least -= (least * unit > numbers[..., dim:]).float()
    return Encoded(torch.cat([greatest, least], dim=-1).nan_to_num(0).to(torch.int8), scale)


class Sketches:
    """The sketches of one attention layer of one sequence, in fast memory; pages are added as they close.

    pages: how many, ids from 0. Storage is head-major with growth behind every head, so a bound is one product.
    """

    def __init__(self, pool: Pool, kind: SketchKind, page_size: int) -> None:
        if kind not in ("same", "int8"):
            raise RequestError(f"there is no sketch {kind!r}; give same (the keys' own dtype) or int8")
        self.kind = kind
        self.page_size = page_size
        self.pages = 0
        self._pool = pool
        self._leases: list[Lease] = []  # of numbers [kv_head, capacity, 2 * dim], and of scales [kv_head, capacity]

    @property
    def bytes(self) -> int:
        """Of the pages held; room grown ahead is in `slack_bytes`."""
        return sum(lease.bytes // self._capacity * self.pages for lease in self._leases)

    @property
    def slack_bytes(self) -> int:
        return sum(lease.bytes for lease in self._leases) - self.bytes

    def append(self, key: Tensor) -> None:
        """Add the pages that closed, or change nothing. key: [kv_head, new, page_size, dim].

        Raises WorkError on lack of memory.
        """
        if key.shape[2] != self.page_size:
            raise RuntimeError(f"pages of {key.shape[2]} keys do not fit sketches of pages of {self.page_size}")
        new = key.shape[1]
        if new == 0:
            return
        fresh = [part for part in encode(key, self.kind) if part is not None]
        if self.pages + new > self._capacity:
            self._grow(fresh, grown(self.pages + new, self._capacity))
        for lease, part in zip(self._leases, fresh, strict=True):
            lease.tensor[:, self.pages : self.pages + new].copy_(part)
        self.pages += new

    def bounds(self, query: Tensor) -> Tensor:
        """float32 [kv_head, page]: how large q.k can be at most, over the page's keys and the head's queries.

        query: [kv_head, group, q, dim], unscaled, as it meets the keys. Computed in float32, so a bound may lie below
        the true maximum by what float32 sums round. No page is an empty result.
        """
        if not self.pages:
            return query.new_zeros((query.shape[0], 0), dtype=torch.float32)
        flat = query.float().flatten(1, 2)  # [kv_head, group * q, dim]
        sides = torch.cat([flat.relu(), -(-flat).relu()], dim=-1)
        numbers = self._leases[0].tensor[:, : self.pages].float()
        best = (sides @ numbers.transpose(1, 2)).amax(dim=1)
        return best * self._leases[1].tensor[:, : self.pages] if self.kind == "int8" else best

    def read(self) -> Encoded:
        """Views of what is held; they move when the storage grows. Raises RuntimeError before the first page."""
        if not self._leases:
            raise RuntimeError("there are no sketches yet")
        held = [lease.tensor[:, : self.pages] for lease in self._leases]
        return Encoded(held[0], held[1] if self.kind == "int8" else None)

    def truncate(self, pages: int) -> None:
        """Forget the pages from id `pages` on; under a poisoning pool their bounds turn NaN."""
        if not 0 <= pages <= self.pages:
            raise RuntimeError(f"cannot cut sketches of {self.pages} pages to {pages}")
        if self._pool.poison:
            for lease in self._leases:
                if lease.tensor.is_floating_point():
                    lease.tensor[:, pages : self.pages].fill_(float("nan"))
        self.pages = pages

    def copy(self) -> Sketches:
        """The same sketches in storage of their own. Raises WorkError on lack of memory."""
        twin = Sketches(self._pool, self.kind, self.page_size)
        if self.pages:
            held = [lease.tensor[:, : self.pages] for lease in self._leases]
            twin._grow(held, grown(self.pages, 0))
            for lease, part in zip(twin._leases, held, strict=True):
                lease.tensor[:, : self.pages].copy_(part)
            twin.pages = self.pages
        return twin

    def release(self) -> None:
        """Return the storage to the pool; empty afterwards, and twice is fine."""
        for lease in self._leases:
            lease.release()
        self._leases, self.pages = [], 0

    @property
    def _capacity(self) -> int:
        return self._leases[0].tensor.shape[1] if self._leases else 0

    def _grow(self, like: list[Tensor], capacity: int) -> None:
        """Room for `capacity` pages of tensors such as `like` [kv_head, any, ...], or change nothing."""
        leases: list[Lease] = []
        try:
            for part in like:
                shape = (part.shape[0], capacity, *part.shape[2:])
                leases.append(self._pool.lease(shape, part.dtype, part.device))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        for old, lease in zip(self._leases, leases, strict=False):
            lease.tensor[:, : self.pages].copy_(old.tensor[:, : self.pages])
            old.release()
        self._leases = leases

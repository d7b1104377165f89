"""Where demoted pages wait: every closed page of one attention layer of one sequence, in host memory or in a file.

A reservoir is *inclusive*: a page is written once, when it closes, so demoting it needs no copy and fetching it is one.
Page ids count from 0 and are the same in all KV heads. Neither kind counts as fast memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wakesight.cache.pool import Lease, Pool
from wakesight.cache.residency.growth import grown
from wakesight.errors import RequestError


class PageShape(NamedTuple):
    """What every page of a layer looks like: `page_size` keys of `key_dim` and values of `value_dim` numbers."""

    kv_heads: int
    page_size: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> PageShape:
        """key [kv_head, page, page_size, dim], value alike. Raises RuntimeError (a bug) if they do not match."""
        if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype:
            raise RuntimeError(f"keys {list(key.shape)} {key.dtype} and values {list(value.shape)} {value.dtype}")
        return cls(key.shape[0], key.shape[2], key.shape[3], value.shape[3], key.dtype)

    @property
    def key_bytes(self) -> int:
        return self.page_size * self.key_dim * self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        return self.page_size * self.value_dim * self.dtype.itemsize


class Reservoir(ABC):
    """The closed pages of one layer. One owner; not for two threads at once (a session runs one call at a time).

    pages: how many it holds, ids 0 to pages - 1. shape: None before the first `append`.
    """

    pages: int = 0
    shape: PageShape | None = None

    @property
    @abstractmethod
    def bytes(self) -> int:
        """What its pages take, in whatever memory they lie; room it has grown ahead is in `slack_bytes`."""

    @property
    @abstractmethod
    def slack_bytes(self) -> int:
        """Room beyond `bytes`."""

    @abstractmethod
    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the pages that closed, or change nothing. key, value: [kv_head, new, page_size, dim] of their own dims.

        Raises WorkError if memory or the disk is full.
        """

    @abstractmethod
    def fetch(self, units: Tensor, pages: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write page `pages[i]` of KV head `units[i]` to row `rows[i]` of key and value for every i, or change nothing.

        units, pages, rows: int64 [move], no row twice. key, value: [row, page_size, dim], fast memory. Bits are copied,
        never converted. On a GPU what runs on the current stream after this call sees the pages. Raises RuntimeError (a
        bug) for a page that is not held, WorkError for one that cannot be read back as it was written.
        """

    @abstractmethod
    def truncate(self, pages: int) -> None:
        """Forget the pages from id `pages` on; does not fail. Raises RuntimeError (a bug) if there are fewer."""

    @abstractmethod
    def release(self) -> None:
        """Return the memory, remove the file. Empty afterwards; twice is fine."""

    def _checked(self, key: Tensor, value: Tensor) -> PageShape:
        """The shape of new pages, which must be that of the ones held."""
        shape = PageShape.of(key, value)
        if self.shape is not None and shape != self.shape:
            raise RuntimeError(f"pages of {shape} do not fit a reservoir of {self.shape}")
        return shape

    def _check_held(self, units: Tensor, pages: Tensor) -> PageShape:
        """Raises RuntimeError for moves that name what is not there: index errors would be silent for negative ids."""
        if self.shape is None or not _within(pages, self.pages):
            raise RuntimeError(f"a fetch of pages {pages.tolist()} from a reservoir that holds {self.pages}")
        if not _within(units, self.shape.kv_heads):
            raise RuntimeError(f"a fetch for heads {units.tolist()} from a reservoir of {self.shape.kv_heads}")
        return self.shape

    def _check_cut(self, pages: int) -> None:
        if not 0 <= pages <= self.pages:
            raise RuntimeError(f"cannot cut a reservoir of {self.pages} pages to {pages}")


def _within(ids: Tensor, count: int) -> bool:
    least, greatest = ids.aminmax()
    return int(least) >= 0 and int(greatest) < count


class HostReservoir(Reservoir):
    """Pages in host memory, counted by the pool as reservoir memory; page-locked where the device is a GPU.

    Pages lie one after the other and heads inside a page, so new pages go behind the old ones in one copy:

        page 0                page 1
        head 0 | head 1 | ... head 0 | head 1 | ... | growth
    """

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._leases: tuple[Lease, Lease] | None = None
        self._capacity = 0  # pages
        self._written: torch.cuda.Event | None = None  # when the last append has reached host memory

    @property
    def bytes(self) -> int:
        if self.shape is None:
            return 0
        return self.pages * self.shape.kv_heads * (self.shape.key_bytes + self.shape.value_bytes)

    @property
    def slack_bytes(self) -> int:
        return sum(lease.bytes for lease in self._leases or ()) - self.bytes

    def append(self, key: Tensor, value: Tensor) -> None:
        shape, new = self._checked(key, value), key.shape[1]
        if new == 0:
            return
        self._reserve(shape, self.pages + new)
        self.shape = shape
        asynchronous = key.device.type == "cuda"
        for storage, fresh in zip(self._storage(), (key, value), strict=True):
            rows = storage[self.pages * shape.kv_heads : (self.pages + new) * shape.kv_heads]
            rows.copy_(fresh.transpose(0, 1).reshape(rows.shape), non_blocking=asynchronous)
        if asynchronous:
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(key.device))
        self.pages += new

    def fetch(self, units: Tensor, pages: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
        if len(rows) == 0:
            return
        units, pages = units.cpu(), pages.cpu()
        shape = self._check_held(units, pages)
        self._wait()
        index = pages.long() * shape.kv_heads + units.long()
        for storage, target in zip(self._storage(), (key, value), strict=True):
            staged = torch.empty((len(index), *storage.shape[1:]), dtype=storage.dtype, pin_memory=target.is_cuda)
            torch.index_select(storage, 0, index, out=staged)
            deliver(staged, rows, target)

    def truncate(self, pages: int) -> None:
        self._check_cut(pages)
        if self._pool.poison and self.shape is not None:
            self._wait()
            for storage in self._storage():
                storage[pages * self.shape.kv_heads : self.pages * self.shape.kv_heads].fill_(float("nan"))
        self.pages = pages

    def release(self) -> None:
        self._wait()  # a copy in flight would write into memory that is somebody else's by then
        for lease in self._leases or ():
            lease.release()
        self._leases, self._capacity, self.pages, self.shape = None, 0, 0, None

    def _storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values [capacity * kv_head, page_size, dim]."""
        assert self._leases is not None
        return self._leases[0].tensor, self._leases[1].tensor

    def _reserve(self, shape: PageShape, pages: int) -> None:
        """Make room for `pages` in all, or change nothing."""
        if pages <= self._capacity:
            return
        capacity = grown(pages, self._capacity)
        keys = self._lease(shape, capacity, shape.key_dim)
        try:
            values = self._lease(shape, capacity, shape.value_dim)
        except BaseException:
            keys.release()
            raise
        before, held = self._leases, self.pages * shape.kv_heads
        self._wait()
        for old, fresh in zip(before or (), (keys, values), strict=False):
            fresh.tensor[:held].copy_(old.tensor[:held])
            old.release()
        self._leases, self._capacity = (keys, values), capacity

    def _lease(self, shape: PageShape, capacity: int, dim: int) -> Lease:
        return self._pool.lease(
            (capacity * shape.kv_heads, shape.page_size, dim), shape.dtype, torch.device("cpu"), reservoir=True,
            pinned=self._device.type == "cuda",
        )  # fmt: skip

    def _wait(self) -> None:
        """Until host memory holds what was appended from a GPU."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None


def deliver(staged: Tensor, rows: Tensor, target: Tensor) -> None:
    """Write staged[i], host memory, to target[rows[i]]. staged: [move, page_size, dim], target: [row, page_size, dim].

    To a GPU the bytes travel on a stream of their own, from page-locked memory, beside what the current stream still
    has to do; only then does the current stream write them into their rows, so nothing waits but it.
    """
    rows = rows.to(target.device)
    if target.device.type != "cuda":
        target.index_copy_(0, rows, staged)
        return
    current = torch.cuda.current_stream(target.device)
    with torch.cuda.stream(_side_stream(target.device)):
        arrived = staged.to(target.device, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
    current.wait_event(done)
    arrived.record_stream(current)  # the side stream's memory must not be reused before the current one has read it
    target.index_copy_(0, rows, arrived)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream per GPU that pages arrive on."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def make_reservoir(where: str, pool: Pool, page_size: int, device: torch.device | str) -> Reservoir:
    """An empty reservoir. where: "host", or "file:DIR", a file in that folder. device: where fast memory is.

    Raises RequestError for another word, and for a folder that is not there or cannot be written.
    """
    if page_size < 1:
        raise RequestError(f"page_size={page_size} is no page; give 1 or more tokens, 16 is usual")
    if where == "host":
        return HostReservoir(pool, torch.device(device))
    if where.startswith("file:") and len(where) > len("file:"):
        from wakesight.cache.residency.page_file import FileReservoir

        return FileReservoir(Path(where.removeprefix("file:")).expanduser())
    raise RequestError(f"there is no reservoir {where!r}; give host, or file: and a folder, for example file:/tmp")


def check_reservoir(where: str) -> None:
    """Raise the RequestError that `make_reservoir` would, and leave nothing behind."""
    make_reservoir(where, Pool(), 1, "cpu").release()

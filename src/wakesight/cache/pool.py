"""The ledger of cache memory: every tensor a session holds was leased here and is returned here.

Two accounts. *Fast* memory is what attention reads from: slots, sketches, states; a pool may have a limit for it, which
all sessions of its engine share. *Reservoir* memory is host memory that demoted pages wait in; it has no limit here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from wakesight.errors import RequestError, WorkError


class Lease:
    """One tensor on loan. Counted owners; the last `release` returns its bytes to the ledger.

    A lease that is merely forgotten is returned when it is garbage-collected.
    """

    def __init__(self, pool: Pool, tensor: Tensor, *, reservoir: bool = False) -> None:
        self._pool = pool
        self._owners = 1
        self.tensor = tensor
        self.bytes = tensor.untyped_storage().nbytes()
        self.reservoir = reservoir

    def share(self) -> Lease:
        """One more owner of the same, from now on read-only, tensor."""
        if self._owners == 0:
            raise RuntimeError("this lease was already released")
        self._owners += 1
        return self

    def release(self) -> None:
        """Give up one ownership. Releasing more often than sharing is a bug and raises RuntimeError."""
        if self._owners == 0:
            raise RuntimeError("this lease was already released")
        self._owners -= 1
        if self._owners == 0:
            self._pool._take_back(self)

    def __del__(self) -> None:
        if self._owners:
            self._owners = 0
            self._pool._forget(self)


class Pool:
    """Allocates and counts. held_bytes: fast memory on loan; reservoir_bytes: host memory of reservoirs on loan;
    leases: how many loans, of both.

    limit_bytes: what `held_bytes` never exceeds, not even while storage grows and its old and new tensors both exist;
    None for as much as there is. poison=True (tests) fills unwritten and returned float tensors with NaN, so that a
    stale read is loud.
    """

    def __init__(self, *, limit_bytes: int | None = None, poison: bool = False) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise RequestError(
                f"limit_bytes={limit_bytes} is no amount of memory; give 0 or more, or None for no limit"
            )
        self.limit_bytes = limit_bytes
        self.poison = poison
        self.held_bytes = 0
        self.reservoir_bytes = 0
        self.leases = 0
        self._lock = threading.RLock()  # sessions may run in threads: nobody leases between a check and its lease

    @property
    def free_bytes(self) -> int | None:
        """What the limit leaves for further leases of fast memory; None without a limit."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.held_bytes)

    def check_room(self, size: int, what: str) -> None:
        """Raise the WorkError that leasing `size` bytes of fast memory would; nothing is leased.

        what: whose bytes they are, for the sentence ("a prefill of 8,000 tokens").
        """
        if self.limit_bytes is not None and self.held_bytes + size > self.limit_bytes:
            raise WorkError(
                f"{what} needs {size:,} bytes of fast memory, but of the limit of {self.limit_bytes:,} bytes only "
                f"{self.free_bytes:,} are free; close sessions, give fewer pages, or raise the limit"
            )

    def lease(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, reservoir: bool = False,
        pinned: bool = False,
    ) -> Lease:  # fmt: skip
        """A tensor with undefined content (NaN under `poison`).

        reservoir: count it as reservoir memory, outside the limit. pinned: page-locked host memory, which a GPU copies
        from without the processor. Raises WorkError when memory runs out or the limit would be passed; nothing is
        leased then.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        with self._lock:
            if not reservoir:
                self.check_room(size, "a cache tensor")
            try:
                with torch.inference_mode(False):  # else it could not be written to outside the caller's inference mode
                    tensor = torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pinned)
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                raise WorkError(
                    f"out of memory: a cache tensor of {size} bytes does not fit on {device}; "
                    "use a shorter context, or close sessions you no longer need"
                ) from error
            lease = self._enter(tensor, reservoir)
        if self.poison and dtype.is_floating_point:
            tensor.fill_(float("nan"))
        return lease

    def adopt(self, tensor: Tensor) -> Lease:
        """Count a tensor that was made elsewhere and now belongs to a session, as fast memory.

        Raises WorkError if the limit would be passed; the tensor is then not counted.
        """
        with self._lock:
            self.check_room(tensor.untyped_storage().nbytes(), "a cache tensor")
            return self._enter(tensor, reservoir=False)

    def _enter(self, tensor: Tensor, reservoir: bool) -> Lease:
        lease = Lease(self, tensor, reservoir=reservoir)
        self._count(lease, 1)
        return lease

    def _count(self, lease: Lease, sign: int) -> None:
        with self._lock:
            if lease.reservoir:
                self.reservoir_bytes += sign * lease.bytes
            else:
                self.held_bytes += sign * lease.bytes
            self.leases += sign

    def _forget(self, lease: Lease) -> None:
        self._count(lease, -1)

    def _take_back(self, lease: Lease) -> None:
        self._forget(lease)
        if self.poison and lease.tensor.dtype.is_floating_point:
            lease.tensor.fill_(float("nan"))
        del lease.tensor

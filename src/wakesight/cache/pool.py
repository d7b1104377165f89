"""The ledger of cache memory: every tensor a session holds was leased here and is returned here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wakesight.errors import WorkError


class Lease:
    """One tensor on loan. Counted owners; the last `release` returns its bytes to the ledger.

    A lease that is merely forgotten is returned when it is garbage-collected.
    """

    def __init__(self, pool: Pool, tensor: Tensor) -> None:
        self._pool = pool
        self._owners = 1
        self.tensor = tensor
        self.bytes = tensor.untyped_storage().nbytes()

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
    """Allocates and counts.

    poison=True (tests) fills unwritten and returned float tensors with NaN, so that a stale read is loud.
    """

    def __init__(self, *, poison: bool = False) -> None:
        self.poison = poison
        self.held_bytes = 0
        self.leases = 0

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Lease:
        """A tensor with undefined content (NaN under `poison`). Raises WorkError when memory runs out."""
        try:
            with torch.inference_mode(False):  # else it could not be written to outside the caller's inference mode
                tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            size = torch.Size(shape).numel() * dtype.itemsize
            raise WorkError(
                f"out of memory: a cache tensor of {size} bytes does not fit on {device}; "
                "use a shorter context, or close sessions you no longer need"
            ) from error
        if self.poison and dtype.is_floating_point:
            tensor.fill_(float("nan"))
        return self._enter(tensor)

    def adopt(self, tensor: Tensor) -> Lease:
        """Count a tensor that was made elsewhere and now belongs to a session."""
        return self._enter(tensor)

    def _enter(self, tensor: Tensor) -> Lease:
        lease = Lease(self, tensor)
        self.held_bytes += lease.bytes
        self.leases += 1
        return lease

    def _forget(self, lease: Lease) -> None:
        self.held_bytes -= lease.bytes
        self.leases -= 1

    def _take_back(self, lease: Lease) -> None:
        self._forget(lease)
        if self.poison and lease.tensor.dtype.is_floating_point:
            lease.tensor.fill_(float("nan"))
        del lease.tensor

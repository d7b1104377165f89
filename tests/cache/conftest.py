"""Memory that runs out at a chosen moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wakesight.cache.pool import Pool
from wakesight.errors import WorkError


@pytest.fixture
def run_out_at(monkeypatch) -> Callable[[Pool, int], None]:
    """`run_out_at(pool, call)`: the pool has no memory for its `call`-th lease from now on."""

    def arm(pool: Pool, call: int) -> None:
        leases, calls = pool.lease, iter(range(1, 1000))

        def lease(*args, **kwargs):
            if next(calls) == call:
                raise WorkError("out of memory")
            return leases(*args, **kwargs)

        monkeypatch.setattr(pool, "lease", lease)

    return arm

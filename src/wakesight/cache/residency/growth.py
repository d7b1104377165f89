"""How much room storage of pages takes when it must grow, as a rule of its own: reservoirs and sketches share it."""

from __future__ import annotations

STEP = 4  # pages: capacities are multiples, so that a short context does not grow at every page


def grown(pages: int, capacity: int) -> int:
    """A capacity of at least `pages`, in pages: the old one and a quarter of it, as `Slots` grow. 0 for no pages."""
    wanted = max(pages, capacity + capacity // 4) if capacity else pages
    return -(-wanted // STEP) * STEP

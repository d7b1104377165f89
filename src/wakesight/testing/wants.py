"""Random page wants with locality: a cache of recent pages is neither perfect on them nor useless."""

from __future__ import annotations

import numpy as np

from wakesight.traces.pages import PageWants


def random_wants(
    seed: int, units: int = 4, steps: int = 32, pages: int = 24, per_step: int = 6, layers: int = 1,
    locality: float = 0.7, prompt_pages: int | None = None,
) -> PageWants:  # fmt: skip
    """Wants of `units` units over `steps` steps of a context that grows to `pages` pages.

    per_step: most pages a unit wants at once; 0 to that many are wanted. locality: chance that a wanted page is one of
    the unit's recent ones (nearer ones likelier), else any page of the context. layers: units are shared out evenly,
    in order. prompt_pages: None for half of `pages`. Weights are multiples of 1/8, so that many are equal and the tie
    rules matter. The same arguments give the same wants.
    """
    rng = np.random.default_rng(seed)
    prompt = max(1, pages // 2) if prompt_pages is None else prompt_pages
    in_context = np.linspace(prompt, pages, steps).astype(np.int32) if steps else np.zeros(0, np.int32)
    lists = [_wanted(rng, [int(n) for n in in_context], per_step, locality) for _ in range(units)]
    flat = [_ordered(rng, one) for unit in lists for one in unit]
    counts = [len(one) for one, _ in flat]
    return PageWants(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pages=np.concatenate([[], *(one for one, _ in flat)]).astype(np.int32),
        weights=np.concatenate([[], *(one for _, one in flat)]).astype(np.float32),
        units=units,
        steps=steps,
        pages_in_context=in_context,
        layer_of=(np.arange(units) * layers // max(1, units)).astype(np.int32),
        prompt_pages=prompt,
        prompt_scores=(rng.integers(0, 16, size=(units, prompt)) / 8).astype(np.float32),
        name=f"random-{seed}",
    )


def _wanted(rng: np.random.Generator, in_context: list[int], per_step: int, locality: float) -> list[list[int]]:
    """Pages of one unit, step by step."""
    recent: list[int] = []  # the latest last
    steps = []
    for there in in_context:
        wanted: dict[int, None] = {}
        for _ in range(int(rng.integers(0, min(per_step, there) + 1))):
            near = int(rng.geometric(0.15))
            page = recent[-near] if near <= len(recent) and rng.random() < locality else int(rng.integers(there))
            wanted[page] = None
        recent = [page for page in recent if page not in wanted] + list(wanted)
        steps.append(list(wanted))
    return steps


def _ordered(rng: np.random.Generator, wanted: list[int]) -> tuple[list[int], list[float]]:
    """The order PageWants promises: rising weight, then rising id."""
    rows = sorted((int(rng.integers(1, 9)) / 8, page) for page in wanted)
    return [page for _, page in rows], [weight for weight, _ in rows]

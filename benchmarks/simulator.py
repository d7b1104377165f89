"""How fast the simulator plays LRU: page accesses per second on one core, and all budgets in one pass.

.venv/bin/python benchmarks/simulator.py [--units 256] [--steps 2048] [--rounds 5]

Wants are made up: each unit returns to its favourite pages (a Zipf law over a shuffled context), to the newest ones and
to any page at all. Arrays lie in memory, everything is compiled and warm. The arms reactive, evict, 32 runs and the
curve alternate; the curve must equal the 32 runs before anything is printed. Prints one JSON line; rates per second
are medians over rounds, per CPU second the best of rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numba
import numpy as np

from wakesight.bench.pairs import alternate, ratio
from wakesight.cache.residency.policies import Evict, Reactive
from wakesight.simulate import whole_runs
from wakesight.traces.pages import PageWants

BUDGETS = tuple(range(4, 132, 4))  # 32
BUDGET = 32
COLUMNS = 24  # most pages a unit wants at a step


def made_up(units: int, steps: int, prompt_pages: int = 256, seed: int = 0) -> PageWants:
    """About two thirds of COLUMNS wants per unit and step, over a context that grows a page every 16 steps."""
    rng = np.random.default_rng(seed)
    in_context = (prompt_pages + np.arange(steps) // 16 + 1).astype(np.int32)
    lists, counts = [], np.empty((units, steps), np.int64)
    for unit in range(units):
        favourites = rng.permutation(in_context[-1])
        zipf = favourites[np.minimum(rng.zipf(1.7, (steps, COLUMNS)) - 1, len(favourites) - 1)]
        newest = in_context[:, None] - rng.geometric(0.2, (steps, COLUMNS))
        anywhere = rng.integers(0, in_context[:, None], (steps, COLUMNS))
        kind = rng.random((steps, COLUMNS))
        pages = np.where(kind < 0.7, zipf, np.where(kind < 0.97, newest, anywhere)) % in_context[:, None]
        pages.sort(axis=1)
        new = np.ones(pages.shape, bool)
        new[:, 1:] = pages[:, 1:] != pages[:, :-1]
        order = np.where(new, rng.random(pages.shape), 2).argsort(axis=1)  # weights at random, doubles last
        counts[unit] = new.sum(axis=1)
        there = np.arange(COLUMNS) < counts[unit, :, None]
        lists.append(np.take_along_axis(pages, order, 1)[there].astype(np.int32))
    flat = np.concatenate(lists)
    return PageWants(
        offsets=np.concatenate([[0], np.cumsum(counts.ravel())]),
        pages=flat,
        weights=np.ones(len(flat), np.float32),
        units=units,
        steps=steps,
        pages_in_context=in_context,
        layer_of=np.zeros(units, np.int32),
        prompt_pages=prompt_pages,
        prompt_scores=np.zeros((units, prompt_pages), np.float32),
    )


def check(wants: PageWants) -> None:
    """The curve equals the runs it replaces, at every budget and step."""
    curve = whole_runs.reactive_curve(Reactive(), wants, BUDGETS)
    for budget in BUDGETS:
        alone = whole_runs.run(Reactive(), wants, budget)
        for name in ("misses", "first_touches", "fetches", "resident"):
            assert np.array_equal(getattr(curve[budget], name), getattr(alone, name)), (budget, name)


def cpu_seconds(arm: Callable[[], object]) -> float:
    """Processor time of one call: what a core of its own would take, also on a machine that is busy."""
    start = time.process_time()
    arm()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    wants = made_up(given.units, given.steps)
    check(wants)
    arms = {
        "reactive": lambda: whole_runs.run(Reactive(), wants, BUDGET),
        "evict": lambda: whole_runs.run(Evict(), wants, BUDGET),
        "runs": lambda: [whole_runs.run(Reactive(), wants, budget) for budget in BUDGETS],
        "curve": lambda: whole_runs.reactive_curve(Reactive(), wants, BUDGETS),
    }
    seconds = alternate({name: (lambda arm=arm: [None, arm()][0]) for name, arm in arms.items()}, given.rounds)
    times = {name: float(np.median(took)) for name, took in seconds.items()}
    cpu = {name: min(cpu_seconds(arm) for _ in range(given.rounds)) for name, arm in arms.items() if name != "runs"}
    faster = ratio(seconds["runs"], seconds["curve"])
    miss_rate = whole_runs.run(Reactive(), wants, BUDGET).misses.sum() / len(wants.pages)
    print(
        json.dumps(
            {
                "accesses": len(wants.pages),
                "budget": BUDGET,
                "budgets": len(BUDGETS),
                "reactive_miss_rate": round(float(miss_rate), 4),
                "reactive_accesses_per_s": round(len(wants.pages) / times["reactive"]),
                "evict_accesses_per_s": round(len(wants.pages) / times["evict"]),
                "reactive_accesses_per_cpu_s": round(len(wants.pages) / cpu["reactive"]),
                "evict_accesses_per_cpu_s": round(len(wants.pages) / cpu["evict"]),
                "curve_over_runs": [round(x, 2) for x in (faster.mean, faster.low, faster.high)],
                "seconds": {name: round(value, 4) for name, value in times.items()},
                "rounds": given.rounds,
                "numba": numba.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()

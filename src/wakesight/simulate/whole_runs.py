"""A policy over a whole run at once: the rules of `cache/residency`, without making every step's state anew.

LRU and belady have loops of their own (`kernels.py`); the others run the compiled body's own rows over many steps.
Tests hold every one of them to the counts of `stepping.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wakesight.cache.residency import policies
from wakesight.cache.residency.policies import Arc, Belady, Evict, Policy, Ranked, Reactive, Setting, Table
from wakesight.errors import RequestError
from wakesight.simulate import offline
from wakesight.simulate.stepping import begin, setting_for
from wakesight.simulate.tally import Tally
from wakesight.traces.pages import PageWants


def run(policy: Policy, wants: PageWants, budget: int) -> Tally:
    """What the policy counts on one trace. budget: pages per unit, at least 1 (full takes no notice of it).

    Raises RequestError for a budget below 1 and without numba.
    """
    check_budgets([budget])
    policies.body("numba")
    setting = setting_for(policy, wants, budget)
    if isinstance(policy, Reactive | Evict):
        return _lru(policy, wants, setting)
    if isinstance(policy, Belady):
        return _belady(policy, wants, setting)
    if isinstance(policy, Arc):
        return _arc(policy, wants, setting)
    assert isinstance(policy, Table)
    return _table(policy, wants, setting)


def reactive_curve(policy: Reactive, wants: PageWants, budgets: Sequence[int]) -> dict[int, Tally]:
    """`run` at every budget, in one pass over the trace. Source: LRU's stack property."""
    check_budgets(budgets)
    policies.body("numba")
    from wakesight.simulate import kernels

    sizes = np.unique(np.asarray(budgets, np.int64))
    setting = setting_for(policy, wants, int(sizes[-1]))
    larger = np.searchsorted(sizes, np.arange(setting.pages + 1), side="right")
    missed, held_units, held_pages = np.zeros((3, wants.steps, len(sizes) + 1), np.int64)
    first_touches = np.zeros(wants.steps, np.int64)
    first, seen = _first(setting)
    kernels.lru_curve(
        wants.offsets, wants.pages, wants.units, wants.steps, setting.pages, larger, first, seen,
        policy.first_touch == "miss", missed, first_touches, held_units, held_pages,
    )  # fmt: skip
    # what misses at the k smallest budgets misses at budget i if k > i; a stack of k > i fills budget i, others fit
    misses = _from_above(missed)
    resident = np.cumsum(held_pages, axis=1)[:, :-1] + sizes * _from_above(held_units)
    start = [int((first[:, :size] >= 0).sum()) for size in sizes]
    accesses = _accesses(wants)
    return {
        int(size): Tally(accesses, misses[:, i], first_touches, misses[:, i], resident[:, i], start[i], True)
        for i, size in enumerate(sizes)
    }


def check_budgets(budgets: Sequence[int]) -> None:
    """Raises RequestError unless there is a budget and each is a page or more."""
    if not len(budgets):
        raise RequestError("there is no budget to simulate; give pages per unit, for example --budgets 8,16,32")
    if min(budgets) < 1:
        raise RequestError(f"a budget of {min(budgets)} pages holds nothing; give at least 1")


def _from_above(table: np.ndarray) -> np.ndarray:
    """[step, k] -> [step, i], the sum over k > i."""
    return np.asarray(table[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:])


def _accesses(wants: PageWants) -> np.ndarray:
    """int64 [step]"""
    return np.asarray(np.diff(wants.offsets).reshape(wants.units, wants.steps).sum(axis=0))


def _first(setting: Setting) -> tuple[np.ndarray, int]:
    """The first resident set as the kernels take it, and how many pages count as seen."""
    if setting.first is None:
        return np.full((setting.units, 0), -1, np.int32), 0
    return setting.first, setting.prompt_pages


def _lru(policy: Reactive | Evict, wants: PageWants, setting: Setting) -> Tally:
    from wakesight.simulate import kernels

    first, seen = _first(setting)
    counts, resident = np.zeros((3, wants.steps), np.int64), np.zeros(wants.steps, np.int64)
    kernels.lru_run(
        wants.offsets, wants.pages, wants.units, wants.steps, setting.pages, setting.budget, first, seen,
        isinstance(policy, Reactive) and policy.first_touch == "miss", isinstance(policy, Evict), counts, resident,
    )  # fmt: skip
    start = int((first[:, : setting.budget] >= 0).sum())
    return Tally(_accesses(wants), counts[0], counts[1], counts[2], resident, start, policy.reversible)


def _belady(policy: Belady, wants: PageWants, setting: Setting) -> Tally:
    from wakesight.simulate import kernels

    first, seen = _first(setting)
    counts, resident = np.zeros((3, wants.steps), np.int64), np.zeros(wants.steps, np.int64)
    kernels.belady_run(
        wants.offsets, wants.pages, offline.next_uses(wants), wants.units, wants.steps, setting.pages, setting.budget,
        first, offline.first_uses(wants), seen, policy.first_touch == "miss", counts, resident,
    )  # fmt: skip
    start = int((first[:, : setting.budget] >= 0).sum())
    return Tally(_accesses(wants), counts[0], counts[1], counts[2], resident, start, policy.reversible)


def _arc(policy: Arc, wants: PageWants, setting: Setting) -> Tally:
    rules, state = policies.body("numba"), policy.begin(setting)
    start = int(state.resident().sum())
    counts, resident = np.zeros((wants.steps, 4), np.int32), np.zeros(wants.steps, np.int64)
    rules.arc_run(
        state.place, state.order, state.target, state.clock, state.seen, wants.offsets, wants.pages, wants.steps,
        setting.budget, policy.first_touch == "miss", counts, resident,
    )  # fmt: skip
    return _tally(rules, wants, counts, resident, start, policy)


def _table(policy: Table, wants: PageWants, setting: Setting) -> Tally:
    """Serve up to the next ranking in compiled code, rank, and go on."""
    rules, state = policies.body("numba"), begin(policy, wants, setting)
    start = int(state.resident().sum())
    counts, resident = np.zeros((wants.steps, 4), np.int32), np.zeros(wants.steps, np.int64)
    done = 0
    while done < wants.steps:
        last = next((step for step in range(done, wants.steps) if policy.ranks_after(step)), wants.steps - 1)
        rules.serve_span(
            state.held, state.seen, state.worth, wants.offsets, wants.pages, wants.weights, wants.steps,
            np.array([done, last + 1]), policy.admit_from(state, setting), policy.counts, counts, resident,
        )  # fmt: skip
        if isinstance(policy, Ranked) and policy.ranks_after(last):
            ranked = policy.rank(rules, state, int(wants.pages_in_context[last]), setting)
            state = ranked.state
            counts[last, rules.FETCHES] += ranked.counts.fetches.sum()
            resident[last] = state.resident().sum()
        done = last + 1
    return _tally(rules, wants, counts, resident, start, policy)


def _tally(
    rules: policies.Body, wants: PageWants, counts: np.ndarray, resident: np.ndarray, start: int, policy: Policy
) -> Tally:
    table = counts.astype(np.int64)
    misses, first, fetches = table[:, rules.MISSES], table[:, rules.FIRST], table[:, rules.FETCHES]
    return Tally(_accesses(wants), misses, first, fetches, resident, start, policy.reversible)

"""Play a policy on a trace step by step, with any body: the rule itself, slow. `whole_runs.py` must agree with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from wakesight.cache.residency import policies
from wakesight.cache.residency.base import Step, top_pages
from wakesight.cache.residency.policies import At, Belady, BodyName, Frozen, Policy, Setting
from wakesight.errors import RequestError
from wakesight.simulate import offline
from wakesight.simulate.tally import Tally
from wakesight.traces.pages import PageWants

PROMPT_ATTENTION = "snapkv"  # the scorer whose scores of prompt pages are in `PageWants.prompt_scores`


def setting_for(policy: Policy, wants: PageWants, budget: int) -> Setting:
    """What `policy` knows of a trace beforehand."""
    layers = tuple(np.flatnonzero(wants.layer_of == layer) for layer in np.unique(wants.layer_of))
    unstable = offline.unstable_units(wants, policy.unstable) if isinstance(policy, Frozen) else None
    start = getattr(policy, "start", "")
    first = top_pages(start_scores(wants, start), wants.prompt_pages) if start else None
    return Setting(
        units=wants.units,
        pages=offline.page_count(wants),
        prompt_pages=wants.prompt_pages,
        budget=budget,
        layers=layers,
        first=first,
        prompt_scores=wants.prompt_scores,
        unstable=unstable,
    )


def start_scores(wants: PageWants, scorer: str) -> np.ndarray:
    """float32 [unit, prompt page] by which a first resident set is taken; snapkv's come from prompt attention.

    Raises RequestError for a scorer whose scores were not logged.
    """
    if scorer == PROMPT_ATTENTION:
        return wants.prompt_scores
    if scorer not in wants.starts:
        logged = ", ".join([PROMPT_ATTENTION, *wants.starts])
        raise RequestError(
            f"the run {wants.name} holds no scores of {scorer!r} for a first resident set, but of: {logged}; take one "
            f"of these, or record the run with --scorers {scorer}"
        )
    return wants.starts[scorer]


def begin(policy: Policy, wants: PageWants, setting: Setting) -> Any:
    """The state before the first step; belady's with the first uses of its first set."""
    if isinstance(policy, Belady):
        return policies.start_uses(policy.begin(setting), offline.first_uses(wants))
    return policy.begin(setting)


def play(policy: Policy, wants: PageWants, budget: int, body: BodyName = "plain") -> Tally:
    """All steps, one after the other."""
    setting = setting_for(policy, wants, budget)
    state = begin(policy, wants, setting)
    start = int(state.resident().sum())
    next_use = offline.next_uses(wants) if isinstance(policy, Belady) else np.full(len(wants.pages), 0, np.int32)
    rules, sums, resident = policies.body(body), [], []
    if body == "torch":
        state, setting = rules.to(state, "cpu"), rules.to(setting, "cpu")
    steps = zip(offline.padded(wants), offline.padded_next_uses(wants, next_use), strict=True)
    for step, (wanted, upcoming) in enumerate(steps):
        at = At(step, int(wants.pages_in_context[step]), upcoming)
        if body == "torch":
            wanted, at = rules.to(wanted, "cpu"), rules.to(at, "cpu")
        done: Step = policy.step(rules, state, wanted, at, setting)
        state = done.state
        sums.append([int(np.asarray(count).sum()) for count in dataclasses.astuple(done.counts)])
        resident.append(int(state.resident().sum()))
    table = np.array(sums, np.int64).reshape(-1, 4)
    hits, misses, first, fetches = table.T
    accesses = hits + misses + first
    return Tally(accesses, misses, first, fetches, np.array(resident, np.int64), start, policy.reversible)

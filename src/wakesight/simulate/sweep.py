"""Policies times budgets times runs: every cell played, and the cells as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from wakesight.cache.residency.policies import Frozen, Policy, Reactive
from wakesight.errors import RequestError
from wakesight.simulate import whole_runs
from wakesight.simulate.costs import CostModel
from wakesight.simulate.specs import policy_of
from wakesight.simulate.stepping import PROMPT_ATTENTION, start_scores
from wakesight.simulate.tally import Tally, row
from wakesight.traces.pages import PageWants

OnCell = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Run:
    """One trace as wants. combo: model / regime; runs of one combo are pooled. prompt_attention: was it logged?"""

    name: str
    combo: str
    wants: PageWants
    prompt_attention: bool = True


@dataclass(frozen=True, eq=False)
class Cell:
    """One policy at one budget on the runs of one combo. budget: None for full. tallies: by run, in order."""

    combo: str
    policy: str
    budget: int | None
    runs: tuple[str, ...]
    tallies: tuple[Tally, ...]


def sweep(
    runs: Sequence[Run], specs: Sequence[str], budgets: Sequence[int], on_cell: OnCell | None = None
) -> list[Cell]:
    """Every policy at every budget on every run; combos in order of appearance, then policies, then budgets.

    Raises RequestError for no runs, unknown policies or budgets below 1, before anything is played, and for a first
    resident set where a run has no prompt attention.
    """
    policies = {spec: policy_of(spec) for spec in specs}
    sizes = sorted(set(budgets))
    if not policies:
        raise RequestError("there is no policy to simulate; give some, for example --policies full,reactive,evict")
    if any(policy.needs_budget for policy in policies.values()):
        whole_runs.check_budgets(sizes)
    by_combo: dict[str, list[Run]] = {}
    for run in runs:
        _check_start(run, policies)
        by_combo.setdefault(run.combo, []).append(run)
    if not by_combo:
        raise RequestError("there is no run to simulate; record some with: wakesight trace record")
    cells: list[Cell] = []
    done, total = 0, len(by_combo) * len(policies)
    for combo, members in by_combo.items():
        for spec, policy in policies.items():
            cells += _cells(combo, spec, policy, members, sizes)
            done += 1
            if on_cell is not None:
                on_cell(done, total)
    return cells


def rows(cells: Sequence[Cell], costs: CostModel, per_run: bool = False) -> Iterator[dict[str, Any]]:
    """Cells as dicts of `tally.Row`'s fields; `combo` first where there are several, `run` first of all per run."""
    several = len({cell.combo for cell in cells}) > 1
    for cell in cells:
        named = {"combo": cell.combo} if several else {}
        if not per_run:
            yield {**named, **asdict(row(cell.policy, cell.budget, cell.tallies, costs))}
            continue
        for name, tally in zip(cell.runs, cell.tallies, strict=True):
            yield {"run": name, **named, **asdict(row(cell.policy, cell.budget, [tally], costs))}


def _cells(combo: str, spec: str, policy: Policy, runs: Sequence[Run], budgets: Sequence[int]) -> Iterator[Cell]:
    names = tuple(run.name for run in runs)
    if not policy.needs_budget:
        yield Cell(combo, spec, None, names, tuple(whole_runs.run(policy, run.wants, 1) for run in runs))
        return
    played = [_budgets(policy, run, budgets) for run in runs]
    for budget in budgets:
        yield Cell(combo, spec, budget, names, tuple(one[budget] for one in played))


def _budgets(policy: Policy, run: Run, budgets: Sequence[int]) -> dict[int, Tally]:
    wants = run.wants
    if isinstance(policy, Frozen) and not run.prompt_attention:
        # what stands in for it comes from the first step; frozen starts empty without prompt scores
        wants = replace(wants, prompt_scores=np.full_like(wants.prompt_scores, -1))
    if isinstance(policy, Reactive):
        return whole_runs.reactive_curve(policy, wants, budgets)
    return {budget: whole_runs.run(policy, wants, budget) for budget in budgets}


def _check_start(run: Run, policies: dict[str, Policy]) -> None:
    for spec, policy in policies.items():
        start = getattr(policy, "start", "")
        if start and start != PROMPT_ATTENTION:
            start_scores(run.wants, start)  # raises where it was not logged
        elif start and not run.prompt_attention:
            raise RequestError(
                f"{spec} needs the prompt's attention, which the run {run.name} has not logged; leave the policy out, "
                "or record the run with prompt_mass"
            )

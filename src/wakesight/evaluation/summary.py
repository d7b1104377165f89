"""summary.json: one row per task and arm, and the paired differences between arms, Holm-adjusted by family.

{"suite", "rule", "first", "questions", "scored_questions", "contexts", "skipped", "sources",
 "arms":   [{suite, task, arm, method, allocation, evicted, unit, page, keep, n, contexts, mean, low, high,
             official_mean, kept_entries, kv_bytes_ratio}],
 "paired": [{suite, task, family, a, b, diff, low, high, p, p_raw, n, contexts}]}

mean, low, high and diff are from 0 to 1 under the strict rule; a fidelity run has no grades, there they are shares
of positions with the same most likely token, and kl and nll stand beside them as {mean, low, high}. rule says which.
low and high are null where a task has one context only (intervals.py). Task "mean" stands over all tasks, every task
weighing the same. n: questions. diff: a minus b. first: what family "first" compares with (families.py).

A pure function of the rows and of what was asked for; the order of the rows has no part in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wakesight.evaluation import measures
from wakesight.evaluation.arms import facts_of
from wakesight.evaluation.families import first_named, pairs
from wakesight.evaluation.intervals import Estimate
from wakesight.evaluation.measures import LOWER_IS_BETTER, MAIN, limits
from wakesight.evaluation.records import Row
from wakesight.evaluation.scored import ALL, Scored, counted, rounded
from wakesight.evaluation.suites.table import task_id

BESIDE = ("kl", "nll")


def summarise(rows: Sequence[Row], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """arguments: the run's, of which suite, seed, methods, allocations and evicted are read."""
    scored = Scored.of(rows, int(arguments.get("seed") or 0))
    suite = str(arguments.get("suite") or "")
    rule = next((name for name in MAIN if name in scored.rules), None)
    found: dict[str, Any] = {"suite": suite, "rule": rule, **scored.facts(), "arms": [], "paired": []}
    if rule is not None:
        found["first"] = first_named(scored, arguments)
        found["arms"] = list(_arms(scored, suite, rule))
        found["paired"] = _paired(scored, suite, rule, arguments)
    return found


def title(summary: Mapping[str, Any]) -> str:
    """One line over a table of its means: what they are, which way is up, of how many questions."""
    rule = str(summary["rule"])
    bounds = limits(rule)
    what = measures.title(rule) + ("" if bounds is None else f" from {bounds[0]:g} to {bounds[1]:g}")
    better = "lower" if rule in LOWER_IS_BETTER else "higher"
    scored, contexts = (
        counted(summary[name], noun) for name, noun in (("scored_questions", "question"), ("contexts", "context"))
    )
    return f"{what}, {better} is better; means of {scored}, {contexts}"


def _arms(scored: Scored, suite: str, rule: str) -> Iterator[dict[str, Any]]:
    kept = {arm: _kept(scored, arm) for arm in scored.arms}
    official = "official" if "official" in scored.rules else rule
    for task, arm in itertools.product((*scored.tasks, ALL), scored.arms):
        about = scored.estimate(rule, task, arm)
        if about is None:
            continue
        row = {"suite": suite, "task": _named(suite, task), "arm": arm, **vars(facts_of(arm))}
        row.update(n=about.questions, contexts=about.contexts, **_interval(about))
        if (by_official := scored.estimate(official, task, arm)) is not None:
            row["official_mean"] = rounded(by_official.mean)
        held = [kept[arm][name] for name in (scored.tasks if task == ALL else (task,))]
        row["kept_entries"] = rounded(sum(entries for entries, _ in held) / len(held))
        row["kv_bytes_ratio"] = rounded(sum(ratio for _, ratio in held) / len(held))
        for other in BESIDE:
            if (beside := scored.estimate(other, task, arm)) is not None:
                row[other] = _interval(beside)
        yield row


def _kept(scored: Scored, arm: str) -> dict[str, tuple[float, float]]:
    """Task -> mean entries and mean share of the whole cache's bytes that the arm held, over its questions."""
    held: dict[str, list[tuple[float, float]]] = {}
    for row in scored.rows:
        if row["arm"] == arm:
            held.setdefault(row["task"], []).append((row["kept"], row["kv_bytes_kept"] / row["kv_bytes_full"]))
    return {
        task: (sum(entries for entries, _ in found) / len(found), sum(ratio for _, ratio in found) / len(found))
        for task, found in held.items()
    }


def _paired(scored: Scored, suite: str, rule: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "suite": suite, "task": _named(suite, one.task), "family": one.family, "a": one.a, "b": one.b,
            "diff": rounded(one.found.mean), "low": rounded(one.found.low), "high": rounded(one.found.high),
            "p_raw": rounded(one.found.p_value), "n": one.found.questions, "contexts": one.found.contexts,
            "p": rounded(one.p),
        }
        for one in pairs(scored, rule, arguments)
    ]  # fmt: skip


def _named(suite: str, task: str) -> str:
    return task if task == ALL else task_id(suite, task)


def _interval(found: Estimate) -> dict[str, float | None]:
    return {"mean": rounded(found.mean), "low": rounded(found.low), "high": rounded(found.high)}

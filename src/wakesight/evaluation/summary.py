"""summary.json: one row per task and arm, and the paired differences between arms, Holm-adjusted by family.

{"suite", "questions", "scored_questions", "contexts", "skipped", "sources",
 "arms":   [{suite, task, arm, method, allocation, evicted, unit, page, keep, n, contexts, mean, low, high,
             official_mean, kept_entries, kv_bytes_ratio}],
 "paired": [{suite, task, family, a, b, diff, low, high, p, p_raw, n, contexts}]}

mean, low, high and diff are from 0 to 1 under the strict rule; a fidelity run has no grades, there they are shares
of positions with the same most likely token, and kl and nll stand beside them as {mean, low, high}. Task "mean"
stands over all tasks, every task weighing the same. n: questions. diff: a minus b.

A pure function of the rows and of what was asked for; the order of the rows has no part in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wakesight.evaluation.arms import WHOLE, ArmFacts, facts_of
from wakesight.evaluation.intervals import Estimate, holm
from wakesight.evaluation.records import Row
from wakesight.evaluation.scored import ALL, Scored, rounded
from wakesight.evaluation.suites.table import task_id
from wakesight.registry import read_names

MAIN = ("strict", "top1")  # the rule that mean, low and high are under: the first that the rows have
BESIDE = ("kl", "nll")


def summarise(rows: Sequence[Row], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """arguments: the run's, of which suite, seed, methods, allocations and evicted are read."""
    scored = Scored.of(rows, int(arguments.get("seed") or 0))
    suite = str(arguments.get("suite") or "")
    rule = next((name for name in MAIN if name in scored.rules), None)
    found: dict[str, Any] = {"suite": suite, **scored.facts(), "arms": [], "paired": []}
    if rule is not None:
        found["arms"] = list(_arms(scored, suite, rule))
        found["paired"] = _paired(scored, suite, rule, _first_named(scored, arguments))
    return found


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


def _paired(scored: Scored, suite: str, rule: str, first: str | None) -> list[dict[str, Any]]:
    """Three families of comparisons, each adjusted by itself, no pair of a task in two of them.

    "whole": every arm against the unpruned baseline, task by task and over all. "first": every arm against the
    first-named method and allocation at the same fraction, task by task. "pairs": over all tasks, every two arms
    of one fraction.
    """
    evicting = sorted((arm for arm in scored.arms if arm != WHOLE), key=lambda arm: _curve(facts_of(arm)) != first)
    whole = [(task, arm, WHOLE) for task in (*scored.tasks, ALL) for arm in evicting if WHOLE in scored.arms]
    equals: dict[float, list[str]] = {}
    for arm in evicting:  # the first-named stands in front
        equals.setdefault(facts_of(arm).keep, []).append(arm)
    against = [
        (task, arm, arms[0])
        for task in scored.tasks
        for arms in equals.values()
        for arm in arms[1:]
        if _curve(facts_of(arms[0])) == first
    ]
    pairs = [(ALL, b, a) for arms in equals.values() for a, b in itertools.combinations(arms, 2)]
    rows: list[dict[str, Any]] = []
    for family, compared in (("whole", whole), ("first", against), ("pairs", pairs)):
        made: list[dict[str, Any]] = []
        raw: list[float] = []
        for task, a, b in compared:
            found = scored.difference(rule, task, a, b)
            if found is None:
                continue
            interval = {"diff": rounded(found.mean), "low": rounded(found.low), "high": rounded(found.high)}
            raw.append(found.p_value)
            made.append({
                "suite": suite, "task": _named(suite, task), "family": family, "a": a, "b": b, **interval,
                "p_raw": rounded(found.p_value), "n": found.questions, "contexts": found.contexts,
            })  # fmt: skip
        for row, value in zip(made, holm(raw), strict=True):
            row["p"] = rounded(value)
        rows += made
    return rows


def _first_named(scored: Scored, arguments: Mapping[str, Any]) -> str | None:
    """The curve that was named first; where nobody knows what was named, the first of the sorted arms."""
    try:
        names = [read_names(arguments[name])[0] for name in ("methods", "allocations", "evicted")]
    except (KeyError, IndexError):
        names = []
    curves = [_curve(facts_of(arm)) for arm in scored.arms if arm != WHOLE]
    named = "/".join(names)
    return named if named in curves else next(iter(curves), None)


def _curve(arm: ArmFacts) -> str:
    return f"{arm.method}/{arm.allocation}/{arm.evicted}"


def _named(suite: str, task: str) -> str:
    return task if task == ALL else task_id(suite, task)


def _interval(found: Estimate) -> dict[str, float]:
    return {"mean": rounded(found.mean), "low": rounded(found.low), "high": rounded(found.high)}

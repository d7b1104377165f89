"""The tables of the page: scores, the best at each p, differences, costs, areas."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from wakesight.evaluation.arms import WHOLE
from wakesight.evaluation.scored import ALL
from wakesight.report import rules
from wakesight.report.arm_names import ArmName, curve_label, parse
from wakesight.report.costs import costs
from wakesight.report.folder import Run
from wakesight.report.markup import EMPTY, Cell, table
from wakesight.report.palette import Look, looks

Estimates = Mapping[str, Mapping[str, Any]]  # arm -> estimate


def score_table(run: Run, rule: str) -> str:
    """Arms down, tasks across; bold is the best arm of its p."""
    means = run.comparison["rules"][rule]["means"]
    tasks = [*_mean_column(run), *run.comparison["tasks"]]
    scale = _scale(means[task] for task in tasks)
    best = {task: _winners(means[task], rule) for task in tasks}
    styles, held = looks(run.comparison["arms"]), costs(run)
    rows = []
    for arm in run.comparison["arms"]:
        name = parse(arm)
        kept = held.get(arm)
        share = Cell("-") if kept is None else Cell(f"{kept.kept:,.0f}", kept.kept, f"{_mb(kept.kv_bytes_kept)}")
        cells = [_score(means[task].get(arm), rule, scale, arm in best[task]) for task in tasks]
        rows.append([_arm(name, styles), Cell(f"{name.keep:g}", name.keep), *cells, share])
    columns = ["method", "p", *("mean" if task == ALL else task for task in tasks), "kept entries"]
    return table(columns, rows, f"{rules.title(rule).capitalize()}: mean and 95% interval by arm and task")


def best_cards(run: Run, rule: str) -> str:
    """The whole cache and, for every p, the arm that came out best on the mean over tasks."""
    means = run.comparison["rules"][rule]["means"]
    cells: Estimates = means[ALL] or next(iter(means.values()), {})
    whole = cells.get(WHOLE, {}).get("mean")
    cards = [] if whole is None else [_card("whole cache", whole, "nothing evicted", None)]
    styles = looks(run.comparison["arms"])
    for keep, winners in sorted(_best(cells, rule).items()):
        value = cells[winners[0]]["mean"]
        share = f"{value / whole:.0%} of the whole cache" if whole and rule not in rules.LOWER_IS_BETTER else ""
        curve = parse(winners[0]).curve
        alone = len(winners) == 1
        cards.append(
            _card(
                f"p = {keep:g}", value, curve if alone else f"{len(winners)} methods alike",
                styles[curve] if alone else None, share,
            )
        )  # fmt: skip
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(head: str, value: float, name: str, look: Look | None, note: str = "") -> str:
    swatch = f'<i class="swatch" style="background:var(--m{look.place})"></i>' if look else ""
    return (
        f'<div class="card"><span>{escape(head)}</span><b>{value:.3f}</b>'
        f"<span>{swatch}{escape(name)}</span><small>{escape(note)}</small></div>"
    )


def difference_table(run: Run, rule: str) -> str:
    """Every arm minus the whole cache, task by task; bold where Holm's p is below 0.05."""
    apart = run.comparison["rules"][rule]["minus_whole"]
    tasks = [task for task, cells in apart.items() if cells]
    styles = looks(run.comparison["arms"])
    largest = max((abs(cell["mean"]) for task in tasks for cell in apart[task].values()), default=0.0)
    rows = [
        [_arm(parse(arm), styles), Cell(f"{parse(arm).keep:g}", parse(arm).keep)]
        + [_difference(apart[task].get(arm), rule, largest) for task in tasks]
        for arm in run.comparison["arms"]
        if any(arm in apart[task] for task in tasks)
    ]
    return table(["method", "p", *tasks], rows, f"{rules.title(rule).capitalize()}: arm minus whole cache, paired")


def cost_table(run: Run) -> str:
    """Entries, bytes and seconds."""
    styles = looks(run.comparison["arms"])
    rows = []
    for arm, one in costs(run).items():
        name = parse(arm)
        rows.append(
            [
                _arm(name, styles),
                Cell(f"{name.keep:g}", name.keep),
                Cell(f"{one.kept:,.0f}", one.kept),
                Cell(_mb(one.kv_bytes_kept), one.kv_bytes_kept),
                Cell(f"{one.kv_bytes_kept / one.kv_bytes_full:.1%}", one.kv_bytes_kept / one.kv_bytes_full),
                *(_seconds(x if arm != WHOLE else None) for x in (one.score_s, one.compact_s)),
            ]
        )
    columns = ["method", "p", "kept entries", "KV bytes", "of all bytes", "scoring, s", "compaction, s"]
    return table(columns, rows, "What each arm holds and takes, means per context")


def area_table(run: Run, rule: str) -> str:
    """Mean height of every curve over p."""
    found = run.comparison["rules"][rule]["areas"]
    tasks = [task for task in [*_mean_column(run), *run.comparison["tasks"]] if task in found]
    scale = _range([x for task in tasks for x in found[task].values()])
    styles = looks(run.comparison["arms"])
    rows = [
        [
            _curve(curve_label(family), styles),
            *(
                _value(found[task][family], rule, scale) if family in found[task] else EMPTY
                for task in tasks
            ),
        ]
        for family in dict.fromkeys(family for task in tasks for family in found[task])
    ]  # fmt: skip
    columns = ["method", *("mean" if task == ALL else task for task in tasks)]
    return table(columns, rows, f"{rules.title(rule).capitalize()}: mean height of the curve over p")


def _mean_column(run: Run) -> list[str]:
    return [ALL] if len(run.comparison["tasks"]) > 1 else []


def _best(cells: Estimates, rule: str) -> dict[float, list[str]]:
    """p -> the arms with the best mean, the whole cache aside."""
    found: dict[float, list[str]] = {}
    for arm, cell in cells.items():
        if arm == WHOLE:
            continue
        winners = found.setdefault(parse(arm).keep, [])
        if winners and rules.better(rule, cell["mean"], cells[winners[0]]["mean"]):
            winners.clear()
        if not winners or cell["mean"] == cells[winners[0]]["mean"]:
            winners.append(arm)
    return found


def _winners(cells: Estimates, rule: str) -> set[str]:
    """The best arms of every p at which there is something to win."""
    sizes: dict[float, int] = {}
    for arm in cells:
        sizes[parse(arm).keep] = sizes.get(parse(arm).keep, 0) + (arm != WHOLE)
    return {arm for keep, arms in _best(cells, rule).items() if len(arms) < sizes[keep] for arm in arms}


def _scale(tables: Any) -> tuple[float, float]:
    return _range([cell["mean"] for cells in tables for cell in cells.values()])


def _range(values: list[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _arm(name: ArmName, styles: Mapping[str, Look]) -> Cell:
    return Cell(name.curve, hint=name.id) if name.id == WHOLE else _curve(name.curve, styles, name.id)


def _curve(curve: str, styles: Mapping[str, Look], hint: str = "") -> Cell:
    return Cell(curve, swatch=styles[curve].place, hint=hint)


def _score(cell: Mapping[str, Any] | None, rule: str, scale: tuple[float, float], best: bool) -> Cell:
    if cell is None:
        return EMPTY
    interval = f"{cell['low']:.2f} to {cell['high']:.2f}" if "low" in cell else ""
    shade = rules.goodness(rule, cell["mean"], *scale)
    hint = f"{cell['questions']} questions, {cell['contexts']} contexts" if "questions" in cell else ""
    return Cell(f"{cell['mean']:.3f}", cell["mean"], interval, shade, strong=best, hint=hint)


def _value(value: float, rule: str, scale: tuple[float, float]) -> Cell:
    return Cell(f"{value:.3f}", value, shade=rules.goodness(rule, value, *scale))


def _difference(cell: Mapping[str, Any] | None, rule: str, largest: float) -> Cell:
    if cell is None:
        return EMPTY
    mean = cell["mean"]
    tone = "good" if rules.better(rule, mean, 0.0) else "bad"
    note = f"{cell['low']:+.2f} to {cell['high']:+.2f}, p {cell['p_holm']:.2g}"
    hint = f"p {cell['p_value']:.3g}, Holm-adjusted {cell['p_holm']:.3g}; {cell['questions']} questions"
    shade = abs(mean) / largest if largest else 0.0
    return Cell(_minus(f"{mean:+.3f}"), mean, _minus(note), shade, tone, cell["p_holm"] < 0.05, hint=hint)


def _minus(text: str) -> str:
    return text.replace("-", "\u2212")


def _seconds(value: float | None) -> Cell:
    return EMPTY if value is None else Cell(f"{value:.3f}", value)


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"

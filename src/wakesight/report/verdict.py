"""The tables of the page: scores, the best at each kept fraction, differences, costs, areas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from wakesight.evaluation.arms import WHOLE
from wakesight.evaluation.scored import ALL, counted
from wakesight.report import rules
from wakesight.report.arm_names import ArmName, curve_label, parse
from wakesight.report.costs import costs
from wakesight.report.folder import Run
from wakesight.report.markup import EMPTY, Cell, table
from wakesight.report.palette import Look, looks

Estimates = Mapping[str, Mapping[str, Any]]  # arm -> estimate


def score_table(run: Run, rule: str) -> str:
    """Arms down, tasks across; bold is the best arm of its kept fraction."""
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
        rows.append([_arm(name, styles), _keep(name), *cells, share])
    columns = ["method", "keep", *("mean" if task == ALL else task for task in tasks), "kept entries"]
    return table(columns, rows, f"{rules.title(rule).capitalize()}: mean and 95% interval by arm and task")


def best_cards(run: Run, rule: str) -> str:
    """The whole cache and, for every kept fraction, the arm that came out best on the mean over tasks."""
    means = run.comparison["rules"][rule]["means"]
    cells: Estimates = means[ALL] or next(iter(means.values()), {})
    whole = cells.get(WHOLE, {}).get("mean")
    cards = [] if whole is None else [_card("whole cache", whole, "nothing evicted", None)]
    styles = looks(run.comparison["arms"])
    for keep, winners in sorted(_best(cells, rule).items()):
        value = cells[winners[0]]["mean"]
        share = f"{value / whole:.0%} of the whole cache's score" if whole and rule not in rules.LOWER_IS_BETTER else ""
        curve = parse(winners[0]).curve
        alone = len(winners) == 1
        cards.append(
            _card(
                f"keep {keep:g}", value, curve if alone else f"{len(winners)} methods alike",
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


def difference_table(run: Run, rule: str, family: str) -> str:
    """Every arm minus the one that its family compares it with, task by task; bold and filled where significant."""
    apart = run.apart(rule, family)
    styles = looks(run.comparison["arms"])
    largest = _largest(cell for cells in apart.values() for cell in cells.values())
    rows = [
        [_arm(parse(arm), styles), _keep(parse(arm))]
        + [_difference(cells.get(arm), rule, largest) for cells in apart.values()]
        for arm in run.comparison["arms"]
        if any(arm in cells for cells in apart.values())
    ]
    caption = f"{rules.title(rule).capitalize()}: {rules.FAMILY_TITLES[family]}"
    return table(["method", "keep", *apart], rows, caption)


def pair_table(run: Run, rule: str) -> str:
    """Every two arms of one kept fraction, the first minus the second."""
    cells = run.comparison["rules"][rule]["apart"]["pairs"]
    styles = looks(run.comparison["arms"])
    largest = _largest(cells)
    rows = [
        [
            _arm(parse(cell["a"]), styles), _arm(parse(cell["b"]), styles), _keep(parse(cell["a"])),
            _difference(cell, rule, largest),
        ]
        for cell in cells
    ]  # fmt: skip
    caption = f"{rules.title(rule).capitalize()}: {rules.FAMILY_TITLES['pairs']}"
    return table(["method", "minus", "keep", "difference"], rows, caption, numeric_from=2)


def _largest(cells: Iterable[Mapping[str, Any]]) -> float:
    return max((abs(cell["mean"]) for cell in cells), default=0.0)


def cost_table(run: Run) -> str:
    """Entries, bytes and seconds."""
    styles = looks(run.comparison["arms"])
    rows = []
    for arm, one in costs(run).items():
        name = parse(arm)
        rows.append(
            [
                _arm(name, styles),
                _keep(name),
                Cell(f"{one.kept:,.0f}", one.kept),
                Cell(_mb(one.kv_bytes_kept), one.kv_bytes_kept),
                Cell(f"{one.kv_bytes_kept / one.kv_bytes_full:.1%}", one.kv_bytes_kept / one.kv_bytes_full),
                *(_seconds(x if arm != WHOLE else None) for x in (one.score_s, one.compact_s)),
            ]
        )
    columns = ["method", "keep", "kept entries", "KV bytes", "of all bytes", "scoring, s", "compaction, s"]
    return table(columns, rows, "What each arm holds and takes, means per context")


def area_table(run: Run, rule: str) -> str:
    """Mean height of every curve over the kept fraction."""
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
    return table(columns, rows, f"{rules.title(rule).capitalize()}: mean height of the curve over keep")


def _mean_column(run: Run) -> list[str]:
    return [ALL] if len(run.comparison["tasks"]) > 1 else []


def _best(cells: Estimates, rule: str) -> dict[float, list[str]]:
    """Kept fraction -> the arms with the best mean, the whole cache aside."""
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
    """The best arms of every kept fraction at which there is something to win."""
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


def _keep(name: ArmName) -> Cell:
    return Cell(f"{name.keep:g}", name.keep)


def _curve(curve: str, styles: Mapping[str, Look], hint: str = "") -> Cell:
    return Cell(curve, swatch=styles[curve].place, hint=hint)


def _score(cell: Mapping[str, Any] | None, rule: str, scale: tuple[float, float], best: bool) -> Cell:
    if cell is None:
        return EMPTY
    shade = rules.goodness(rule, cell["mean"], *scale)
    hint = f"{counted(cell['questions'], 'question')}, {counted(cell['contexts'], 'context')}"
    return Cell(f"{cell['mean']:.3f}", cell["mean"], _interval(cell, ".2f"), shade, strong=best, hint=hint)


def _interval(cell: Mapping[str, Any], form: str) -> str:
    return "-" if cell["low"] is None else f"{cell['low']:{form}} to {cell['high']:{form}}"


def _value(value: float, rule: str, scale: tuple[float, float]) -> Cell:
    return Cell(f"{value:.3f}", value, shade=rules.goodness(rule, value, *scale))


def _difference(cell: Mapping[str, Any] | None, rule: str, largest: float) -> Cell:
    if cell is None:
        return EMPTY
    mean = cell["mean"]
    tone = "good" if rules.better(rule, mean, 0.0) else "bad"
    note = f"{_minus(_interval(cell, '+.2f'))}, p-value {cell['p_holm']:.2g}"
    asked = counted(cell["questions"], "question")
    hint = f"p-value {cell['p_value']:.3g}, Holm-adjusted {cell['p_holm']:.3g}; {asked}"
    clear = rules.significant(cell)
    shade = abs(mean) / largest if clear else None  # what may be chance has no colour
    return Cell(_minus(f"{mean:+.3f}"), mean, note, shade, tone, clear, hint=hint)


def _minus(text: str) -> str:
    """With the sign that is as wide as a plus; "-" alone is no sign."""
    return text if text == "-" else text.replace("-", "\u2212")


def _seconds(value: float | None) -> Cell:
    return EMPTY if value is None else Cell(f"{value:.3f}", value)


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"

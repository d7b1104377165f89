"""Tables of a report: long ones as CSV for programs, the same numbers as Markdown for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wakesight.evaluation.scored import ALL
from wakesight.report import rules
from wakesight.report.arm_names import curve_label, parse
from wakesight.report.costs import costs
from wakesight.report.folder import Run

Value = str | int | float | None


@dataclass(frozen=True)
class Table:
    """name: of the CSV file. title: the heading in Markdown. None is an empty cell."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


def csv_tables(runs: Sequence[Run]) -> list[Table]:
    """One long table per subject, the rows of all runs below each other, with the run's name in front."""
    makers: list[Callable[[Run], Table]] = [scores, differences, areas, costs_table, skipped]
    return [_stacked([(run.name, maker(run)) for run in runs]) for maker in makers]


def scores(run: Run) -> Table:
    """Every mean with its interval, one row each."""
    numbers = ("mean", "low", "high", "questions", "contexts")
    rows = [
        (rule, task, arm, parse(arm).curve, parse(arm).keep, *(cell.get(name) for name in numbers))
        for rule in rules.ordered(run.comparison["rules"])
        for task, by_arm in run.comparison["rules"][rule]["means"].items()
        for arm, cell in by_arm.items()
    ]
    return Table("scores", "Scores", ("rule", "task", "arm", "method", "p", *numbers), tuple(rows))


def differences(run: Run) -> Table:
    """Every arm minus the whole cache, question by question."""
    numbers = ("mean", "low", "high", "p_value", "p_holm", "questions", "contexts")
    rows = [
        (rule, task, arm, parse(arm).curve, parse(arm).keep, *(cell.get(name) for name in numbers))
        for rule in rules.ordered(run.comparison["rules"])
        for task, by_arm in run.comparison["rules"][rule]["minus_whole"].items()
        for arm, cell in by_arm.items()
    ]
    columns = ("rule", "task", "arm", "method", "p", "difference", *numbers[1:])
    return Table("differences", "Paired differences to the whole cache", columns, tuple(rows))


def areas(run: Run) -> Table:
    """Mean height of every curve over its kept fractions."""
    rows = [
        (rule, task, curve_label(family), area)
        for rule in rules.ordered(run.comparison["rules"])
        for task, by_family in run.comparison["rules"][rule]["areas"].items()
        for family, area in by_family.items()
    ]
    return Table("areas", "Mean height of the curve over p", ("rule", "task", "method", "area"), tuple(rows))


def costs_table(run: Run) -> Table:
    """Entries, bytes and seconds per arm."""
    rows = [
        (arm, parse(arm).curve, parse(arm).keep, one.tokens, one.kept, one.kv_bytes_kept, one.kv_bytes_full,
         one.score_s, one.compact_s)
        for arm, one in costs(run).items()
    ]  # fmt: skip
    columns = ("arm", "method", "p", "tokens", "kept_entries", "kv_bytes_kept", "kv_bytes_full", "score_s", "compact_s")
    return Table("costs", "Entries, bytes and seconds", columns, tuple(rows))


def skipped(run: Run) -> Table:
    """Why rows have no grade."""
    return Table("skipped", "Skipped rows", ("reason", "rows"), tuple(run.comparison["skipped"].items()))


def wide_scores(run: Run, rule: str) -> Table:
    """Arms down, the mean over tasks and every task across; a cell is "mean [low, high]"."""
    means = run.comparison["rules"][rule]["means"]
    tasks = [ALL, *run.comparison["tasks"]]
    rows = [
        (parse(arm).label, *(_interval(means[task][arm]) if arm in means[task] else None for task in tasks))
        for arm in run.comparison["arms"]
    ]
    title = f"{rules.title(rule).capitalize()} by arm and task"
    return Table(f"wide-{rule}", title, ("arm", *tasks), tuple(rows))


def wide_differences(run: Run, rule: str) -> Table:
    """One row per arm and task, numbers rounded for reading."""
    apart = run.comparison["rules"][rule]["minus_whole"]
    rows = [
        (parse(arm).label, task, _interval(cell, "+.3f"), f"{cell['p_value']:.3g}", f"{cell['p_holm']:.3g}")
        for task, by_arm in apart.items()
        for arm, cell in by_arm.items()
    ]
    title = f"Paired differences to the whole cache, {rules.title(rule)}"
    return Table(f"apart-{rule}", title, ("arm", "task", "difference [95 %]", "p", "p (Holm)"), tuple(rows))


def markdown(runs: Sequence[Run]) -> str:
    """tables.md: every run with what it is, its tables, sources and skipped rows."""
    return "\n".join(block for run in runs for block in _markdown_run(run))


def _markdown_run(run: Run) -> list[str]:
    about = run.comparison
    blocks = [
        f"# {_plain(run.name)}\n",
        f"{about['scored_questions']} of {about['questions']} questions scored, {about['contexts']} contexts. "
        "Intervals are 95 %, from a bootstrap over contexts. p is the kept fraction.\n",
    ]
    for rule in rules.ordered(about["rules"]):
        blocks += [to_markdown(wide_scores(run, rule)), to_markdown(wide_differences(run, rule))]
    if any(one["areas"] for one in about["rules"].values()):
        blocks.append(to_markdown(areas(run)))
    blocks.append(to_markdown(costs_table(run)))
    if about["skipped"]:
        blocks.append(to_markdown(skipped(run)))
    blocks.append("## Sources\n\n" + "\n".join(f"- {_plain(source)}" for source in about["sources"]) + "\n")
    return blocks


def to_markdown(table: Table) -> str:
    """A heading and a pipe table; numbers to the right."""
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.columns)
    marks = ["--:" if column and all(isinstance(x, int | float) for x in column) else "---" for column in columns]
    lines = [_pipes(table.columns), _pipes(marks), *(_pipes(row) for row in table.rows)]
    return f"## {table.title}\n\n" + "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    """RFC 4180 with plain newlines; numbers in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return file.getvalue()


def _stacked(parts: Sequence[tuple[str, Table]]) -> Table:
    first = parts[0][1]
    rows = tuple((name, *row) for name, table in parts for row in table.rows)
    return Table(first.name, first.title, ("run", *first.columns), rows)


def _interval(cell: dict[str, Any], form: str = ".3f") -> str:
    mean = f"{cell['mean']:{form}}"
    return f"{mean} [{cell['low']:{form}}, {cell['high']:{form}}]" if "low" in cell else mean


def _pipes(cells: Sequence[Value]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(value: Value) -> str:
    """A cell that stays one cell and stays text, whatever a document or a path put into it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    text = " ".join(str(value).split()).replace("<", "&lt;")
    for special in ("\\", "`", "*", "|", "]("):
        text = text.replace(special, "\\" + special)
    return text

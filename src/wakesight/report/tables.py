"""Tables of a report: long ones as CSV for programs, the same numbers as Markdown for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wakesight.evaluation.scored import ALL, counted
from wakesight.report import rules
from wakesight.report.arm_names import curve_label, parse
from wakesight.report.costs import costs
from wakesight.report.folder import DROPPED, Run

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
    return Table("scores", "Scores", ("rule", "task", "arm", "method", "keep", *numbers), tuple(rows))


def differences(run: Run) -> Table:
    """Arm minus arm, question by question, in the families in which p-values are adjusted."""
    numbers = ("mean", "low", "high", "p_value", "p_holm", "questions", "contexts")
    rows = [
        (rule, family, cell["task"], cell["a"], cell["b"], name.curve, name.keep, *(cell[x] for x in numbers))
        for rule in rules.ordered(run.comparison["rules"])
        for family, cells in run.comparison["rules"][rule]["apart"].items()
        for cell, name in ((cell, parse(cell["a"])) for cell in cells)
    ]
    columns = ("rule", "family", "task", "arm", "against", "method", "keep", "difference", *numbers[1:])
    return Table("differences", "Paired differences", columns, tuple(rows))


def areas(run: Run) -> Table:
    """Mean height of every curve over its kept fractions."""
    rows = [
        (rule, task, curve_label(family), area)
        for rule in rules.ordered(run.comparison["rules"])
        for task, by_family in run.comparison["rules"][rule]["areas"].items()
        for family, area in by_family.items()
    ]
    return Table("areas", "Mean height of the curve over keep", ("rule", "task", "method", "area"), tuple(rows))


def costs_table(run: Run) -> Table:
    """Entries, bytes and seconds per arm."""
    rows = [
        (arm, parse(arm).curve, parse(arm).keep, one.tokens, one.kept, one.kv_bytes_kept, one.kv_bytes_full,
         one.score_s, one.compact_s)
        for arm, one in costs(run).items()
    ]  # fmt: skip
    columns = (
        "arm", "method", "keep", "tokens", "kept_entries", "kv_bytes_kept", "kv_bytes_full", "score_s", "compact_s",
    )  # fmt: skip
    return Table("costs", "Entries, bytes and seconds", columns, tuple(rows))


def skipped(run: Run) -> Table:
    """Why rows have no grade."""
    return Table("skipped", "Skipped rows", ("reason", "rows"), tuple(run.comparison["skipped"].items()))


def wide_scores(run: Run, rule: str) -> Table:
    """Arms down, the mean over tasks and every task across; a cell is "mean [low, high]"."""
    means = run.comparison["rules"][rule]["means"]
    tasks = [*([ALL] if len(run.comparison["tasks"]) > 1 else []), *run.comparison["tasks"]]
    rows = [
        (parse(arm).label, *(_interval(means[task][arm]) if arm in means[task] else None for task in tasks))
        for arm in run.comparison["arms"]
    ]
    title = f"{rules.title(rule).capitalize()} by arm and task"
    return Table(f"wide-{rule}", title, ("arm", *tasks), tuple(rows))


def wide_differences(run: Run, rule: str, family: str) -> Table:
    """One row per comparison, numbers rounded for reading."""
    rows = [
        (
            parse(cell["a"]).label, parse(cell["b"]).label, cell["task"], _interval(cell, "+.3f"),
            f"{cell['p_value']:.3g}", f"{cell['p_holm']:.3g}",
        )
        for cell in run.comparison["rules"][rule]["apart"][family]
    ]  # fmt: skip
    title = f"{rules.FAMILY_TITLES[family]}, {rules.title(rule)}"
    columns = ("arm", "minus", "task", "difference [95 %]", "p-value", "p-value (Holm)")
    return Table(f"apart-{family}-{rule}", title, columns, tuple(rows))


def markdown(runs: Sequence[Run]) -> str:
    """tables.md: every run with what it is, its tables, sources and skipped rows."""
    return "\n".join(block for run in runs for block in _markdown_run(run))


def _markdown_run(run: Run) -> list[str]:
    about = run.comparison
    blocks = [
        f"# {_plain(run.name)}\n",
        f"{run.progress}, {counted(about['contexts'], 'context')}. The number in an arm's name is keep, the kept "
        f"fraction. {rules.INTERVALS} {rules.P_VALUES}\n",
    ]
    if run.dropped:
        blocks.append(f"{DROPPED}\n\n" + "\n".join(f"- {_plain(one)}" for one in run.dropped) + "\n")
    for rule in rules.ordered(about["rules"]):
        blocks.append(to_markdown(wide_scores(run, rule)))
        tables = (wide_differences(run, rule, family) for family in rules.FAMILY_TITLES)
        blocks += [to_markdown(table) for table in tables if table.rows]
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
    return f"{mean} [-]" if cell["low"] is None else f"{mean} [{cell['low']:{form}}, {cell['high']:{form}}]"


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

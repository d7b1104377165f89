"""The parts of a page that stand still: one article per run, with its tables, figures and what was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from wakesight.evaluation.config import arguments_of
from wakesight.evaluation.scored import counted
from wakesight.report import rules, verdict
from wakesight.report.arm_names import curve_label
from wakesight.report.figures import WIDTH, Panel, panel_svg, run_panels
from wakesight.report.folder import DROPPED, Run
from wakesight.report.inline_svg import inline
from wakesight.report.markup import definitions
from wakesight.report.palette import looks


def article(run: Run, place: int) -> str:
    """Everything about one run but its items and what was run."""
    panels: dict[str, list[Panel]] = {}
    for panel in run_panels(run):
        panels.setdefault(panel.subject, []).append(panel)
    about = run.comparison
    blocks = [_header(run)]
    titles = rules.distinct(about["rules"])
    if titles:
        blocks.append(_rule_picker(titles, place))
    for number, rule in enumerate(titles):
        parts = "".join(_rule_sections(run, rule, panels, f"r{place}-{number}"))
        blocks.append(f'<div class="rule" data-rule="{number}">{parts}</div>')
    if not titles:
        blocks.append(
            '<section><h2>Scores</h2><p class="quiet">No question was scored; the reasons are below.</p></section>'
        )
    blocks.append(_costs(run, panels.get("costs", []), f"r{place}"))
    return f'<article class="run" data-run="{place}">{"".join(blocks)}</article>'


def _header(run: Run) -> str:
    about, arguments = run.comparison, run.arguments
    what = [f"{arguments[name]}" for name in ("suite", "model") if arguments.get(name)]
    facts = [
        counted(about["contexts"], "context"),
        run.progress,
        f"{len(about['arms'])} arms",
        *(f"{name} {arguments[name]}" for name in ("length", "seed") if arguments.get(name) is not None),
    ]
    chips = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    left_out = f'<p class="quiet">{DROPPED}</p>{_list(run.dropped)}' if run.dropped else ""
    return f'<header><h1>{escape(" · ".join(what) or run.name)}</h1><ul class="chips">{chips}</ul>{left_out}</header>'


def _rule_picker(titles: Mapping[str, str], place: int) -> str:
    radios = "".join(
        f'<label><input type="radio" name="rule-{place}" value="{number}"{" checked" if not number else ""}>'
        f"<span>{escape(title)}</span></label>"
        for number, title in enumerate(titles.values())
    )
    return f'<fieldset class="rules"><legend>Graded by</legend>{radios}</fieldset>'


def _rule_sections(run: Run, rule: str, panels: dict[str, list[Panel]], name: str) -> Iterator[str]:
    better = "Lower is better." if rule in rules.LOWER_IS_BETTER else "Higher is better."
    yield (
        f'<section id="{name}-scores"><h2>Scores</h2>{verdict.best_cards(run, rule)}'
        '<p class="quiet">Cards show the best of all methods at each keep, the kept fraction, so luck favours them; '
        f"the table has every arm. {rules.INTERVALS} Bold is the best of its keep. {better}</p>"
        f"{verdict.score_table(run, rule)}</section>"
    )
    yield _figures(
        f"{name}-curves", "Scores over keep", panels.get(f"score-{rule}", []),
        "Dashed: the whole cache. Bands are 95% intervals. Choose a method in the legend to bring it forward.",
        legend=_legend(run),
    )  # fmt: skip
    yield from _differences(run, rule, panels.get(f"differences-{rule}", []), name)
    if f"depth-{rule}" in panels:
        yield _figures(
            f"{name}-depth", "Needle depth and context length", panels[f"depth-{rule}"],
            "Mean grade of one needle by where it stands and how long the context is; bright is good.",
        )  # fmt: skip
    if any(run.comparison["rules"][rule]["areas"].values()):
        yield (
            f'<section id="{name}-areas"><h2>Mean height of the curves</h2><p class="quiet">Area under a method\'s '
            f"curve over the kept fractions it was run at.</p>{verdict.area_table(run, rule)}</section>"
        )


def _differences(run: Run, rule: str, panels: Sequence[Panel], name: str) -> Iterator[str]:
    apart = run.comparison["rules"][rule]["apart"]
    if apart["whole"]:
        yield (
            f'<section id="{name}-differences"><h2>{rules.FAMILY_TITLES["whole"]}</h2>'
            f'<p class="quiet">Question by question, arm minus whole cache. {rules.P_VALUES} Bold and filled: below '
            f"0.05.</p>{verdict.difference_table(run, rule, 'whole')}{_panels(panels, f'{name}-d')}</section>"
        )
    blocks = []
    if apart["first"]:
        head = f"{rules.FAMILY_TITLES['first']}, {curve_label(run.comparison['first'])}"
        blocks.append(f"<h3>{escape(head)}</h3>{verdict.difference_table(run, rule, 'first')}")
    if apart["pairs"]:
        over = ", mean over tasks" if len(run.comparison["tasks"]) > 1 else ""
        blocks.append(f"<h3>{rules.FAMILY_TITLES['pairs']}{over}</h3>{verdict.pair_table(run, rule)}")
    if blocks:
        yield (
            f'<section id="{name}-methods"><h2>Methods against each other</h2><p class="quiet">Question by question, '
            f"at the same keep. {rules.P_VALUES} Bold and filled: below 0.05.</p>{''.join(blocks)}</section>"
        )


def _figures(name: str, title: str, panels: Sequence[Panel], text: str, *, legend: str = "") -> str:
    return (
        f'<section id="{name}"><h2>{escape(title)}</h2><p class="quiet">{escape(text)}</p>{legend}'
        f"{_panels(panels, name)}</section>"
    )


def _panels(panels: Sequence[Panel], name: str) -> str:
    drawn = (inline(panel_svg(panel), f"{name}-{number}", panel.about) for number, panel in enumerate(panels))
    small = " small" if panels and panels[0].width < WIDTH else ""
    return f'<div class="panels{small}">' + "".join(f"<figure>{svg}</figure>" for svg in drawn) + "</div>"


def _legend(run: Run) -> str:
    """A button per method, with the line it has in the figures."""
    buttons = []
    for curve, look in looks(run.comparison["arms"]).items():
        dash = " ".join(f"{x * 1.8:g}" for x in look.dashes)
        buttons.append(
            f'<button type="button" aria-pressed="false" data-curve="{look.index}"><svg viewBox="0 0 30 10" '
            f'aria-hidden="true"><line x1="1" y1="5" x2="29" y2="5" stroke="var(--m{look.place})" stroke-width="2.4" '
            f'stroke-dasharray="{dash}"/></svg>{escape(curve)}</button>'
        )
    return f'<div class="legend" role="group" aria-label="Methods">{"".join(buttons)}</div>'


def _costs(run: Run, panels: Sequence[Panel], name: str) -> str:
    return (
        f'<section id="{name}-costs"><h2>Bytes and seconds</h2><p class="quiet">{_prefix(run)}A scorer runs once '
        "per context for all arms of a method. These seconds are from inside the evaluation; for speed comparisons "
        f"use wakesight bench, which alternates its arms.</p>{verdict.cost_table(run)}"
        f"{_panels(panels, f'{name}-c')}</section>"
    )


def _prefix(run: Run) -> str:
    """Why the share of all bytes lies above keep, where it does."""
    found = [row["prefix"] for row in run.rows if row.get("prefix")]
    if not found:
        return ""
    return (
        f"keep is of the entries behind the protected prefix ({sum(found) / len(found):,.0f} tokens here), which every "
        "arm holds besides: in short contexts the share of all bytes is well above keep. "
    )


def about(run: Run, place: int) -> str:
    """What was asked for, with which versions, from which sources, and what was left out."""
    given, defaults = _arguments(run.config)
    rest = [
        (name, _words(value))
        for key, group in run.config.items()
        if key not in ("arguments", "given", "defaults")
        for name, value in (group.items() if isinstance(group, dict) else [(key, group)])
    ]
    blocks = [f"<h3>Arguments{' given' if defaults else ''}</h3>{definitions(given)}"]
    if defaults:
        blocks.append(f"<h3>Defaults</h3>{definitions(defaults)}")
    if rest:
        blocks.append(f"<h3>Versions and machine</h3>{definitions(rest)}")
    blocks.append(f"<h3>Sources of the contexts</h3>{_list(run.comparison['sources'])}")
    blocks.append("<h3>Skipped rows</h3>" + _skipped(run.comparison["skipped"]))
    return (
        f'<article class="run" data-run="{place}"><section class="about" id="r{place}-about"><h2>About this run</h2>'
        f"{''.join(blocks)}</section></article>"
    )


def _arguments(config: dict[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Arguments that were given, and the others, where the record tells them apart."""
    given, defaults = config.get("given"), config.get("defaults")
    if given is None or defaults is None:
        given, defaults = arguments_of(config), {}
    return [(k, _words(v)) for k, v in given.items()], [(k, _words(v)) for k, v in defaults.items()]


def _words(value: Any) -> str:
    if value in (None, "", [], {}):
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _skipped(reasons: dict[str, int]) -> str:
    return _list([f"{count:,} rows: {reason}" for reason, count in reasons.items()]) if reasons else "<p>None.</p>"


def _list(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"

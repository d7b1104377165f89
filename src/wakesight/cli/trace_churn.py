"""wakesight trace churn: how much the heads of recorded runs change their minds."""

from __future__ import annotations

import click

from wakesight.cli.common import shared_options


@click.command("churn", short_help="How much heads change their minds in recorded runs.")
@click.argument("source", metavar="DIR|sample:NAME")
@click.option("--out", default=None, help="Folder for churn.json, churn.md, heads.csv and the figures (PNG, SVG).")
@click.option("--active", type=float, default=0.1, show_default=True, help="Needle share above which a head is active.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the intervals, which draw runs.")
@shared_options
def command(source: str, out: str | None, active: float, seed: int, as_json: bool) -> None:
    """Overlap of active heads between steps, stability and drift of page sets, per model and regime.

    Every number has an interval over runs; the paper's values stand in columns of their own. heads.csv has a row
    for every head.

    \b
    wakesight trace churn sample:niah
    wakesight trace churn traces/smollm2 --out churn/smollm2
    """
    from wakesight.cli.study_folder import check_numbers, check_target, runs_of, tell
    from wakesight.traces.churn import ChurnRule, study
    from wakesight.traces.study_report import churn_markdown, heads_csv

    check_numbers(active=active, seed=seed)
    check_target(out)
    found = study(runs_of(source), ChurnRule(active=active, seed=seed))
    files = {}
    if out is not None:
        from wakesight.report.trace_figures import churn_figures

        files = {"heads.csv": heads_csv(found).encode(), **dict(churn_figures(found))}
    tell("churn", found, churn_markdown(found), out, files, as_json)

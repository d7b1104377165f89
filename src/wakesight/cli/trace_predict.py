"""wakesight trace predict: can the wake-ups of heads in recorded runs be seen coming?"""

from __future__ import annotations

import click

from wakesight.cli.common import shared_options


@click.command("predict", short_help="Can wake-ups of heads be seen coming? Alarms, markers, bursts.")
@click.argument("source", metavar="DIR|sample:NAME")
@click.option("--out", default=None, help="Folder for predict.json, predict.md and the figures (PNG, SVG).")
@click.option("--lead", type=int, default=32, show_default=True, help="Steps within which an alarm must come true.")
@click.option("--z", type=float, default=2.0, show_default=True, help="z-score above which a signal alarms.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the intervals and of the shuffle null.")
@shared_options
def command(source: str, out: str | None, lead: int, z: float, seed: int, as_json: bool) -> None:
    """Four signals with causal z-scores and their ensemble, against wake-ups, per model and regime.

    Beside them: thresholds chosen in hindsight, a held-out test of token markers, and whether heads wake together. The
    paper's values stand in columns of their own.

    \b
    wakesight trace predict sample:niah
    wakesight trace predict traces/smollm2 --out predict/smollm2
    """
    from wakesight.cli.study_folder import check_numbers, check_target, runs_of, tell
    from wakesight.errors import RequestError
    from wakesight.traces.burstiness import BurstRule
    from wakesight.traces.predict import AlarmRule, PredictRule, study
    from wakesight.traces.study_report import predict_markdown

    check_numbers(z=z, seed=seed)
    if lead < 1:
        raise RequestError(f"--lead {lead} must be at least 1 step; 32 is the default")
    check_target(out)
    rule = PredictRule(alarm=AlarmRule(lead=lead, z=z), bursts=BurstRule(seed=seed), seed=seed)
    found = study(runs_of(source), rule)
    files = {}
    if out is not None:
        from wakesight.report.trace_figures import predict_figures

        files = dict(predict_figures(found))
    tell("predict", found, predict_markdown(found), out, files, as_json)

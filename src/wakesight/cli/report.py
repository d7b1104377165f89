"""wakesight report: tables, figures and a page from run folders."""

from __future__ import annotations

from pathlib import Path

import click

from wakesight.cli.common import print_json, shared_options
from wakesight.errors import RequestError


@click.command("report", short_help="Tables, figures and a page from evaluation runs.")
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@click.option("--out", default=None, help="Folder for the report. Default: DIR/report; needed for several DIRs.")
@click.option(
    "--contexts", type=int, default=300, show_default=True, help="Most contexts to embed in the page for a closer look."
)
@shared_options
def command(folders: tuple[str, ...], out: str | None, contexts: int, as_json: bool) -> None:
    """Write report.html, tables.md, CSV tables and figures (PNG, SVG) from run folders of wakesight eval.

    The page holds everything and loads nothing. Of several runs it shows one at a time. Summaries are worked out
    from records.jsonl anew; questions that a running evaluation has not finished are left out, and the report says so.

    \b
    wakesight report runs/niah
    wakesight report runs/niah runs/ruler --out runs/report
    """
    if out is None and len(folders) > 1:
        raise RequestError("several run folders make one report; say where with --out")
    if contexts < 0:
        raise RequestError(f"--contexts {contexts} must be at least 0")
    from wakesight.evaluation.scored import counted
    from wakesight.report.folder import open_runs
    from wakesight.report.writing import PAGE, check_target, write_report

    runs = open_runs([Path(folder) for folder in folders])
    target = Path(out) if out is not None else Path(folders[0]) / "report"
    check_target(target)
    files = write_report(runs, target, contexts)
    for run in runs:
        if run.unfinished or run.dropped:
            lost = counted(len(run.dropped), "question")
            left_out = f"; {lost} left out for missing rows" if run.dropped else ""
            click.echo(f"{run.name}: {run.progress}{left_out}", err=True)
    if as_json:
        print_json({"report": str(target / PAGE), "folder": str(target), "files": files})
    else:
        click.echo(str(target / PAGE))
        click.echo(
            f"{len(files)} files in {target}; type wakesight view {folders[0] if out is None else target}", err=True
        )

"""wakesight view: a report in the browser, served on loopback."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path

import click

from wakesight.cli.common import print_json, shared_options


@click.command("view", short_help="Show a report in the browser.")
@click.argument("folder", metavar="DIR")
@click.option("--port", type=int, default=0, show_default=True, help="Port on 127.0.0.1; 0 takes a free one.")
@click.option("--no-open", is_flag=True, help="Only serve, do not open a browser.")
@shared_options
def command(folder: str, port: int, no_open: bool, as_json: bool) -> None:
    """Serve the report of DIR (a run folder, or a report's own folder) on 127.0.0.1 until Ctrl-C."""
    from wakesight.report.serving import address, outdated, report_folder, server

    report = report_folder(Path(folder))
    if outdated(report):
        run = report.resolve().parent
        click.echo(f"this report is older than the run's last rows; wakesight report {run} makes it anew", err=True)
    with server(report, port) as made:
        url = address(made)
        if as_json:
            print_json({"url": url})
        else:
            click.echo(url)
            click.echo("Ctrl-C ends it", err=True)
        if not no_open:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            made.serve_forever()

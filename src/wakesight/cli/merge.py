"""wakesight merge: join the shards of one run."""

from __future__ import annotations

from pathlib import Path

import click

from wakesight.cli.common import Once, print_json, shared_options
from wakesight.cli.eval import show, tell_skipped


@click.command("merge", cls=Once, short_help="Join the shards of one evaluation.")
@click.argument("folders", nargs=-1, required=True)
@click.option("--out", required=True, help="New folder for the whole run.")
@shared_options
def command(folders: tuple[str, ...], out: str, as_json: bool) -> None:
    """Join run folders made with --shard 0/n ... n-1/n; the result equals the run made in one piece."""
    from wakesight.evaluation.folders import merge

    summary = merge([Path(folder) for folder in folders], Path(out))
    if as_json:
        print_json(summary)
    else:
        click.echo(show(summary))
    tell_skipped(summary)

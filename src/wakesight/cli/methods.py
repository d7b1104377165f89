"""wakesight methods: scorers and allocations, their settings and sources."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from wakesight.cli.common import print_json, shared_options


@click.command("methods")
@shared_options
def command(as_json: bool) -> None:
    """List scorers and allocations. Settings go behind the name: --scorer snapkv:window=16,kernel=5."""
    from wakesight.budget.table import ALLOCATIONS, allocation
    from wakesight.scores.table import SCORERS, scorer

    scorers = [_describe(name, scorer(name)) for name in SCORERS]
    allocations = [_describe(name, allocation(name)) for name in ALLOCATIONS]
    if as_json:
        print_json({"scorers": scorers, "allocations": allocations})
        return
    wide = max(len(row["name"]) for row in scorers + allocations)
    for title, rows in (
        ("Scorers (--scorer)", scorers),
        ("Allocations (--allocation, or counts per layer: 40,30,20)", allocations),
    ):
        click.echo(f"{title}:")
        for row in rows:
            settings = ", ".join(f"{k}={v}" for k, v in row["settings"].items())
            click.echo(f"  {row['name']:<{wide}} {row['about']}")
            if settings:
                click.echo(f"  {'':<{wide}} settings: {settings}")
        click.echo()


def _describe(name: str, method: Any) -> dict[str, Any]:
    about = " ".join((type(method).__doc__ or "").strip().split("\n\n")[0].split())
    settings = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    row = {"name": name, "about": about, "settings": settings}
    if hasattr(method, "reads"):
        row["reads"] = list(method.reads)
    return row

"""wakesight models: what can be loaded."""

from __future__ import annotations

import click

from wakesight.cli.common import print_json, shared_options


@click.command("models")
@shared_options
def command(as_json: bool) -> None:
    """List the bundled models and the architecture families we support."""
    from wakesight.models.families import FAMILIES
    from wakesight.models.load import BUNDLED

    bundled = [
        {"name": b.name, "installed": b.path() is not None, "install": b.install, "about": b.about}
        for b in BUNDLED.values()
    ]
    families = [{"name": f.name, "model_types": list(f.model_types), "about": f.about} for f in FAMILIES]
    if as_json:
        print_json({"bundled": bundled, "families": families})
        return
    click.echo("Bundled models (use the name as --model):")
    for row in bundled:
        state = "installed" if row["installed"] else f"not installed, type: {row['install']}"
        click.echo(f"  {row['name']:<12} {row['about']} [{state}]")
    click.echo("\nFamilies (any model folder, .gguf file or hub id of these types):")
    for family in families:
        click.echo(f"  {family['name']:<12} {family['about']}")

"""wakesight models: what can be loaded."""

from __future__ import annotations

import click

from wakesight.cli.common import print_json, shared_options


@click.command("models")
@shared_options
def command(as_json: bool) -> None:
    """List the bundled models and the architecture families we support."""
    from wakesight.models.families import FAMILIES, missing_model_types
    from wakesight.models.load import BUNDLED

    bundled = [
        {"name": b.name, "installed": b.path() is not None, "install": b.install, "about": b.about}
        for b in BUNDLED.values()
    ]
    missing = missing_model_types()
    families = [
        {
            "name": f.name,
            "model_types": list(f.model_types),
            "missing_model_types": sorted(missing & set(f.model_types)),
            "about": f.about,
            "only_whole": f.only_whole,
        }
        for f in FAMILIES
    ]
    if as_json:
        print_json({"bundled": bundled, "families": families})
        return
    click.echo("Bundled models (use the name as --model):")
    for row in bundled:
        state = "installed" if row["installed"] else f"not installed, type: {row['install']}"
        click.echo(f"  {row['name']:<12} {row['about']} [{state}]")
    click.echo("\nFamilies (any model folder, .gguf file or hub id of these types):")
    wide = max(len(f.name) for f in FAMILIES)
    for family in FAMILIES:
        click.echo(f"  {family.name:<{wide}} {family.about}")
        if family.only_whole:
            click.echo(f"  {'':<{wide}} --keep 1 only: {family.only_whole}")
        if lacking := sorted(missing & set(family.model_types)):
            click.echo(f"  {'':<{wide}} the installed transformers does not know {', '.join(lacking)}")

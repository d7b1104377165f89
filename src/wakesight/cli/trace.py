"""wakesight trace: a group; each command is a file of its own, imported when called."""

from __future__ import annotations

import click

from wakesight.cli.lazy import LazyGroup

COMMANDS = {
    "record": "Record what every head attends to while a model answers.",
    "show": "List the traces of a recording, and what is damaged in it.",
    "import": "Take over a log from a .npz file.",
    "churn": "Measure how page sets and retrieval heads change.",
    "predict": "Study whether wake-ups can be foreseen.",
}


@click.command(
    "trace", cls=LazyGroup, places=(COMMANDS, "wakesight.cli.trace_"), invoke_without_command=True,
    short_help="Record and study attention logs.",
)  # fmt: skip
@click.pass_context
def command(ctx: click.Context) -> None:
    """Attention logs: which positions every head attended to, decode step by decode step.

    \b
    wakesight trace record --model smollm2 --regime niah --out traces/niah
    wakesight trace show traces/niah
    wakesight trace churn traces/niah
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())

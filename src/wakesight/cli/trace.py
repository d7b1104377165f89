"""wakesight trace: a group; each command is a file of its own, imported when called."""

from __future__ import annotations

import importlib

import click

from wakesight.errors import RequestError
from wakesight.registry import did_you_mean

COMMANDS = {
    "record": "Record what every head attends to while a model answers.",
    "show": "List the traces of a recording, and what is damaged in it.",
    "import": "Take over a log from a .npz file.",
    "churn": "Measure how page sets and retrieval heads change.",
    "predict": "Study whether wake-ups can be foreseen.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"wakesight.cli.trace_{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise RequestError(
                f"there is no command trace {args[0]!r}{did_you_mean(args[0], COMMANDS)}; type wakesight trace --help"
            )
        return super().resolve_command(ctx, args)


@click.command("trace", cls=_Lazy, invoke_without_command=True, short_help="Record and study attention logs.")
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

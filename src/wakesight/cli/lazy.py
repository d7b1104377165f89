"""A group of commands that are imported when called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from wakesight.errors import RequestError
from wakesight.registry import did_you_mean


class LazyGroup(click.Group):
    """places: what each command is for, by name, and what its module's name begins with."""

    def __init__(self, *args: Any, places: tuple[Mapping[str, str], str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.about, self.module = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.about)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.about:
            return None
        command: click.Command = importlib.import_module(f"{self.module}{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.about.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.about and not args[0].startswith("-"):
            group = "" if ctx.parent is None else f"{ctx.info_name} "
            hint = did_you_mean(args[0], self.about)
            raise RequestError(
                f"there is no command {group}{args[0]!r}{hint}; type wakesight {group}--help for the list"
            )
        return super().resolve_command(ctx, args)

"""What several commands share: options, reading files, units, progress, peak memory."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from wakesight.errors import RequestError
from wakesight.registry import read_names as read_names  # shared with the evaluation

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--json and --debug, which every command has."""
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(command)
    return click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of a failure.")(command)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--device and --dtype."""
    command = click.option("--device", default=None, help="cpu (default) or cuda.")(command)
    return click.option("--dtype", default=None, help="float32 (default on CPU), bfloat16 or float16.")(command)


def artifact_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--artifact, for commands whose scorers and allocations may need one."""
    return click.option(
        "--artifact", default=None,
        help="Folder of wakesight fit or calibrate for this model. Default: the one a session was saved with, the "
        "bundled one, or the folder wakesight beside the weights.",
    )(command)  # fmt: skip


def once(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Callback of an option declared `multiple`, so that a second value is refused and does not win in silence."""
    _check_once(option, len(values))
    return values[0] if values else None


class Once(click.Command):
    """A command all of whose options are like that, but for those that are declared `multiple`, and for switches."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, named = self.make_parser(ctx).parse_args(args=list(args))
        for option in named:
            if not getattr(option, "multiple", False) and not getattr(option, "is_flag", False):
                _check_once(option, named.count(option))
        return super().parse_args(ctx, args)


def _check_once(option: click.Parameter, count: int) -> None:
    if count > 1:
        raise RequestError(f"{option.opts[0]} is given {count} times; give it once")


def checked_text(_: click.Context, option: click.Parameter, value: Any) -> Any:
    """Callback of an option that a tokenizer will read: what the shell gave must be UTF-8."""
    for text in (value,) if isinstance(value, str) else value or ():
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError(f"{option.opts[0]} is not UTF-8 text; type it in a UTF-8 terminal")
    return value


def read_shard(text: str | None) -> tuple[int, int]:
    """ "0/2" -> (0, 2); None, the whole, is (0, 1). Raises RequestError for anything else."""
    if text is None:
        return 0, 1
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise RequestError(f"--shard {text} is no shard; write 0/2 and 1/2 for the halves of a run")
    return int(index), int(count)


def read_text(source: str, what: str) -> str:
    """A UTF-8 file, or stdin for "-", exactly as it is. Raises RequestError for a missing or binary file."""
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except FileNotFoundError:
        raise RequestError(
            f"the {what} file {source} does not exist; check the path, or use - for standard input"
        ) from None
    except IsADirectoryError:
        raise RequestError(f"the {what} {source} is a folder; give a text file") from None
    except OSError as error:
        raise RequestError(f"the {what} file {source} cannot be read: {error.strerror}") from None
    name = "standard input" if source == "-" else source
    if b"\0" in raw:
        raise RequestError(f"the {what} {name} is binary, not text; convert it to plain UTF-8 text first")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the {what} {name} is not UTF-8 text (byte {error.start}); convert it, for example with iconv -t utf-8"
        ) from None


def read_bytes_size(text: str) -> int:
    """ "2GiB", "500MB" or a plain number -> bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise RequestError(f"{text!r} is no size; write bytes or a unit, for example 500MB or 2GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def show_bytes(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, ensure_ascii=False))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr for (done, total) reports; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def peak_memory_bytes() -> int:
    """Most memory this process has held: device memory on CUDA, else resident set size."""
    import torch

    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

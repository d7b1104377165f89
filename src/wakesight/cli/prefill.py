"""wakesight prefill: read a document once and save the session."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from wakesight.cli.ask import kept_summary
from wakesight.cli.common import (
    artifact_option,
    model_options,
    once,
    peak_memory_bytes,
    print_json,
    read_names,
    shared_options,
    show_bytes,
)
from wakesight.cli.policy import make_policy, policy_options
from wakesight.cli.sessions import Reading, read_document, reading_options
from wakesight.errors import RequestError


@click.command("prefill", short_help="Read a document once and save the session.")
@click.option("--model", required=True, help="Bundled name (smollm2), model folder, .gguf file or hub id.")
@click.option(
    "--context",
    required=True,
    multiple=True,
    callback=once,
    help="Document: a UTF-8 text file, or - for standard input.",
)
@click.option("--save", required=True, help="File to write, for example report.ws; an older session is replaced.")
@click.option(
    "--record",
    multiple=True,
    help="Scorers or signals to record for later, comma-separated, for example h2o; may be given several times.",
)
@policy_options
@reading_options
@artifact_option
@model_options
@shared_options
def command(
    model: str, context: str, save: str, record: tuple[str, ...], instruction: str | None, no_chat: bool,
    chunk: int | None, artifact: str | None, device: str | None, dtype: str | None, as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Read a document once and save its session, whole, or compacted if a size is given.

    \b
    wakesight prefill --model smollm2 --context report.txt --save report.ws --keep 0.3
    wakesight ask --session report.ws --question "Who signed it?"
    """
    policy = make_policy(default_keep=None, model=model, artifact=artifact, **choices)
    _check_target(Path(save), context)
    reading = Reading(model, context, instruction, no_chat, chunk, device, dtype, artifact)
    with read_document(reading, policy, tuple(name for names in record for name in read_names(names))) as session:
        session.save(save)
        size = Path(save).stat().st_size
        if as_json:
            stats = asdict(session.stats)
            del stats["physical_lengths"]
            plan = None if session.policy is None else session.policy.to_json()
            about = {"policy": plan, "model": session.engine.name, "peak_memory_bytes": peak_memory_bytes()}
            print_json({"saved": save, "file_bytes": size, **stats, **about})
        else:
            click.echo(f"{save}: {show_bytes(size)}; {kept_summary(session)}", err=True)


def _check_target(path: Path, context: str) -> None:
    """Refuse what cannot be written before minutes are spent on reading; saving itself checks the rest."""
    folder = path.absolute().parent
    if path.is_dir():
        raise RequestError(f"--save {path} is a folder; give a file name, for example {path / 'session.ws'}")
    if not folder.is_dir():
        raise RequestError(f"--save {path}: there is no folder {folder}; make it first, or save elsewhere")
    if not os.access(folder, os.W_OK):
        raise RequestError(f"--save {path}: writing in {folder} is not allowed; save elsewhere")
    if os.path.realpath(path) == os.path.realpath(context):
        raise RequestError(f"--save {path} is the document of --context; give another name")
    from wakesight.cache.files import check_replaceable

    check_replaceable(path)

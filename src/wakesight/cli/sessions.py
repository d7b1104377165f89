"""Where a command gets its session: a document that is read now, or a saved file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from wakesight.cli.common import checked_text, progress, read_text
from wakesight.cli.policy import default_scorer
from wakesight.errors import RequestError
from wakesight.policy import Policy

if TYPE_CHECKING:
    from wakesight.engines.saved import Made
    from wakesight.engines.session import Session


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a document is read."""
    command = click.option("--chunk", type=int, default=None, help="Prefill tokens per step, a multiple of 64. [512]")(
        command
    )
    command = click.option("--no-chat", is_flag=True, help="Plain text, without the model's chat template.")(command)
    return click.option(
        "--instruction", default=None, callback=checked_text,
        help="Text before the document. Of template and instruction, the first 256 tokens are never evicted.",
    )(command)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """What the command line says about the model and the document; None and False: not given."""

    model: str | None
    context: str | None
    instruction: str | None
    no_chat: bool
    chunk: int | None
    device: str | None
    dtype: str | None
    artifact: str | None


def read_document(reading: Reading, policy: Policy | None, record: tuple[str, ...] = ()) -> Session:
    """Read the document and compact it by `policy` (None: keep it whole). record: signals to keep for later."""
    model, context = reading.model, reading.context
    if model is None or context is None:
        missing = "--model" if model is None else "--context"
        raise RequestError(f"{missing} is missing; give a model and a document, or a saved session with --session FILE")
    document = read_text(context, "context")

    from wakesight.engines.hf.engine import load
    from wakesight.engines.recording import needs

    engine = load(model, device=reading.device, dtype=reading.dtype, artifact=reading.artifact)
    # a session that is saved whole can be compacted later by the scorer that would be used now
    plan = policy or Policy(scorer=default_scorer(model, reading.artifact))
    wanted = needs(plan.scorer_method, engine)
    wanted["record"] = (*wanted["record"], *record)
    with progress("reading") as on_chunk:
        whole = engine.prefill(
            document, instruction=reading.instruction, chat=not reading.no_chat, on_chunk=on_chunk,
            chunk=512 if reading.chunk is None else reading.chunk, **wanted,
        )  # fmt: skip
    return _compacted(whole, policy)


def made_with(file: str | None) -> Made | None:
    """What a saved session was made with; None without a file."""
    if file is None:
        return None
    from wakesight.engines.saved import about

    return about(file)


def open_session(file: str, reading: Reading, policy: Policy | None) -> Session:
    """Open a saved session on the model it names (or the one given), and compact it further if there is a policy."""
    for_documents = {
        "--context": reading.context,
        "--instruction": reading.instruction,
        "--no-chat": reading.no_chat or None,
        "--chunk": reading.chunk,
    }
    if given := [flag for flag, value in for_documents.items() if value is not None]:
        raise RequestError(f"{given[0]} belongs to reading a document, and --session has read it already; leave it out")

    from wakesight.engines.hf.engine import load
    from wakesight.engines.saved import about
    from wakesight.engines.session import Session

    made = about(file)
    try:
        engine = load(
            reading.model or made.model, device=reading.device, dtype=reading.dtype or made.dtype,
            artifact=reading.artifact,
        )  # fmt: skip
    except RequestError as error:
        if reading.model is not None:
            raise
        raise RequestError(
            f"{file} was made with the model {made.model}; {error}; give its place with --model"
        ) from error
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        whole = Session.load(file, engine)
    for note in notes:
        click.echo(f"wakesight: {note.message}", err=True)
    return _compacted(whole, policy)


def _compacted(whole: Session, policy: Policy | None) -> Session:
    if policy is None:
        return whole
    with whole:  # its bytes are free before the first answer
        return whole.compact(policy)

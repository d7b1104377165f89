"""wakesight label: what a model's own continuations need of a document, written down for training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wakesight.cli.common import model_options, print_json, read_names, read_shard, shared_options
from wakesight.errors import RequestError, WorkError

if TYPE_CHECKING:
    from wakesight.learning.documents import Document
    from wakesight.learning.label import Progress


@click.command("label", short_help="Measure which entries documents need, for training.")
@click.argument("docs")
@click.option("--model", required=True, help="Bundled name (smollm2), model folder, .gguf file or hub id.")
@click.option("--out", required=True, help="Label folder: labels.json, labels/, skipped.jsonl.")
@click.option("--continuations", type=int, default=4, show_default=True, help="Continuations per document.")
@click.option("--tokens", type=int, default=128, show_default=True, help="Most tokens of each continuation.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same labels.")
@click.option("--min-tokens", type=int, default=750, show_default=True, help="Shorter documents are left out.")
@click.option("--max-tokens", type=int, default=1250, show_default=True, help="Longer documents are cut to this.")
@click.option("--instruction", default=None, help="Text before every document that has none of its own.")
@click.option("--no-chat", is_flag=True, help="Read documents as plain text, without the chat template.")
@click.option("--reply", is_flag=True, help="Continuations are replies to the document, not more of it.")
@click.option("--after", default="", help="Text between document and continuation; control tokens count.")
@click.option("--past-end", is_flag=True, help="Continuations go on where the model ends a turn.")
@click.option("--given", is_flag=True, help="Follow the rows' own continuations instead of sampling the model's.")
@click.option("--record", default=None, help="Store native, hidden, keys. Default: native or else hidden, and keys.")
@click.option("--full-precision", is_flag=True, help="Store keys and hidden states as computed, not as bytes.")
@click.option("--keep-benchmarks", is_flag=True, help="Keep documents that name a long-context benchmark.")
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped.")
@click.option("--limit", type=int, default=None, help="Take only the first so many documents, by path.")
@click.option("--shard", default=None, help="i/n: only every n-th document from the i-th on, for example 0/2.")
@click.option("--chunk", type=int, default=512, show_default=True, help="Prefill tokens per step.")
@model_options
@shared_options
def command(
    docs: str, model: str, out: str, min_tokens: int, max_tokens: int, no_chat: bool, record: str | None,
    full_precision: bool, keep_benchmarks: bool, resume: bool, limit: int | None, shard: str | None,
    device: str | None, dtype: str | None, as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Label DOCS: a .jsonl, .txt or .parquet file, or a folder of them.

    The model continues every document; the utility of an entry is how far its removal would have moved an attention
    layer's output on these continuations. Rows have a text, and may have a corpus, an id, and continuations of their
    own for --given. A stopped run goes on with --resume; shards may share a folder.

    \b
    wakesight label texts/ --model smollm2 --out labels/smollm2 --limit 400
    wakesight label texts/ --model smollm2 --out labels/smollm2 --limit 400 --resume
    """
    part = read_shard(shard)
    if limit is not None and limit < 1:
        raise RequestError(f"--limit {limit} must be at least 1; leave it out to label every document")

    from wakesight.engines.hf.engine import load
    from wakesight.learning.documents import fitted, read_documents
    from wakesight.learning.label import Settings, label

    settings = Settings(
        chat=not no_chat,
        record=None if record is None else tuple(read_names(record)),
        half=not full_precision,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        **choices,
    )
    found = read_documents(Path(docs), drop_benchmarks=not keep_benchmarks)
    engine = load(model, device=device, dtype=dtype)
    short: list[Document] = []
    documents = list(islice(fitted(found, engine.encode, min_tokens, max_tokens, short.append), limit))
    if not documents:
        raise RequestError(f"no document in {docs} has {min_tokens} tokens or more; lower --min-tokens")
    with _progress(len(documents[part[0] :: part[1]])) as on_document:
        progress = label(
            engine, documents, Path(out), settings=settings, shard=part, resume=resume, on_document=on_document
        )
    _report(progress, len(short), Path(out), as_json)


def _report(progress: Progress, short: int, out: Path, as_json: bool) -> None:
    """short: documents below --min-tokens, among those that were looked at."""
    from wakesight.learning.labelled import read_skipped

    if progress.documents and not progress.labelled + progress.resumed:
        reason = read_skipped(out)[0]["reason"]
        if progress.documents == 1:
            raise WorkError(f"the only document could not be labelled: {reason}")
        raise WorkError(f"none of the {progress.documents} documents could be labelled; the first one: {reason}")
    if as_json:
        print_json({"folder": str(out), "progress": vars(progress), "too_short": short})
        return
    rate = f" in {progress.wall:.0f} s" if progress.labelled else ""
    rest = f"{progress.resumed} done before, {progress.skipped} skipped, {short} too short"
    click.echo(f"{out}: {progress.labelled} documents labelled{rate}, {rest}")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Progress, Document], None] | None]:
    """A bar of documents with the time left; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("labelling", total=total)
        yield lambda progress, document: bar.update(task, completed=progress.documents, description=document.corpus)

"""Label documents: let the model continue each of them, and write down which entries its continuations lived on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wakesight.arguments import chunk_size, shown, whole_number
from wakesight.cache.state import SessionState
from wakesight.core import Signals
from wakesight.engines.base import Asked, Engine, Followed
from wakesight.engines.session import Session
from wakesight.errors import RequestError, WakesightError, WorkError
from wakesight.learning.documents import Document
from wakesight.learning.folder import check_target, locked, make_folder, open_folder, record_skipped
from wakesight.learning.influence import Removal, influence_and_outputs
from wakesight.learning.labelled import file_name, packed, read_tokens, write_labelled
from wakesight.learning.rollouts import document_seed, rollouts
from wakesight.models.chat import Frame
from wakesight.signals.precision import working_dtype

RECORDED = ("native", "hidden", "keys")  # what may be stored beside the labels
TOGETHER = 8  # documents; with four continuations each, a decode step costs them a fifth of what it costs one
TOLERANCE = 0.05  # relative L2 error of recomputed attention outputs. Source: GateSight, section on utility


@dataclass(frozen=True)
class Settings:
    """How documents are labelled; labels made by different settings do not belong into one folder.

    continuations, tokens: how many and how long at most. instruction, chat: as for `prefill`; a document's own
    instruction comes first.
    reply: continuations are replies, behind the end of the user's turn; after: or they follow this text (its control
    tokens mean what they say). Neither: they go on where the document ends. past_end: they also go on behind the end
    of a turn, for models that write further turns of a conversation themselves.
    given: follow the documents' own continuations instead of the model's.
    record: signals to store, of RECORDED; None: "native" where the model has such signals, else "hidden", and keys.
    half: store keys and hidden states as bytes, see `labelled.packed`; the name is from when they were float16.
    min_tokens, max_tokens: how the documents were chosen and cut by `fitted`, so that a folder holds one kind.
    """

    continuations: int = 4
    tokens: int = 128
    seed: int = 0
    instruction: str | None = None
    chat: bool = True
    reply: bool = False
    after: str = ""
    past_end: bool = False
    given: bool = False
    record: tuple[str, ...] | None = None
    half: bool = True
    chunk: int = 512
    min_tokens: int | None = None
    max_tokens: int | None = None

    def checked(self, engine: Engine) -> Settings:
        """With `record` filled in. Raises RequestError for values out of range or signals the model lacks."""
        for name, least in (("continuations", 1), ("tokens", 1), ("seed", 0)):
            whole_number(getattr(self, name), name, least)
        chunk_size(self.chunk)
        if self.reply and self.after:
            raise RequestError("continuations cannot be replies and follow a text too; give --reply or --after")
        if self.given and self.past_end:
            raise RequestError("given continuations end where they end; leave --past-end or --given out")
        native = bool(engine.geometry.native_heads)
        record = ("native" if native else "hidden", "keys") if self.record is None else tuple(self.record)
        if unknown := [name for name in record if name not in RECORDED]:
            raise RequestError(f"labels cannot be stored with {shown(unknown[0])}; choose from {', '.join(RECORDED)}")
        if "native" in record and not native:
            raise RequestError(f"{engine.name} has no native signals; record hidden instead")
        return Settings(**{**asdict(self), "record": tuple(name for name in RECORDED if name in record)})


@dataclass
class Progress:
    """documents: of this run's share, so far. tokens: of the contexts labelled now. wall: seconds."""

    documents: int = 0
    labelled: int = 0
    resumed: int = 0
    skipped: int = 0
    tokens: int = 0
    wall: float = 0.0


def label(
    engine: Any, documents: Iterable[Document], out: Path, *, settings: Settings | None = None,
    shard: tuple[int, int] = (0, 1), resume: bool = False, limit: int | None = None, together: int = TOGETHER,
    on_document: Callable[[Progress, Document], None] | None = None, **changes: Any,
) -> Progress:  # fmt: skip
    """Label `documents` into the folder `out`, one file each; see `learning/labelled.py` for what it holds.

    settings, or its fields as keywords (continuations=4, tokens=128, seed=0, record=("native",), ...). shard: (i, n)
    takes every n-th document from the i-th on; shards may fill one folder at the same time. limit: the first so many
    documents only. resume: go on, leaving finished documents of the same text as they are. A document that cannot be
    run becomes a line of skipped.jsonl with the reason. together: so many documents are held at a time, and their
    continuations drawn side by side; fewer take less memory and more time. The same seed on the same machine gives the
    same bytes, whatever the shard and however often the run was stopped.

    Raises RequestError for a model that cannot be labelled, for an `out` that is no place for labels, holds this share
    already (without `resume`), or was made with other settings, another model, dtype or text, and while another process
    fills it.
    """
    wanted, together = (settings or Settings(**changes)).checked(engine), whole_number(together, "together", 1)
    after = _checked_engine(engine, wanted)
    check_target(out)
    make_folder(out / "labels")
    progress, start = Progress(), time.perf_counter()
    with locked(out, shard):
        about = {
            "model": engine.name,
            "fingerprint": engine.weights_fingerprint(),
            "geometry": asdict(engine.geometry),
        }
        asked = {
            **asdict(wanted),
            "fingerprint": about["fingerprint"],
            "dtype": str(engine.dtype).removeprefix("torch."),
        }
        open_folder(out, asked, about)

        def counted(document: Document) -> None:
            progress.documents += 1
            progress.wall = time.perf_counter() - start
            if on_document is not None:
                on_document(progress, document)

        waiting: list[Document] = []
        for document in islice(islice(documents, limit), shard[0], None, shard[1]):
            path = out / "labels" / file_name(document.id)
            if path.exists():
                if not resume:
                    raise RequestError(
                        f"{out} holds labels of {document.id!r} already; add --resume to go on, or give another folder"
                    )
                _check_same(engine, document, path, wanted)
                progress.resumed += 1
                counted(document)
            else:
                waiting.append(document)
            if len(waiting) == together:
                _label_together(engine, waiting, out, wanted, after, progress, counted)
                waiting = []
        _label_together(engine, waiting, out, wanted, after, progress, counted)
    return progress


def _checked_engine(engine: Engine, settings: Settings) -> list[int]:
    """Refuse a model before any document is read; returns the ids between context and continuation."""
    if engine.only_whole is not None:
        raise RequestError(f"{engine.name} cannot be labelled: {engine.only_whole}")
    for layer in range(len(engine.geometry.attention_layers)):
        engine.output_projection(layer)
    if settings.reply:
        tail = list(engine.frame(settings.instruction, settings.chat).tail)
        if not tail:
            raise RequestError("without a chat template there is no reply; leave --reply out, or --no-chat")
        return tail
    return engine.template_ids(settings.after) if settings.after else []


def _check_same(engine: Any, document: Document, path: Path, settings: Settings) -> None:
    """RequestError if the labels at `path` were made from another text under the same id."""
    before = read_tokens(path)
    if before is not None and before != list(_context(engine, document, settings)[1]):
        raise RequestError(
            f"the labels of {document.id!r} in {path.parent.parent} were made from another text; resume with the same "
            "documents, or give another folder"
        )


def _context(engine: Any, document: Document, settings: Settings) -> tuple[Frame, tuple[int, ...]]:
    """What stands around a document, and the ids that are read: the frame's head and the text."""
    frame = engine.frame(document.instruction or settings.instruction, settings.chat)
    return frame, (*frame.head, *(document.ids or engine.encode(document.text)))


def _label_together(
    engine: Any, documents: Sequence[Document], out: Path, settings: Settings, after: Sequence[int], progress: Progress,
    counted: Callable[[Document], None],
) -> None:  # fmt: skip
    """Label each of them, or write down why it cannot be."""
    with contextlib.ExitStack() as stack:
        read = [_read(engine, document, settings, after, stack) for document in documents]
        for document, reading in zip(documents, _continued(engine, read, settings, after), strict=True):
            try:
                if isinstance(reading, WakesightError):
                    raise reading
                tensors, about = _labelled(engine, reading, settings, after)
            except WakesightError as error:
                record_skipped(out, document.id, document.corpus, str(error))
                progress.skipped += 1
            else:
                write_labelled(out / "labels" / file_name(document.id), tensors, about)
                progress.labelled += 1
                progress.tokens += about["tokens"]
            if isinstance(reading, _Reading):
                reading.session.close()
            counted(document)


@dataclass(frozen=True, eq=False)
class _Reading:
    """A document's context as a session, and what the model wrote behind it.

    The numbers a next token is drawn from exist only while its predecessor is read. So without ids in between, the
    context's last token is `held_back`, the continuations are drawn behind it, and only then it is read for good.
    """

    document: Document
    prefix: int
    session: Session
    held_back: tuple[int, ...]
    made: Sequence[Sequence[int]] = ()


def _read(
    engine: Any, document: Document, settings: Settings, after: Sequence[int], stack: contextlib.ExitStack
) -> _Reading | WakesightError:
    """The context read, all but what is held back. stack: closes the session at the latest.

    A document without tokens, or with too many, is an error of its own.
    """
    try:
        frame, ids = _context(engine, document, settings)
        body = len(ids) - len(frame.head)
        if not body or len(ids) < 2:
            raise RequestError(f"the document has {body} tokens; give one with some text")
        record = [name for name in settings.record or () if name != "keys"]
        held_back = () if after or settings.given else ids[-1:]
        session: Session = engine.prefill(ids[: len(ids) - len(held_back)], record=record, chunk=settings.chunk)
    except WakesightError as error:
        return error
    return _Reading(document, frame.prefix, stack.enter_context(session), held_back)


def _continued(
    engine: Any, read: Sequence[_Reading | WakesightError], settings: Settings, after: Sequence[int]
) -> Iterator[_Reading | WakesightError]:
    """The same with continuations."""
    readings = [reading for reading in read if isinstance(reading, _Reading)]
    if settings.given:
        made = iter([_given(engine, reading.document, settings) for reading in readings])
    else:
        asked = [
            Asked(reading.session.state, after or reading.held_back, document_seed(settings.seed, reading.document.id))
            for reading in readings
        ]
        made = iter(
            rollouts(engine, asked, count=settings.continuations, tokens=settings.tokens, past_end=settings.past_end)
        )
    for reading in read:
        if isinstance(reading, WakesightError):
            yield reading
            continue
        rows = next(made)
        if isinstance(rows, WakesightError):
            yield rows
        elif not rows:
            yield WorkError("the model ended every continuation at once, so no entry was of any use to it")
        else:
            yield replace(reading, made=rows)


def _labelled(
    engine: Any, reading: _Reading, settings: Settings, after: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of one document's file. settings: checked ones.

    Raises WorkError if the recomputed attention differs from the model's own.
    """
    document, session = reading.document, reading.session
    if reading.held_back:
        session.append(reading.held_back)
    utility = utilities(engine, session.state, reading.made, after)
    if not utility.error <= TOLERANCE:
        raise WorkError(
            f"recomputed attention outputs differ from the model's own by {utility.error:.1%} (at most "
            f"{TOLERANCE:.0%} is rounding), so this model's attention is not what its queries, keys and values say"
        )
    tensors = {f"u.{layer}": found.float() for layer, found in enumerate(utility.raw)}
    tensors.update({f"relative.{layer}": found.float() for layer, found in enumerate(utility.relative)})
    signals = session.signals()
    tensors.update(_stored(signals, settings))
    tensors["tokens"] = torch.tensor(session.tokens, dtype=torch.int32)
    about = {
        "id": document.id, "corpus": document.corpus, "tokens": len(session.tokens), "prefix": reading.prefix,
        "scaling": [float(scale) for scale in signals.scaling], "seed": settings.seed,
        "continuations": [len(row) for row in reading.made], "reconstruction_error": float(f"{utility.error:.3g}"),
        "record": list(settings.record or ()), "fingerprint": engine.weights_fingerprint(),
    }  # fmt: skip
    return tensors, about


def _given(engine: Any, document: Document, settings: Settings) -> list[list[int]] | WakesightError:
    """The first `continuations` of the document's own, each cut to `tokens` ids."""
    try:
        made = [
            engine.template_ids(said)[: settings.tokens] for said in document.continuations[: settings.continuations]
        ]
    except WakesightError as error:
        return error
    if not made:
        return RequestError("the document has no continuations; give its row a list of them, or leave --given out")
    return made


@dataclass(frozen=True, eq=False)
class Utility:
    """raw, relative: U and U over the residual stream's norm, [kv_head, n] per attention layer.

    error: ||recomputed - native|| / ||native|| over the attention outputs of all followed tokens, the worst layer's.
    """

    raw: tuple[Tensor, ...]
    relative: tuple[Tensor, ...]
    error: float


def utilities(
    engine: Engine, state: SessionState, continuations: Iterable[Sequence[int]], after: Sequence[int] = ()
) -> Utility:
    """The utility of every entry of a whole state.

    U(i) = max over continuations and their tokens t of the influence I(t, i); each continuation is read behind the
    context and `after`, one at a time, and forgotten. Source: GateSight, section on utility; `relative` is ours.
    """
    best: list[Tensor | None] = [None for _ in engine.geometry.kv_heads]
    squares = torch.zeros(len(best), 2, dtype=torch.float64)
    removals = [_removals(engine, state, layer) for layer in range(len(best))]
    for ids in continuations:
        for layer, followed in enumerate(engine.follow(state, [*after, *ids])):
            found, apart = _of_layer(state, layer, followed, len(after), removals[layer])
            before = best[layer]
            best[layer] = found if before is None else torch.maximum(before, found)
            squares[layer] += apart
    raw, relative = zip(*(layer.unbind() for layer in best if layer is not None), strict=True)
    return Utility(raw, relative, float((squares[:, 0] / squares[:, 1]).sqrt().max()))


def _removals(engine: Engine, state: SessionState, layer: int) -> list[Removal]:
    """Per KV head what no continuation changes."""
    values = state.slots[layer].strips("value")
    output = engine.output_projection(layer).transpose(0, 1)  # [query_head, hidden, value_dim]
    parts = output.reshape(len(values), -1, *output.shape[1:])
    return [Removal(strip, part, working_dtype(strip.dtype)) for strip, part in zip(values, parts, strict=True)]


def _of_layer(
    state: SessionState, layer: int, followed: Followed, skip: int, removals: Sequence[Removal]
) -> tuple[Tensor, Tensor]:
    """One continuation's largest influence, raw and relative, [2, kv_head, n]; and squared norms of the difference
    between recomputed and native outputs and of the native ones [2]."""
    slots, entries = state.slots[layer], state.logical_length
    group = len(followed.queries) // len(followed.keys)
    stream = followed.residual[skip:, None].clamp(min=torch.finfo(torch.float32).tiny)
    heads, apart = [], torch.zeros(2, dtype=torch.float64)
    for head, (key, value, removal) in enumerate(zip(followed.keys, followed.values, removals, strict=True)):
        mine = slice(head * group, (head + 1) * group)
        change, outputs = influence_and_outputs(
            followed.queries[mine, skip:], torch.cat([slots.strip("key", head), key]),
            torch.cat([slots.strip("value", head), value]), removal.output, followed.scaling, entries + skip, entries,
            removal=removal,
        )  # fmt: skip
        heads.append(torch.stack([change.amax(dim=0), (change / stream).amax(dim=0)]))
        native = followed.outputs[mine, skip:].double()
        apart += torch.stack([(outputs.double() - native).square().sum(), native.square().sum()]).cpu()
    return torch.stack(heads, dim=1), apart


def _stored(signals: Signals, settings: Settings) -> Iterator[tuple[str, Tensor]]:
    """Signals by their names in the file, layer by layer."""
    for layer, (keys, values) in enumerate(zip(signals["keys"], signals["values"], strict=True)):
        yield f"value_norm.{layer}", values.float().norm(dim=-1)
        if "keys" in (settings.record or ()):
            yield from _wide(f"key.{layer}", keys, settings)
    for name in set(settings.record or ()) - {"keys"}:
        for layer, tensor in enumerate(signals[name]):
            if name == "hidden":
                yield from _wide(f"hidden.{layer}", tensor, settings)
            else:
                yield f"{name}.{layer}", tensor


def _wide(name: str, tensor: Tensor, settings: Settings) -> Iterator[tuple[str, Tensor]]:
    """What takes most of a file, as bytes unless the numbers were asked for as computed."""
    yield from (packed(name, tensor) if settings.half else {name: tensor}).items()

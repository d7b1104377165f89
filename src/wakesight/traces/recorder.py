"""Records what every head attends to while a model answers: one script in, one trace of a run folder out.

Taps look at the prompt's last 32 queries and at every decode step. Full attention rows exist for one step at a time;
what is stored of them are the 64 largest weights and two scores per head.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from wakesight.arguments import whole_number
from wakesight.engines.base import Engine
from wakesight.engines.recording import WINDOW as QUERY_WINDOW
from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.scores.base import Scorer, for_model, has_probe, score
from wakesight.scores.table import scorer as scorer_of
from wakesight.signals.chunk import Chunk
from wakesight.signals.precision import working_dtype
from wakesight.traces.regimes import NEW_TOKENS, Prompt, Script, prompt_of
from wakesight.traces.retrieval import Retrieval, copied
from wakesight.traces.schema import PAGE, TOP, WINDOW
from wakesight.traces.writing import Run, Step, Writer


@dataclass(frozen=True)
class Options:
    """new_tokens: longest answer; None for the regime's own. past_end: go on behind an end-of-sequence id.

    chunk: prompt tokens per pass. val_dtype: how weights are stored; float16 halves a log and makes new ties.
    scorers: whose scores of the prompt are logged, so that a simulated policy can start from them.
    """

    new_tokens: int | None = None
    past_end: bool = False
    chat: bool = True
    chunk: int = 512
    val_dtype: str = "float32"
    scorers: tuple[str, ...] = ("keydiff",)
    page_size: int = PAGE
    retrieval: Retrieval = field(default_factory=Retrieval)

    def __post_init__(self) -> None:
        if self.new_tokens is not None:
            whole_number(self.new_tokens, "--new-tokens", 1)
        for name in self.scorers:
            if has_probe(scorer_of(name)):
                raise RequestError(f"--scorers {name} makes a pass of its own; take one that does not, as keydiff")


@dataclass(frozen=True)
class Recorded:
    """steps: decode steps logged. finish: "eos", "length" or "limit". seconds: prompt and decoding, with writing."""

    name: str
    steps: int
    text: str
    finish: str
    prompt_s: float
    decode_s: float


class Prefills(Engine, Protocol):
    """An engine that makes sessions."""

    def prefill(self, text: Sequence[int], *, chunk: int, query_window: int) -> Session: ...


def record(
    engine: Prefills, run: Run, script: Script, options: Options | None = None, about: Mapping[str, Any] | None = None
) -> Recorded:
    """Play one script greedily and append its trace to the run, step by step.

    The trace's first step feeds the prompt's last token. about: further facts for the trace's meta (model,
    fingerprint, versions, commit).
    Raises RequestError for a model whose attention cannot be watched, and for a prompt of one token or one that leaves
    no room; WorkError on lack of memory. What was written stays, unfinished.
    """
    options = options or Options()
    if engine.only_whole is not None:
        raise RequestError(f"no trace can be recorded on {engine.name}: {engine.only_whole}; take another model")
    prompt, start = prompt_of(engine, script, options.chat), time.perf_counter()
    if len(prompt.tokens) < 2:
        raise RequestError("the prompt has fewer than 2 tokens; give a longer one")
    with _before_the_end(engine, prompt, options.chunk) as (session, mass):
        prompt_s = time.perf_counter() - start
        meta = {**_facts(engine, script, options), **(about or {})}
        writer = run.create(
            script.name, layers=len(engine.geometry.attention_layers), query_heads=engine.geometry.query_heads, top=TOP,
            prompt_len=len(prompt.tokens), kv_heads=engine.geometry.kv_heads, needle_spans=prompt.needles,
            page_size=options.page_size, val_dtype=options.val_dtype, meta=meta,
        )  # fmt: skip
        for scorer in options.scorers:
            writer.prompt_scores(scorer, _scored(session, scorer))
        start = time.perf_counter()
        made, finish = _decode(engine, session, prompt, script, writer, options, mass)
    said = engine.decode(made)
    given = engine.encode(script.reply) if script.reply else []
    writer.finish({"reply": engine.decode([*given, *made]), "finish": finish})
    return Recorded(script.name, len(made), said, finish, prompt_s, time.perf_counter() - start)


def _facts(engine: Engine, script: Script, options: Options) -> dict[str, Any]:
    return {
        "model": engine.name,
        "regime": script.regime,
        "language": script.language,
        "seed": script.seed,
        "depth": script.depth,
        "question": script.question,
        "answer": script.answer,
        "attention_layers": [int(layer) for layer in engine.geometry.attention_layers],
        "retrieval": options.retrieval.settings(),
        "past_end": options.past_end,
    }


@contextlib.contextmanager
def _before_the_end(engine: Prefills, prompt: Prompt, chunk: int) -> Iterator[tuple[Session, list[PromptMass]]]:
    """A session that has read the prompt but its last token, and what its last queries attended to."""
    tokens = list(prompt.tokens)
    first = max(1, len(tokens) - WINDOW)  # the window's queries but the last one are read with taps
    mass = [PromptMass(len(tokens)) for _ in engine.geometry.attention_layers]
    with engine.prefill(tokens[:first], chunk=chunk, query_window=QUERY_WINDOW) as session:
        if len(tokens) <= WINDOW:  # the first token sees itself only, and prefill has no taps of ours
            for tap in mass:
                tap.first_token(engine.geometry.query_heads)
        if tokens[first:-1]:
            for recorder, tap in zip(session.recording.layers, mass, strict=True):
                recorder.guests = (tap,)
            session.append(tokens[first:-1], chunk=chunk)
        yield session, mass


def _scored(session: Session, scorer: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[layer, KV head, position] of a session's tokens, zeros behind the KV heads of a layer with fewer."""
    kv_heads = session.engine.geometry.kv_heads
    method = for_model(scorer_of(scorer), session.engine)
    layers = score(cast(Scorer, method), session.signals(method), kv_heads).layers
    found = np.zeros((len(kv_heads), max(kv_heads), layers[0].shape[1]), np.float32)
    for layer, scores in enumerate(layers):
        found[layer, : kv_heads[layer]] = scores.to("cpu", torch.float32).numpy()
    return found


def _decode(
    engine: Engine, session: Session, prompt: Prompt, script: Script, writer: Writer, options: Options,
    mass: Sequence[PromptMass],
) -> tuple[list[int], str]:  # fmt: skip
    """Decode and log; (ids chosen, why it stopped). An end-of-sequence id is logged and not among the ids."""
    step, ends = AttentionStep(engine.geometry.kv_heads), engine.end_tokens
    wanted = options.new_tokens or NEW_TOKENS.get(script.regime, max(NEW_TOKENS.values()))
    ids = torch.zeros(len(prompt.tokens) + wanted, dtype=torch.long)
    ids[: len(prompt.tokens)] = torch.tensor(prompt.tokens)
    needle = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in prompt.needles:
        needle[start:end] = True
    made: list[int] = []
    with (
        session.exclusively(),
        contextlib.closing(engine.stepping(session.state, prompt.tokens[-1], step.taps)) as tokens,
    ):
        for token in tokens:
            seen = len(prompt.tokens) + len(made)
            rows = step.rows()
            if not made:
                writer.prompt_mass(_whole(mass, rows))
            writer.append(_logged(rows, needle[:seen], ids[:seen], token, options.retrieval))
            if token in ends and not options.past_end:
                return made, "eos"
            made.append(token)
            if len(made) == wanted:
                return made, "length"
            ids[seen] = token
    return made, "limit"


def _logged(rows: Tensor, needle: Tensor, ids: Tensor, token: int, retrieval: Retrieval) -> Step:
    """rows: float [layer, query_head, position] of one step, whose model chose `token`."""
    needle, ids = needle.to(rows.device), ids.to(rows.device)
    kept = min(TOP, rows.shape[-1])
    weight, position = rows.topk(kept, dim=-1)
    idx = np.full((*rows.shape[:2], TOP), -1, dtype=np.int32)
    val = np.zeros(idx.shape, dtype=np.float32)
    idx[..., :kept], val[..., :kept] = position.cpu().numpy(), weight.cpu().numpy()
    return Step(
        topk_idx=idx,
        topk_val=val,
        needle=retrieval.needle_share(rows, needle).cpu().numpy(),
        copy=copied(rows, needle, ids, token).cpu().numpy(),
        token=token,
        ctx_len=rows.shape[-1],
    )


def _whole(mass: Sequence[PromptMass], last: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[layer, query_head, position]: with the rows of the prompt's last query, which decoding fed."""
    summed = [
        last[layer] if tap.sums is None else tap.sums.to(last.device) + last[layer] for layer, tap in enumerate(mass)
    ]
    return torch.stack(summed).to("cpu", torch.float32).numpy()


class PromptMass:
    """Sums the attention of every query it sees, by query head and position: [query_head, prompt length]."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.sums: Tensor | None = None

    def first_token(self, heads: int) -> None:
        """Count the text's first token, which sees itself only."""
        self.sums = torch.zeros(heads, self.tokens)
        self.sums[:, 0] = 1

    def watch(self, chunk: Chunk) -> None:
        logits = _logits(chunk)  # [query_head, q, position]
        new, seen = logits.shape[1:]
        hidden = torch.ones(new, new, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., seen - new :].masked_fill_(hidden, float("-inf"))
        received = logits.softmax(dim=-1).sum(dim=1)
        if self.sums is None:
            self.sums = received.new_zeros(received.shape[0], self.tokens)
        self.sums = self.sums.to(received)
        self.sums[:, :seen] += received


class AttentionStep:
    """The attention rows of all layers at one decode step; `taps` overhear it layer by layer."""

    def __init__(self, kv_heads: Sequence[int]) -> None:
        self.taps = [_LayerTap() for _ in kv_heads]

    def rows(self) -> Tensor:
        """[layer, query_head, position]; every layer must have been heard since the last call."""
        logits = [tap.taken() for tap in self.taps]
        return torch.stack([each.to(logits[0].device) for each in logits]).softmax(dim=-1)


class _LayerTap:
    def __init__(self) -> None:
        self.logits: Tensor | None = None  # [query_head, position]

    def watch(self, chunk: Chunk) -> None:
        self.logits = _logits(chunk)[:, -1]

    def taken(self) -> Tensor:
        logits, self.logits = self.logits, None
        if logits is None:
            raise RuntimeError("an attention layer of this model was not overheard at a decode step")
        return logits


def _logits(chunk: Chunk) -> Tensor:
    """[query_head, q, position] of a whole session's layer, in at least float32; all heads in one product."""
    dtype = working_dtype(chunk.queries.dtype)
    heads, new, dim = chunk.queries.shape
    keys = stacked(chunk.keys).to(dtype)
    queries = (chunk.queries.to(dtype) * chunk.scaling).reshape(len(keys), -1, dim)
    return (queries @ keys.transpose(1, 2)).view(heads, new, -1)


def stacked(heads: Sequence[Tensor]) -> Tensor:
    """[head, position, dim]; a view where the heads lie evenly spaced in one storage, as an unbound tensor's do."""
    first = heads[0]
    apart = heads[1].storage_offset() - first.storage_offset() if len(heads) > 1 else 0
    even = all(
        head.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and (head.shape, head.stride()) == (first.shape, first.stride())
        and head.storage_offset() == first.storage_offset() + number * apart
        for number, head in enumerate(heads)
    )
    if not even or apart < 0:
        return torch.stack(tuple(heads))
    return first.as_strided((len(heads), *first.shape), (apart, *first.stride()))

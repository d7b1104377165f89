"""What a user holds: one prefilled context, its compacted children, and questions to either.

doc = engine.prefill(text)          # whole cache
small = doc.compact(Policy(...))    # a child with less; doc is untouched
small.ask("...")                    # the child is restored after every answer
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Concatenate, NoReturn, ParamSpec, TypeVar, cast

from torch import Tensor

from wakesight.arguments import text_or_ids
from wakesight.budget.resolve import check_allocation, entries_per_head, make_budget
from wakesight.cache.slots import GROWTH
from wakesight.cache.state import SessionState
from wakesight.core import Answer, KeptSet, Signals, Tables
from wakesight.engines.base import Engine, Generation
from wakesight.engines.demoting import check_demotion, entries_that_fit, first_pages, plans
from wakesight.engines.probe import score_by_probe
from wakesight.engines.recording import Recording
from wakesight.errors import RequestError
from wakesight.models.chat import Frame
from wakesight.policy import Policy, need_policy
from wakesight.scores.base import AnyScorer, Scorer, for_model, has_probe, score
from wakesight.selection.pages import lift, snap
from wakesight.selection.topk import Ranking, rank, take


@dataclass(frozen=True)
class SessionStats:
    """Lengths in tokens, bytes as really held. physical_lengths and kept_entries: per attention layer, per KV
    head, prefix included.

    kv_bytes_full: what the whole context takes; kv_bytes_kept: what this session holds of it, growth
    slack (kv_bytes_slack) not counted; kv_bytes_freed = full - kept. state_bytes: recurrent states and
    sliding windows, shared by a session and its children.

    Of a demoted session the lengths and kv_bytes_kept are those of fast memory: slots, what is always read, sketches
    (sketch_bytes) and what streams past (staging_bytes), whether in use or not; so kv_bytes_freed may be negative for a
    short context. reservoir_bytes: host memory or file. The three are 0 without demotion.
    """

    logical_length: int
    physical_lengths: list[list[int]]
    kept_entries: list[list[int]]
    kv_bytes_full: int
    kv_bytes_kept: int
    kv_bytes_slack: int
    kv_bytes_freed: int
    state_bytes: int
    sketch_bytes: int
    staging_bytes: int
    reservoir_bytes: int
    prefill_s: float
    score_s: float
    compact_s: float


def check_evictable(engine: Engine, policy: Policy) -> None:
    """Raises RequestError if `policy` evicts what this model cannot lose."""
    if engine.only_whole is not None and policy.keep != 1:
        raise RequestError(f"entries of {engine.name} cannot be evicted: {engine.only_whole}; use --keep 1")


P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[Session, P], R]:
    """Refuse the call while another one runs on the same session."""

    def call(self: Session, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.exclusively():
            return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[Session, P], R]", functools.update_wrapper(call, method))


class Session:
    """A context that was read once. Made by `Engine.prefill`, or by `compact` as a child.

    Any number of questions, each answered from the same state. `close()` (or a `with` block) returns
    the memory at once; a child may outlive its parent.
    """

    def __init__(
        self, engine: Engine, state: SessionState, frame: Frame, recording: Recording, *, prefill_s: float,
        policy: Policy | None = None, score_s: float = 0.0, compact_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.policy = policy
        self.prefill_s, self.score_s, self.compact_s = prefill_s, score_s, compact_s
        self.frame = frame
        self.recording = recording
        self._state: SessionState | None = state
        self._rankings: dict[tuple[object, ...], tuple[Ranking, float]] = {}
        self._busy = threading.Lock()

    @property
    def state(self) -> SessionState:
        """The held state. Raises RequestError after `close()`."""
        if self._state is None:
            raise RequestError("this session is closed; prefill or compact again")
        return self._state

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the whole context, template head included; its length is the logical length."""
        return self.state.tokens

    @property
    def kept(self) -> KeptSet | None:
        """Which entries a child holds; None for a session that was never compacted."""
        return self.state.kept

    def signals(self, scorer: AnyScorer | None = None) -> Signals:
        """What a scorer may read of this context: views of a whole session, entries among zeros of a child.

        scorer: which one; the model's artifact is opened only for one with `needs_artifact`. Raises RequestError on a
        model whose entries cannot be evicted.
        """
        if self.engine.only_whole is not None:
            raise RequestError(f"no scorer runs on {self.engine.name}: {self.engine.only_whole}")
        if self.state.demoted:
            raise RequestError("a demoted session cannot be scored: its entries are not in one piece; score its parent")
        signals = self.recording.signals(self.state)
        if getattr(scorer, "needs_artifact", False):
            signals = dataclasses.replace(signals, artifact=self.engine.artifact)
        return signals

    def _tables(self, rule: object) -> Tables | None:
        """What was measured of the model, for an allocation that needs it."""
        if not hasattr(rule, "needs_table") or self.engine.artifact is None:
            return None
        return self.engine.artifact.tables

    @_alone
    def append(self, text: str | Sequence[int], *, chunk: int = 512) -> None:
        """Continue the context for good: a further part of the document, or a turn that was had.

        text: plain text, or token ids as they are. A child keeps every entry of the new tokens until it is
        compacted again. If it fails, the session is as before. Raises RequestError for nothing to append or
        too much for the model; WorkError on lack of memory.
        """
        state = self.state
        ids = self.text_ids(text)
        start = time.perf_counter()
        self.recording = self.engine.extend(state, ids, self.recording, chunk)
        self.prefill_s += time.perf_counter() - start
        self._rankings = {}

    @_alone
    def compact(self, policy: Policy) -> Session:
        """A child that physically holds only what `policy` keeps. This session stays as it is.

        Every policy with the same scorer shares one scoring, whatever its size or allocation. A child may be
        compacted again: the size counts in its logical length, what it holds competes, and a head that holds
        less than its share keeps all of it.
        Raises RequestError for a policy without a size, one this context cannot meet, or a scorer whose
        signals were not recorded; WorkError for non-finite scores or lack of memory. Nothing is left behind.
        """
        state, policy = self.state, need_policy(policy)
        prefix, per_head = self._size(policy)
        start = time.perf_counter()
        if policy.residency is not None:
            check_demotion(self.engine, state, policy.residency)
        elif state.demoted:
            raise RequestError(
                "this session is demoted, and only a whole one can be compacted; compact its parent, or ask it as it is"
            )
        check_evictable(self.engine, policy)
        if self.engine.only_whole is not None:
            return self._child(state.copy(self.engine.growth), policy, 0.0, start)
        ranking, score_s = self._ranked(policy, prefix)
        start = time.perf_counter()
        child = self._evicted(policy, prefix, per_head, ranking)
        child.prefix = max(child.prefix, prefix)  # what this policy protects stays protected
        return self._child(child, policy, score_s, start)

    def _evicted(self, policy: Policy, prefix: int, per_head: int | None, ranking: Ranking) -> SessionState:
        """What the child holds: the best entries alone, or everything with the best pages in fast memory."""
        state, geometry, growth, rule = self.state, self.engine.geometry, self.engine.growth, policy.allocation_rule
        budget = None
        if per_head is not None or isinstance(rule, tuple):
            budget = make_budget(rule, per_head, ranking.body, geometry, self._tables(rule))
        if policy.evicted == "demote":
            layers = plans(policy, budget, geometry, prefix, state.logical_length)
            return state.demoting(layers, first_pages(ranking, layers), growth)
        assert budget is not None
        if policy.unit == "page":
            budget = snap(budget, ranking, policy.page_size)
        return state.compacted(take(ranking, budget), growth)

    def _child(self, state: SessionState, policy: Policy, score_s: float, start: float) -> Session:
        recording = self.recording
        if state.demoted:  # it is not scored again
            recording = self.engine.recording(recording.window, ())
        return Session(
            self.engine, state, self.frame, recording, prefill_s=self.prefill_s, policy=policy, score_s=score_s,
            compact_s=time.perf_counter() - start,
        )  # fmt: skip

    def _size(self, policy: Policy) -> tuple[int, int | None]:
        """The protected prefix, and R entries per head beyond it (None for explicit counts, of entries or pages)."""
        state, geometry = self.state, self.engine.geometry
        if not policy.has_size:
            raise RequestError(
                "the policy names no size; give keep=, entries= or bytes=, for example policy.at(keep=0.3)"
            )
        prefix = state.prefix if policy.protect is None else policy.protect
        n_body = state.logical_length - prefix
        if n_body < 0:
            raise RequestError(
                f"protect={prefix} is more than the context's {state.logical_length} tokens; protect fewer"
            )
        rule = policy.allocation_rule
        check_allocation(rule, limit_bytes=policy.bytes, n_body=n_body, geometry=geometry, tables=self._tables(rule))
        if isinstance(rule, tuple) or (policy.residency is not None and policy.residency.pages is not None):
            return prefix, None
        if policy.residency is not None and policy.bytes is not None:
            fits = entries_that_fit(
                policy.bytes, policy, geometry, tokens=state.logical_length, prefix=prefix,
                state_bytes=state.state_bytes, growth=self.engine.growth,
            )  # fmt: skip
            return prefix, min(fits, n_body)
        per_head = entries_per_head(
            keep=policy.keep, entries=policy.entries, limit_bytes=policy.bytes, n_body=n_body, prefix=prefix,
            fixed_bytes=state.state_bytes + (self.engine.growth + GROWTH) * geometry.token_bytes,
            token_bytes=geometry.token_bytes,
        )  # fmt: skip
        return prefix, per_head

    def ask(
        self, text: str | Sequence[int], *, max_new_tokens: int = 128, stream: Callable[[str], None] | None = None
    ) -> Answer:
        """Answer one question, greedily, and restore the session bit for bit.

        text: the question, put where the chat template continues; or token ids fed as they are.
        stream: called with each new piece of text. Stops at an end-of-sequence id, also as first token.
        Raises RequestError for an empty question or one that does not fit the model's limit.
        """
        pieces = _Pieces(self.engine.decode, stream)
        answers = ask_together([self], [text], max_new_tokens, pieces.add if stream else None)
        pieces.finish()
        return answers[0]

    @_alone
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [token, vocabulary] for ids fed after the context; the session is left as it was."""
        return self.engine.logits(self.state, tokens)

    @_alone
    def cache(self) -> object:
        """A copy in the engine's own form, a transformers Cache: `model.generate(question_ids, cache=...)` goes on."""
        return self.engine.cache([self.state])

    @_alone
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything this session holds to one file (safetensors; no code in it), to be loaded later.

        Written under a temporary name and renamed: the file is whole or not there. Raises RequestError for a
        path that cannot be written, WorkError for a full disk.
        """
        from wakesight.engines.saved import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], engine: Engine) -> Session:
        """Open a saved session on the model it was made with; the file is mapped, not read into memory.

        Raises RequestError for another model, dtype or format, and for a damaged file, each by name.
        """
        from wakesight.engines.saved import load

        return load(path, engine)

    @property
    def stats(self) -> SessionStats:
        """Measured now, from the tensors this session holds."""
        state, geometry = self.state, self.engine.geometry
        full = state.logical_length * geometry.token_bytes
        kept = sum(slots.held_bytes for slots in state.slots)
        entries = [list(heads) for heads in state.fast_lengths]
        return SessionStats(
            logical_length=state.logical_length,
            physical_lengths=entries,
            kept_entries=entries,
            kv_bytes_full=full,
            kv_bytes_kept=kept,
            kv_bytes_slack=sum(slots.slack_bytes for slots in state.slots),
            kv_bytes_freed=full - kept,
            state_bytes=state.state_bytes,
            sketch_bytes=sum(slots.sketch_bytes for slots in state.paged),
            staging_bytes=sum(slots.staging_bytes for slots in state.paged),
            reservoir_bytes=sum(slots.reservoir_bytes for slots in state.paged),
            prefill_s=self.prefill_s,
            score_s=self.score_s,
            compact_s=self.compact_s,
        )

    @_alone
    def close(self) -> None:
        """Return this session's memory; its children keep theirs. Closing twice is fine."""
        if self._state is not None:
            self._state.release()
        self._state, self._rankings = None, {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ranked(self, policy: Policy, prefix: int) -> tuple[Ranking, float]:
        """This context's entries in the order that the policy's scorer gives them; worked out once per scorer."""
        unit = (policy.page_size, policy.page_reduce) if policy.unit == "page" else None
        key = (policy.scorer_method, prefix, unit)
        if key not in self._rankings:
            start = time.perf_counter()
            method = for_model(policy.scorer_method, self.engine)
            signals = self.signals(method)
            if has_probe(method):
                scores = score_by_probe(method, self, prefix)
            else:
                scores = score(cast(Scorer, method), signals, self.engine.geometry.kv_heads)
            if unit is not None:
                scores = lift(scores, policy.page_size, policy.page_reduce, prefix, signals.held)
            ranking = rank(scores, prefix, signals.held)
            self._rankings[key] = (ranking, time.perf_counter() - start)
        return self._rankings[key]

    def text_ids(self, text: str | Sequence[int]) -> list[int]:
        """Ids of plain text; ids are taken as they are."""
        given = text_or_ids(text, "the text")
        return self.engine.encode(given) if isinstance(given, str) else given

    def question_ids(self, text: str | Sequence[int]) -> list[int]:
        """Ids that ask `text` behind this context; ids are taken as they are."""
        return self.frame.question_ids(text, self.engine.encode)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """One call at a time, from whatever thread: answers are written into the session's own storage."""
        if not self._busy.acquire(blocking=False):
            raise RequestError("this session is answering or being changed; wait for it, or ask a second child")
        try:
            yield
        finally:
            self._busy.release()

    def __reduce__(self) -> NoReturn:
        raise RequestError("a session cannot be copied or pickled; use compact(Policy(keep=1)), or save(path)")


def one_engine(sessions: Sequence[Session]) -> Engine:
    """The engine of all these sessions. Raises RequestError if there are several, or one session occurs twice."""
    engine = sessions[0].engine
    if any(session.engine is not engine for session in sessions):
        raise RequestError("the sessions belong to different engines; keep each engine's sessions together")
    if len({id(session) for session in sessions}) < len(sessions):
        raise RequestError("a session occurs twice in this batch; its rows would write into each other")
    return engine


def ask_together(
    sessions: Sequence[Session], questions: Sequence[str | Sequence[int]], max_new_tokens: int = 128,
    on_token: Callable[[int], None] | None = None,
) -> list[Answer]:  # fmt: skip
    """Answer one question per session in one batch; all sessions belong to one engine and are left as they were.

    Children with kept sets of any shape go together: every row attends over its own entries, and the model's
    weights are read once per step for all of them. Raises RequestError as `Session.ask` does.
    """
    engine = one_engine(sessions)
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.exclusively())
        ids = [session.question_ids(question) for session, question in zip(sessions, questions, strict=True)]
        rows = engine.generate([session.state for session in sessions], ids, max_new_tokens, on_token)
    return [_answer(row, engine.decode(row.tokens)) for row in rows]


def _answer(row: Generation, text: str) -> Answer:
    rate = row.steps / row.decode_s if row.steps and row.decode_s > 0 else 0.0
    timings = {"question_s": row.question_s, "decode_s": row.decode_s, "decode_tokens_per_s": rate}
    return Answer(text, row.tokens, row.finish, timings, row.margin, row.misses, row.fetches, row.moved_bytes)


class _Pieces:
    """Token ids in, readable text out: a piece is held back while it ends inside a character."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stream: Callable[[str], None] | None) -> None:
        self._decode, self._stream = decode, stream
        self._tokens: list[int] = []
        self._shown = 0

    def add(self, token: int) -> None:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith("\ufffd"):
            self._emit(text)

    def finish(self) -> None:
        if self._tokens:
            self._emit(self._decode(self._tokens))

    def _emit(self, text: str) -> None:
        if self._stream is not None and len(text) > self._shown:
            self._stream(text[self._shown :])
        self._shown = len(text)

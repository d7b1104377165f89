"""What a user holds: one prefilled context, its compacted children, and questions to either.

doc = engine.prefill(text)          # whole cache
small = doc.compact(Policy(...))    # a child with less; doc is untouched
small.ask("...")                    # the child is restored after every answer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from wakesight.budget.resolve import entries_per_head, make_budget
from wakesight.cache.state import SessionState
from wakesight.core import Answer, KeptSet, Signals
from wakesight.engines.base import Engine
from wakesight.errors import RequestError
from wakesight.models.chat import Frame
from wakesight.policy import Policy
from wakesight.scores.base import Scorer
from wakesight.selection.topk import Ranking, rank, take


@dataclass(frozen=True)
class SessionStats:
    """Lengths in tokens, bytes as really held. kept_entries: per attention layer, per KV head, prefix included.

    kv_bytes_full: what the whole context takes; kv_bytes_kept: what this session holds of it, growth
    slack (kv_bytes_slack) not counted; kv_bytes_freed = full - kept. state_bytes: recurrent states,
    shared by a session and its children. sketch_bytes, reservoir_bytes: 0 without demotion.
    """

    logical_length: int
    physical_lengths: list[int]
    kept_entries: list[list[int]]
    kv_bytes_full: int
    kv_bytes_kept: int
    kv_bytes_slack: int
    kv_bytes_freed: int
    state_bytes: int
    sketch_bytes: int
    reservoir_bytes: int
    prefill_s: float
    score_s: float
    compact_s: float


class Session:
    """A context that was read once. Made by `Engine.prefill`, or by `compact` as a child.

    Any number of questions, each answered from the same state. `close()` (or a `with` block) returns
    the memory at once; a child may outlive its parent.
    """

    def __init__(
        self, engine: Engine, state: SessionState, frame: Frame, signals: Callable[[], Signals] | None, *,
        prefill_s: float, policy: Policy | None = None, score_s: float = 0.0, compact_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.policy = policy
        self.prefill_s, self.score_s, self.compact_s = prefill_s, score_s, compact_s
        self._state: SessionState | None = state
        self._frame = frame
        self._signals = signals  # None for a child: what it dropped cannot be scored again
        self._rankings: dict[tuple[Scorer, int], tuple[Ranking, float]] = {}
        self._answering = False

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
        """Which entries a child holds; None for a whole session."""
        return self.state.kept

    def signals(self) -> Signals:
        """What a scorer may read of this context: views, nothing is copied. Raises RequestError for a child."""
        self._check_whole()
        assert self._signals is not None
        return self._signals()

    def compact(self, policy: Policy) -> Session:
        """A child that physically holds only what `policy` keeps. This session stays as it is.

        Every policy with the same scorer shares one scoring, whatever its size or allocation.
        Raises RequestError for a policy without a size, one this context cannot meet, or a scorer whose
        signals were not recorded; WorkError for non-finite scores or lack of memory. Nothing is left behind.
        """
        state = self.state
        self._not_answering()
        self._check_whole()
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
        per_head = None
        if not isinstance(policy.allocation_rule, tuple):
            geometry = self.engine.geometry
            per_head = entries_per_head(
                keep=policy.keep, entries=policy.entries, limit_bytes=policy.bytes, n_body=n_body, prefix=prefix,
                fixed_bytes=state.recurrent_bytes + self._slack_bytes(), token_bytes=geometry.token_bytes,
            )  # fmt: skip
        budget = make_budget(policy.allocation_rule, per_head, n_body, self.engine.geometry)
        ranking, score_s = self._ranked(policy.scorer_method, prefix)
        start = time.perf_counter()
        child = state.compacted(take(ranking, budget), self.engine.growth)
        return Session(
            self.engine, child, self._frame, None, prefill_s=self.prefill_s, policy=policy, score_s=score_s,
            compact_s=time.perf_counter() - start,
        )  # fmt: skip

    def ask(
        self, text: str | Sequence[int], *, max_new_tokens: int = 128, stream: Callable[[str], None] | None = None
    ) -> Answer:
        """Answer one question, greedily, and restore the session bit for bit.

        text: the question, put where the chat template continues; or token ids fed as they are.
        stream: called with each new piece of text. Stops at an end-of-sequence id, also as first token.
        Raises RequestError for an empty question or one that does not fit the model's limit.
        """
        self._not_answering()
        ids = self._question(text)
        pieces = _Pieces(self.engine.decode, stream)
        self._answering = True
        try:
            made = self.engine.generate(self.state, ids, max_new_tokens, pieces.add if stream else None)
        finally:
            self._answering = False
        pieces.finish()
        rate = made.steps / made.decode_s if made.steps and made.decode_s > 0 else 0.0
        timings = {"question_s": made.question_s, "decode_s": made.decode_s, "decode_tokens_per_s": rate}
        return Answer(self.engine.decode(made.tokens), made.tokens, made.finish, timings)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [token, vocabulary] for ids fed after the context; the session is left as it was."""
        self._not_answering()
        return self.engine.logits(self.state, tokens)

    def cache(self) -> object:
        """A copy in the engine's own form, a transformers Cache: `model.generate(question_ids, cache=...)` goes on."""
        self._not_answering()
        return self.engine.cache(self.state)

    @property
    def stats(self) -> SessionStats:
        """Measured now, from the tensors this session holds."""
        state, geometry = self.state, self.engine.geometry
        full = state.logical_length * geometry.token_bytes
        kept = sum(slots.held_bytes for slots in state.slots)
        entries = [[length] * heads for length, heads in zip(state.physical_lengths, geometry.kv_heads, strict=True)]
        return SessionStats(
            logical_length=state.logical_length,
            physical_lengths=state.physical_lengths,
            kept_entries=entries,
            kv_bytes_full=full,
            kv_bytes_kept=kept,
            kv_bytes_slack=sum(slots.slack_bytes for slots in state.slots),
            kv_bytes_freed=full - kept,
            state_bytes=state.recurrent_bytes,
            sketch_bytes=0,
            reservoir_bytes=0,
            prefill_s=self.prefill_s,
            score_s=self.score_s,
            compact_s=self.compact_s,
        )

    def close(self) -> None:
        """Return this session's memory; its children keep theirs. Closing twice is fine."""
        self._not_answering()
        if self._state is not None:
            self._state.release()
        self._state, self._signals, self._rankings = None, None, {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ranked(self, scorer: Scorer, prefix: int) -> tuple[Ranking, float]:
        """This context's entries in the order `scorer` gives them; worked out once per scorer."""
        key = (scorer, prefix)
        if key not in self._rankings:
            start = time.perf_counter()
            signals = self.signals()
            for name in scorer.reads:
                _ = signals[name]
            name = type(scorer).__name__
            ranking = rank(scorer.score(signals).checked(name), prefix)
            self._rankings[key] = (ranking, time.perf_counter() - start)
        return self._rankings[key]

    def _check_whole(self) -> None:
        _ = self.state
        if self._signals is None:
            raise RequestError(
                "this session is already compacted and what it dropped is gone; compact its parent with another policy"
            )

    def _slack_bytes(self) -> int:
        from wakesight.cache.slots import GROWTH

        return (self.engine.growth + GROWTH) * self.engine.geometry.token_bytes

    def _question(self, text: str | Sequence[int]) -> list[int]:
        if not isinstance(text, str):
            return list(text)
        if not text.strip():
            raise RequestError("the question is empty; type one after --question")
        frame = self._frame
        return [*self.engine.encode(frame.separator + text), *frame.tail]

    def _not_answering(self) -> None:
        if self._answering:
            raise RequestError("this session is answering a question; wait for it, or ask a second child")


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

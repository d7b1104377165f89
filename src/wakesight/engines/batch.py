"""Several contexts at once: each row is a session, and all rows decode together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from wakesight.arguments import one_per_row, shown
from wakesight.core import Answer
from wakesight.engines.session import Session, SessionStats, ask_together, one_engine
from wakesight.errors import RequestError, WorkError
from wakesight.policy import Policy


class SessionBatch(Sequence[Session]):
    """Sessions of one engine side by side; a row equals the same session alone.

    Made by `Engine.prefill_batch`, by `compact`, or from any sessions: the children of one context under
    different policies, say.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        if isinstance(sessions, Session):
            raise RequestError("a batch is made of a list of sessions; give [session], or ask the session itself")
        self._rows = list(sessions) if isinstance(sessions, Iterable) else [sessions]
        if wrong := [row for row in self._rows if not isinstance(row, Session)]:
            raise RequestError(f"a batch is made of sessions, not of {shown(wrong[0])}; give what prefill made")
        if not self._rows:
            raise RequestError("a batch needs at least one session")
        one_engine(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Session:  # type: ignore[override]
        return self._rows[row]

    def __iter__(self) -> Iterator[Session]:
        return iter(self._rows)

    def compact(self, policy: Policy) -> SessionBatch:
        """A batch of children, one per row; all or none."""
        return _all_or_none(self._rows, lambda row: row.compact(policy))

    def append(self, texts: Sequence[str | Sequence[int]]) -> None:
        """Continue each row by its own text, as `Session.append` does.

        A text that any row refuses changes no row; a failure while reading (lack of memory) leaves the rows
        before it continued, and says how many.
        """
        engine = self._rows[0].engine
        ids = [row.text_ids(text) for row, text in zip(self._rows, self._one_each(texts, "texts"), strict=True)]
        for row, tokens in zip(self._rows, ids, strict=True):
            engine.check_extension(row.state, tokens)
        for done, (row, tokens) in enumerate(zip(self._rows, ids, strict=True)):
            try:
                row.append(tokens)
            except WorkError as error:
                raise WorkError(f"{done} of {len(ids)} rows were continued, then: {error}") from error

    def ask(self, questions: str | Sequence[str | Sequence[int]], *, max_new_tokens: int = 128) -> list[Answer]:
        """One answer per row. questions: one text for all rows, or a list with one per row."""
        return ask_together(self._rows, self._one_each(questions), max_new_tokens)

    def logits(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Per row, logits [token, vocabulary] for ids fed after its context."""
        rows = one_per_row(tokens, len(self._rows), "lists of ids")
        return [row.logits(ids) for row, ids in zip(self._rows, rows, strict=True)]

    def cache(self) -> object:
        """A copy of all rows as one transformers Cache: `model.generate(padded_question_ids, cache=...)` goes on."""
        with contextlib.ExitStack() as stack:
            for row in self._rows:
                stack.enter_context(row.exclusively())
            return self._rows[0].engine.cache([row.state for row in self._rows])

    @property
    def stats(self) -> list[SessionStats]:
        return [row.stats for row in self._rows]

    def close(self) -> None:
        for row in self._rows:
            row.close()

    def __enter__(self) -> SessionBatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _one_each(
        self, given: str | Sequence[str | Sequence[int]], name: str = "questions"
    ) -> Sequence[str | Sequence[int]]:
        if isinstance(given, str):
            return [given] * len(self._rows)
        return one_per_row(given, len(self._rows), name)


def _all_or_none(rows: Sequence[Session], make: Callable[[Session], Session]) -> SessionBatch:
    made: list[Session] = []
    try:
        for row in rows:
            made.append(make(row))
    except BaseException:
        for session in made:
            session.close()
        raise
    return SessionBatch(made)

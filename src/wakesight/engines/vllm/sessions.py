"""Which sessions the engine holds: their ids, tokens and blocks, who uses them, and when they go.

Plain values and counting; a block is whatever object the engine's pool hands out, and giving it back is the pool's
work. Time comes from outside, so that tests need not wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from wakesight.engines.vllm.keys import SessionId
from wakesight.errors import RequestError

LOOK = 1.0  # seconds between two looks for sessions whose time is over


class Block(Protocol):
    """One block of the engine's pool."""

    @property
    def block_id(self) -> int: ...


Blocks = tuple[tuple[Block, ...], ...]  # per KV-cache group


@dataclass
class Held:
    """One session. counts: entries held per attention layer (and KV head), prefix included.

    users: requests that run on it now; while there are any its blocks stay, even if it was dropped.
    """

    id: SessionId
    tokens: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: Blocks
    prefix: int
    created: float
    used: float
    parent: SessionId | None = None
    about: dict[str, Any] = field(default_factory=dict)
    users: int = 0
    dropped: bool = False

    @property
    def length(self) -> int:
        """The logical length."""
        return len(self.tokens)

    @property
    def block_ids(self) -> set[int]:
        """Its distinct blocks; a child shares those of recurrent states with its parent."""
        return {block.block_id for group in self.blocks for block in group}

    @property
    def whole(self) -> bool:
        """Whether it holds every entry of its context."""
        return self.parent is None


class SessionTable:
    """Sessions by id.

    release: gives a session's blocks back, once nobody uses it. limit: most distinct blocks that sessions may hold.
    ttl: seconds without use after which one goes.
    """

    def __init__(self, release: Callable[[Held], None], clock: Callable[[], float], *, limit: int, ttl: float) -> None:
        self._release, self._clock = release, clock
        self.limit, self.ttl = limit, ttl
        self._held: dict[SessionId, Held] = {}
        self._leaving: list[Held] = []  # dropped, still in use
        self._gone: list[SessionId] = []  # let go since `take_gone`
        self._looked = float("-inf")
        self.evictions = 0
        self.drops = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, session: object) -> bool:
        return session in self._held

    def all(self) -> list[Held]:
        """Every session, the one used longest ago first."""
        return sorted(self._held.values(), key=lambda held: held.used)

    def get(self, session: SessionId) -> Held:
        """The session of that id, used now. Raises RequestError if there is none."""
        held = self._held.get(session)
        if held is None:
            raise RequestError(
                f"there is no session {known_as(session)}: it was never prefilled here, was dropped, was not used for "
                f"{self.ttl:.0f} s, or made room for others; send its context again with ws_session"
            )
        held.used = self._clock()
        return held

    def matching(self, session: SessionId, prompt: Sequence[int]) -> Held:
        """The session, if `prompt` begins with its tokens and goes on behind them. Raises RequestError else."""
        held = self.get(session)
        if len(prompt) <= held.length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the session {held.length}: send the whole context and at "
                "least one token behind it"
            )
        if tuple(prompt[: held.length]) != held.tokens:
            at = next(i for i, (a, b) in enumerate(zip(prompt, held.tokens, strict=False)) if a != b)
            raise RequestError(
                f"the prompt differs from the session's context at token {at} of {held.length}; send the very tokens "
                "that were prefilled, and the question behind them"
            )
        return held

    def check_new(self, session: SessionId) -> None:
        """Raise RequestError if that id is taken."""
        if any(held.id == session for held in self._leaving):
            raise RequestError(
                f"the session {known_as(session)} was dropped and is still in use; wait, or take a new id"
            )
        if session in self._held:
            raise RequestError(f"the session {known_as(session)} exists already; drop it first, or take a new id")

    @property
    def blocks(self) -> int:
        """Distinct blocks that sessions hold, those dropped but in use included."""
        return len(self._distinct())

    def _distinct(self) -> set[int]:
        return set().union(*(held.block_ids for held in [*self._held.values(), *self._leaving]))

    def add(self, held: Held) -> None:
        """Keep a session; older ones that nobody uses go until it fits under the limit.

        All or nothing: raises RequestError and keeps everything as it was if it cannot fit.
        """
        self.check_new(held.id)
        own = held.block_ids
        if self._with(own, ()) > self.limit:
            leaving: list[SessionId] = []
            for older in self.all():
                if older.users == 0 and older.id != held.parent:
                    leaving.append(older.id)
                    if self._with(own, leaving) <= self.limit:
                        break
            else:
                raise RequestError(
                    f"the session needs {len(own)} blocks, and sessions may hold {self.limit} in all, of which "
                    f"{self.blocks} are taken by sessions in use; drop some, or start with a larger pool"
                )
            for session in leaving:
                self.evictions += 1
                self.drop(session)
        self._held[held.id] = held

    def _with(self, own: set[int], leaving: Sequence[SessionId]) -> int:
        stay = [held for held in self._held.values() if held.id not in leaving] + self._leaving
        return len(own.union(*(held.block_ids for held in stay)))

    def drop(self, session: SessionId) -> None:
        """Forget a session; its blocks go back when the last request on it ends. RequestError if there is none."""
        held = self.get(session)
        del self._held[session]
        self.drops += 1
        held.dropped = True
        if held.users:
            self._leaving.append(held)
        else:
            self._let_go(held)

    def enter(self, held: Held) -> None:
        """One more request runs on it."""
        held.users += 1

    def leave(self, held: Held) -> None:
        """A request on it ended."""
        held.users -= 1
        held.used = self._clock()
        if held.dropped and held.users == 0:
            self._leaving.remove(held)
            self._let_go(held)

    def _let_go(self, held: Held) -> None:
        self._gone.append(held.id)
        self._release(held)

    def expire(self) -> None:
        """Drop what was not used for `ttl` seconds; called with every step, it looks once a second."""
        now = self._clock()
        if now < self._looked + LOOK:
            return
        self._looked = now
        for held in self.all():
            if held.users == 0 and now - held.used > self.ttl:
                self.drop(held.id)

    def evict_one(self) -> bool:
        """Drop the session used longest ago that nobody uses; False if there is none."""
        for held in self.all():
            if held.users == 0:
                self.evictions += 1
                self.drop(held.id)
                return True
        return False

    def take_gone(self) -> tuple[SessionId, ...]:
        """Ids dropped, and used by nobody any more, since the last call: whoever holds something of theirs lets go."""
        gone, self._gone = tuple(self._gone), []
        return gone


def known_as(session: SessionId) -> str:
    """What an id is called in lists, logs and errors: enough to tell sessions apart, and no key to them."""
    return hashlib.sha256(session.encode()).hexdigest()[:12]

"""The scheduler's half: admits our requests, hands them their sessions' blocks, and keeps or drops sessions.

Blocks, queues and statuses are vLLM's; this class is called from `patches.py` at the points where they change, and
touches them through the few attributes named here. What it decides goes to the worker with the next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wakesight.engines.recording import wanted_signals
from wakesight.engines.vllm import keys
from wakesight.engines.vllm.counts import child_counts
from wakesight.engines.vllm.facts import Facts
from wakesight.engines.vllm.keys import Attach, Drop, Fork, Info, Keep, SessionId
from wakesight.engines.vllm.messages import Compacted, Gather, Result, Start, Step
from wakesight.engines.vllm.sessions import Held, SessionTable, known_as
from wakesight.engines.vllm.settings import Settings
from wakesight.errors import RequestError

logger = logging.getLogger("vllm.wakesight")  # below vLLM's own, whose handlers print it

REFUSED = "refused"  # in what a request brings back: why it was not done


@dataclass
class Admitted:
    """A request of ours that was let in. held: the session it runs on; record: signals to listen for; counts: of the
    child it makes."""

    ask: Keep | Fork | Attach
    held: Held | None = None
    record: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    compacted: Compacted | None = None


class Scheduling:
    """Of one engine. managers: vLLM's per KV-cache group, in order; pool: its block pool."""

    def __init__(
        self, facts: Facts, managers: Sequence[Any], pool: Any, settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.facts, self.managers, self.pool, self._clock = facts, managers, pool, clock
        limit = int(settings.share * (pool.num_gpu_blocks - 1))
        self.table = SessionTable(self._release, clock, limit=limit, ttl=settings.ttl)
        self.admitted: dict[str, Admitted] = {}
        self._starting: set[str] = set()
        self._saved: dict[str, SessionId] = {}
        self.totals = {
            "forks": 0, "refused": 0, "score_s": 0.0, "gather_s": 0.0, "entries_kept": 0, "entries_full": 0,
        }  # fmt: skip

    # --- a request's way in

    def arrive(self, request: str, extra: Any, prompt: Sequence[int] | None) -> dict[str, Any] | None:
        """Let a request in (None), or answer it on the spot. Raises RequestError for what is refused."""
        ask = keys.read(extra)
        if ask is None:
            return None
        self.table.expire()
        if isinstance(ask, Drop):
            self.table.drop(ask.session)
            return {"session": known_as(ask.session), "dropped": True}
        if isinstance(ask, Info):
            return self.info(self.table.get(ask.session), kept=True)
        if prompt is None:
            raise RequestError(
                "sessions are made of token ids, and this request has embeddings; send text or token ids"
            )
        self.admitted[request] = self._admit(ask, prompt)
        return None

    def _admit(self, ask: Keep | Fork | Attach, prompt: Sequence[int]) -> Admitted:
        if isinstance(ask, Keep):
            self.table.check_new(ask.session)
            if ask.protect > len(prompt):
                raise RequestError(
                    f"ws_protect={ask.protect} is more than the context's {len(prompt)} tokens; protect fewer"
                )
            return Admitted(ask, record=self._signals(ask.record))
        held = self.table.matching(ask.parent if isinstance(ask, Fork) else ask.session, prompt)
        counts: tuple[int, ...] = ()
        if isinstance(ask, Fork):
            self.table.check_new(ask.child)
            if not held.whole:
                raise RequestError(
                    f"the session {known_as(held.id)} is compacted already; fork from the whole one it came from"
                )
            counts = self._counts(ask, held)
        self.table.enter(held)
        return Admitted(ask, held, counts=counts)

    def _signals(self, names: Sequence[str]) -> tuple[str, ...]:
        """Signals to listen for, of a list of signals and scorers. Raises RequestError for what is not heard here."""
        wanted = wanted_signals(names, self.facts)
        if unheard := next((name for name in wanted if name in keys.UNHEARD), None):
            raise RequestError(f"vLLM's kernels do not tell {unheard}; leave it and what reads it out of ws_record")
        return wanted

    def _counts(self, ask: Fork, held: Held) -> tuple[int, ...]:
        prefix = held.prefix if ask.policy.protect is None else ask.policy.protect
        tables = self.facts.tables(ask.policy.allocation_rule)
        return child_counts(ask.policy, held.length, prefix, self.facts.geometry, tables)

    def hit(self, request: str) -> tuple[list[list[Any]], int] | None:
        """Blocks per group that a request starts from, and the tokens they stand for; None for others."""
        admitted = self.admitted.get(request)
        if admitted is None or admitted.held is None:
            return None
        held = admitted.held
        blocks: list[list[Any]] = [list(group) for group in held.blocks]
        for group, offset in zip(self.facts.groups, self._offsets(admitted), strict=True):
            self.managers[group].offsets[request] = offset
            if admitted.counts:
                blocks[group] = []  # a child gets blocks of its own
        return blocks, held.length

    def _offsets(self, admitted: Admitted) -> tuple[int, ...]:
        held = admitted.held
        if held is None:
            return (0,) * len(self.facts.layers)
        return tuple(held.length - count for count in admitted.counts or held.counts)

    # --- what the worker is told

    def step(self, started: Sequence[str]) -> Step:
        """For the worker. started: requests that run for the first time, or again after a preemption."""
        step = Step(saved=self._saved, dropped=self.table.take_gone())
        self._saved = {}
        for request in started:
            if request in self.admitted:
                step.started[request] = self._start(self.admitted[request])
        return step

    def _start(self, admitted: Admitted) -> Start:
        ask, held, offsets = admitted.ask, admitted.held, self._offsets(admitted)
        if isinstance(ask, Keep):
            return Start(offsets, admitted.record)
        if held is None or not isinstance(ask, Fork):
            return Start(offsets)
        gather = Gather(
            parent=held.id, policy=ask.policy.to_json(), tokens=held.length, counts=admitted.counts,
            prefix=held.prefix if ask.policy.protect is None else ask.policy.protect,
            blocks=tuple(tuple(block.block_id for block in held.blocks[group]) for group in self.facts.groups),
        )  # fmt: skip
        return Start(offsets, gather=gather)

    def heard(self, result: Result) -> dict[str, str]:
        """What the worker did; gives the requests that must end, with the reason."""
        for request, compacted in result.compacted.items():
            admitted = self.admitted.get(request)
            if admitted is None or not isinstance(admitted.ask, Fork) or admitted.held is None:
                continue
            admitted.compacted = compacted
            full = admitted.held.length * len(admitted.counts)
            self.totals["forks"] += 1
            self.totals["score_s"] += compacted.score_s
            self.totals["gather_s"] += compacted.gather_s
            self.totals["entries_kept"] += sum(admitted.counts)
            self.totals["entries_full"] += full
            logger.info(
                "compacted %s: %s by %s, %d of %d entries per KV head, scored in %.3f s, copied in %.3f s",
                known_as(admitted.ask.child), known_as(admitted.held.id), admitted.ask.policy.scorer,
                sum(admitted.counts), full, compacted.score_s, compacted.gather_s,
            )  # fmt: skip
        return result.failed

    # --- a request's way out

    def finished(self, request: str, well: bool, prompt: Sequence[int], computed: int) -> dict[str, Any] | None:
        """Before its blocks are freed: keep the session it was for. well: it came to its own end.

        Gives what the request brings back; None for requests that are none of ours.
        """
        admitted = self.admitted.pop(request, None)
        if admitted is None:
            return None
        try:
            if well and isinstance(admitted.ask, Keep):
                return self._keep(request, admitted.ask, prompt, computed)
            if well and isinstance(admitted.ask, Fork):
                return self._keep_child(request, admitted)
            return self.info(admitted.held) if well and admitted.held else None
        except RequestError as error:
            self.totals["refused"] += 1
            return {REFUSED: str(error)}
        finally:
            if admitted.held is not None:
                self.table.leave(admitted.held)

    def _keep(self, request: str, ask: Keep, prompt: Sequence[int], computed: int) -> dict[str, Any]:
        if computed != len(prompt):
            raise RequestError(
                f"the request read {computed} tokens of a context of {len(prompt)}, so its recurrent states are not "
                "those of the context; send it with max_tokens=1"
            )
        lengths = (len(prompt),) * len(self.facts.layers)
        held = self._held(request, ask.session, tuple(prompt), lengths, ask.protect)
        self._add(held)
        self._saved[request] = ask.session
        return self.info(held)

    def _keep_child(self, request: str, admitted: Admitted) -> dict[str, Any]:
        ask, parent, compacted = admitted.ask, admitted.held, admitted.compacted
        assert isinstance(ask, Fork)
        assert parent is not None
        if compacted is None:
            raise RequestError("the child was never filled; send the request again")
        prefix = parent.prefix if ask.policy.protect is None else ask.policy.protect
        held = self._held(request, ask.child, parent.tokens, admitted.counts, prefix, parent)
        held.about = {
            "policy": ask.policy.to_json(), "score_s": compacted.score_s, "gather_s": compacted.gather_s,
            "kept": compacted.kept,
        }  # fmt: skip
        self._add(held)
        return self.info(held)

    def _held(
        self, request: str, session: SessionId, tokens: tuple[int, ...], counts: tuple[int, ...], prefix: int,
        parent: Held | None = None,
    ) -> Held:  # fmt: skip
        """The request's own blocks of attention layers; recurrent states are its own, or the parent's for a child."""
        blocks: list[tuple[Any, ...]] = []
        by_group = dict(zip(self.facts.groups, counts, strict=True))
        for group, manager in enumerate(self.managers):
            own = manager.req_to_blocks[request]
            if group in by_group:
                blocks.append(tuple(own[: -(-by_group[group] // self.facts.block_size)]))
            else:
                blocks.append(tuple(own) if parent is None else parent.blocks[group])
        now = self._clock()
        return Held(session, tokens, counts, tuple(blocks), prefix, now, now, None if parent is None else parent.id)

    def _add(self, held: Held) -> None:
        self.table.add(held)  # may drop others, so before this one's blocks are claimed
        for group in held.blocks:
            self.pool.touch(list(group))

    def _release(self, held: Held) -> None:
        for group in held.blocks:
            self.pool.free_blocks(list(reversed(group)))

    def make_room(self) -> bool:
        """Drop the session used longest ago that nobody uses; False if there is none."""
        return self.table.evict_one()

    # --- what is told

    def info(self, held: Held, kept: bool = False) -> dict[str, Any]:
        """Of one session, as plain JSON. kept: with the positions per attention layer and KV head."""
        own = held.block_ids
        entries = [[count] * heads for count, heads in zip(held.counts, self.facts.geometry.kv_heads, strict=True)]
        found: dict[str, Any] = {
            "session": known_as(held.id), "tokens": held.length, "prefix": held.prefix, "kept_entries": entries,
            "blocks": len(own), "bytes": len(own) * self.facts.block_bytes, "users": held.users,
            "parent": held.parent and known_as(held.parent), "idle_s": self._clock() - held.used,
            **{name: value for name, value in held.about.items() if name != "kept"},
        }  # fmt: skip
        if kept and "kept" in held.about:
            found["kept"] = [layer.tolist() for layer in held.about["kept"]]
        return found

    def changes(self) -> tuple[float, ...]:
        """Another value whenever a session came or went, or something was counted; cheap."""
        return (len(self.table), self.table.drops, *self.totals.values())

    def status(self) -> dict[str, Any]:
        """All sessions, without their ids, and the totals since the start."""
        free = self.pool.get_num_free_blocks()
        return {
            "sessions": [self.info(held) for held in self.table.all()], "session_blocks": self.table.blocks,
            "session_block_limit": self.table.limit, "free_blocks": free, "pool_blocks": self.pool.num_gpu_blocks - 1,
            "block_bytes": self.facts.block_bytes, "block_tokens": self.facts.block_size,
            "evictions": self.table.evictions, "requests": len(self.admitted), **self.totals,
        }  # fmt: skip

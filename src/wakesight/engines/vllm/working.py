"""The worker's half: records prefills, fills children, and knows by how much each row's layers are shorter.

It acts on the scheduler's word alone (`messages.Step`), so what it holds of a session goes when the scheduler's part
does. Called around vLLM's own step by `patches.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from wakesight.cache.state import SessionState
from wakesight.core import KeptSet, Signals
from wakesight.engines.recording import WINDOW, Recording
from wakesight.engines.vllm.counts import child_budget
from wakesight.engines.vllm.facts import Facts
from wakesight.engines.vllm.keys import SessionId
from wakesight.engines.vllm.messages import Compacted, Gather, Result, Start, Step
from wakesight.engines.vllm.pages import PagedSlots, Pages
from wakesight.engines.vllm.taps import Row, Taps
from wakesight.errors import RequestError, WakesightError
from wakesight.policy import Policy
from wakesight.scores.base import Scorer, for_model, score
from wakesight.selection.topk import rank, take

logger = logging.getLogger("vllm.wakesight")


@dataclass
class Running:
    """A request of ours in the batch. gather: what it still has to fill before its first step."""

    offsets: tuple[int, ...]
    recording: Recording | None
    gather: Gather | None
    heard: int = 0


class Worker:
    """Of one engine. pages: per attention layer."""

    def __init__(self, facts: Facts, taps: Taps, pages: Sequence[Pages]) -> None:
        self.facts, self.taps, self.pages = facts, taps, tuple(pages)
        self.recordings: dict[SessionId, Recording] = {}
        self.running: dict[str, Running] = {}
        self.result = Result()

    def receive(self, step: Step | None, finished: Sequence[str], preempted: Sequence[str]) -> None:
        """What ended and what begins, before vLLM's own states change."""
        saved = step.saved if step else {}
        for request in finished:
            ended = self.running.pop(request, None)
            if ended is not None and ended.recording is not None and request in saved:
                self.recordings[saved[request]] = ended.recording
        for request in preempted:
            self.running.pop(request, None)
        if step:
            for session in step.dropped:
                self.recordings.pop(session, None)
            for request, start in step.started.items():
                self.running[request] = self._begun(start)

    def _begun(self, start: Start) -> Running:
        recording = None if start.record is None else self.taps.recording(WINDOW, start.record)
        return Running(start.offsets, recording, start.gather)

    def prepare(self, requests: Sequence[str], scheduled: Sequence[int], tables: Sequence[Any]) -> dict[int, Tensor]:
        """Before the slots of a step are worked out: fills new children and says which rows to record.

        requests: the batch's rows. scheduled: new tokens of each. tables: vLLM's block table per KV-cache group.
        Gives per group of an attention layer by how much each row is shorter than its logical length; groups where
        no row is are left out.
        """
        self.taps.rows = []
        begin = 0
        for at, (request, count) in enumerate(zip(requests, scheduled, strict=True)):
            running = self.running.get(request)
            if running is not None:
                if running.gather is not None:
                    self._fill(request, running.gather, at, tables)
                    running.gather = None
                if running.recording is not None:
                    self.taps.rows.append(Row(running.recording, begin, begin + int(count), running.heard))
                    running.heard += int(count)
            begin += int(count)
        return self._offsets(requests)

    def _offsets(self, requests: Sequence[str]) -> dict[int, Tensor]:
        rows = [self.running[request].offsets if request in self.running else None for request in requests]
        if not any(row is not None and any(row) for row in rows):
            return {}
        whole = (0,) * len(self.facts.layers)
        shorter = torch.tensor([row or whole for row in rows])  # [row, layer]
        return {group: shorter[:, layer] for layer, group in enumerate(self.facts.groups)}

    def take_result(self) -> Result:
        """What happened since the last call."""
        result, self.result = self.result, Result()
        return result

    def _fill(self, request: str, gather: Gather, row: int, tables: Sequence[Any]) -> None:
        """Copy what is kept into the row's own blocks; a refusal leaves zeros there, and the request will end."""
        try:
            self.result.compacted[request] = self._gather(gather, row, tables)
        except Exception as error:  # whatever a scorer raises ends one request, and not the engine
            if not isinstance(error, WakesightError):
                logger.exception("compacting for the request %s failed", request)
            self.result.failed[request] = str(error) or type(error).__name__
            for layer, count in enumerate(gather.counts):
                self.pages[layer].zero(self._own_blocks(row, layer, tables), count)

    def _gather(self, gather: Gather, row: int, tables: Sequence[Any]) -> Compacted:
        start = time.perf_counter()
        kept = self._kept(gather)
        scored = time.perf_counter()
        for layer, positions in enumerate(kept.positions):
            where = torch.stack(positions).unsqueeze(-1)
            keys, values = self.pages[layer].read(gather.blocks[layer], gather.tokens)
            self.pages[layer].write(
                self._own_blocks(row, layer, tables),
                keys.gather(1, where.expand(-1, -1, keys.shape[-1])),
                values.gather(1, where.expand(-1, -1, values.shape[-1])),
            )
        plain = tuple(torch.stack(positions).to("cpu", torch.int32).numpy() for positions in kept.positions)
        return Compacted(plain, scored - start, time.perf_counter() - scored)

    def _own_blocks(self, row: int, layer: int, tables: Sequence[Any]) -> np.ndarray:
        """The kernel's blocks of a row, as vLLM's table has them."""
        table = tables[self.facts.groups[layer]]
        blocks: np.ndarray = table.block_table.np[row, : table.num_blocks_per_row[row]].copy()
        return blocks

    def _kept(self, gather: Gather) -> KeptSet:
        """By the same scorer, budget and selection code as on transformers."""
        policy = Policy.from_json(gather.policy)
        method = cast(Scorer, for_model(policy.scorer_method, self.facts))
        geometry = self.facts.geometry
        scores = score(method, self._signals(gather, method), geometry.kv_heads)
        tables = self.facts.tables(policy.allocation_rule)
        budget = child_budget(policy, gather.tokens, gather.prefix, geometry, tables)
        kept = take(rank(scores, gather.prefix), budget)
        if tuple(heads[0] for heads in kept.counts) != gather.counts:
            raise RuntimeError(f"scheduler and worker disagree: {gather.counts} entries and {kept.counts}")
        return kept

    def _signals(self, gather: Gather, method: Scorer) -> Signals:
        recording = self.recordings.get(gather.parent)
        if recording is None:
            raise RequestError("what was recorded of the parent session is gone; prefill its context again")
        recording.check_heard(gather.tokens)
        slots = [
            PagedSlots(pages, blocks, gather.tokens) for pages, blocks in zip(self.pages, gather.blocks, strict=True)
        ]
        context = SimpleNamespace(logical_length=gather.tokens, prefix=gather.prefix, kept=None, slots=slots)
        signals = recording.signals(cast(SessionState, context))
        if getattr(method, "needs_artifact", False):
            signals = dataclasses.replace(signals, artifact=self.facts.artifact)
        return signals

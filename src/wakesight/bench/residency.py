"""Decode speed and faithfulness of a demoted cache: reactive at several rerank intervals, beside everything else.

All arms decode the same tokens, those that the whole cache chooses, so that they do equal work and every step can be
compared: `agreement` is the share of steps in which an arm would have chosen the same token. Timed are decode steps
alone; putting an arm back, which fetches pages, is not.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from wakesight.bench.machine import copy_bandwidth, versions, weight_bytes
from wakesight.bench.pairs import alternate, median_ms, ratio
from wakesight.bench.plain import plain_model, plain_prefill, remember, rewind
from wakesight.cache.residency.dropping import RKV, DecodeDrop, DecodeSnapKV
from wakesight.cache.residency.flexi_slots import HeadGroups, flexicache_slots
from wakesight.cache.residency.flexicache import INTERVAL
from wakesight.cache.residency.paged import PagedSlots, Traffic
from wakesight.cache.slots import Slots
from wakesight.engines.hf import compat
from wakesight.engines.hf.dropping import Dropping, ask_dropping
from wakesight.engines.hf.engine import HFEngine
from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.evaluation.graders import grade
from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites import recall, text
from wakesight.policy import Policy
from wakesight.residency import Residency
from wakesight.traces.head_profile import CHUNK, unstable_heads
from wakesight.traces.overlap import pack

PLAIN, WHOLE = "transformers DynamicCache", "ours, whole cache"
HELD = (32, 64)  # B, pages per KV head
INTERVALS = (1, 2, 4, 8, 16)  # R
PAGE = 16
DENSE = 2  # layers, Quest's
CALIBRATED = 4096  # tokens of the text that heads are profiled on, at most
PROFILED = 4 * CHUNK  # its decode steps


@dataclass(frozen=True)
class Script:
    """What every arm is fed. inputs: one id per step. expected: what the whole cache chose behind each, [step]."""

    inputs: list[Tensor]
    expected: Tensor


class Arm:
    """A session under one policy, and what its last timed run showed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.agreed = 0
        self._traffic = Traffic()

    def run(self, script: Script) -> float:
        """Seconds of its decode steps; the session is put back."""
        engine, state = cast(HFEngine, self.session.engine), self.session.state
        held, before, position = state.physical_lengths, state.traffic, state.logical_length
        cache, chosen = engine.continuing([state]), []
        start = _now(engine)
        for step, token in enumerate(script.inputs):
            logits = engine.forward(engine.model, token, cache, position + step, logits_to_keep=1).logits
            chosen.append(logits[:, -1].argmax(dim=-1))
        seconds = _now(engine) - start
        self._traffic = state.traffic - before
        self.agreed = int((torch.cat(chosen) == script.expected).sum())
        state.truncate(held)
        return seconds

    def ask(self, question: Question) -> str:
        return self.session.ask(question.text, max_new_tokens=question.max_new_tokens).text

    def cost(self, steps: int) -> dict[str, Any]:
        """Fast memory, and traffic per decode step, over all layers and KV heads."""
        stats, state = self.session.stats, self.session.state
        names = ("wants", "misses", "fetches", "moved_bytes")
        return {
            "kv_bytes_kept": stats.kv_bytes_kept, "sketch_bytes": stats.sketch_bytes,
            "kv_bytes_slack": stats.kv_bytes_slack, "reservoir_bytes": stats.reservoir_bytes,
            "read_bytes": sum(_read_bytes(slots) for slots in state.slots),
            **{f"{name}_per_step": getattr(self._traffic, name) / steps for name in names},
        }  # fmt: skip


class DropArm(Arm):
    """A method that drops while it decodes: it starts with everything, and its bytes are those at the end."""

    def __init__(self, session: Session, rule: DecodeDrop) -> None:
        super().__init__(session)
        self._rule = rule
        self._held_bytes = 0

    def run(self, script: Script) -> float:
        engine, chosen = cast(HFEngine, self.session.engine), []
        tokens = [int(token) for token in script.inputs]
        with Dropping(engine, self.session.state, self._rule) as decoding:
            start = _now(engine)
            for token in tokens:
                chosen.append(decoding.read([token]).argmax())
            seconds = _now(engine) - start
            self._held_bytes = decoding.held_bytes
        self.agreed = int((torch.stack(chosen) == script.expected).sum())
        return seconds

    def ask(self, question: Question) -> str:
        return ask_dropping(self.session, question.text, self._rule, max_new_tokens=question.max_new_tokens).text

    def cost(self, steps: int) -> dict[str, Any]:
        return {**super().cost(steps), "kv_bytes_kept": self._held_bytes, "read_bytes": self._held_bytes}


def bench_residency(
    engine: HFEngine, *, tokens: int, steps: int = 64, rounds: int = 9, attend: int = 32,
    held: Sequence[int] = HELD, intervals: Sequence[int] = INTERVALS,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Rows {arm, tokens_per_s, speedup, over_whole, bytes of fast memory, traffic per step, agreement, recall}.

    tokens: of context, question and answer together. The context is a transcript of the recall suite with four facts;
    `recall` is the share of them that an arm still knows. attend: K, pages of 16 that one head reads per step. held: B.
    Arms: transformers and ours with everything in one piece; reactive at every B and R; frozen cadence (FlexiCache's
    schedule with no head dense); flexicache (a quarter of the heads dense, by a profile of a calibration text); quest
    (everything in fast memory, K pages read, two layers dense); rkv and snapkv, which drop while they decode. Raises
    RequestError for a context of hardly more than B pages, and for a model whose pages cannot be demoted.
    """
    engine.check_demotable()
    if tokens // PAGE < max(attend, *held) + 8:
        raise RequestError(
            f"a context of {tokens} tokens is hardly more than the {max(attend, *held)} pages of {PAGE} that are held, "
            f"so nothing would be fetched; raise --tokens to {(max(attend, *held) + 8) * PAGE} at least"
        )
    context = _context(engine, tokens, steps)
    with contextlib.ExitStack() as opened:
        whole = opened.enter_context(engine.prefill(context.text, instruction=context.instruction))
        script = _script(engine, whole, steps)
        profile = _profile(engine, attend, min(tokens, CALIBRATED))
        arms: dict[str, Arm] = {WHOLE: Arm(whole)}
        for name, policy in _policies(whole, attend, held, intervals, steps).items():
            arms[name] = Arm(opened.enter_context(whole.compact(policy)))
        nobody = [torch.zeros_like(heads) for heads in profile]
        for name, unstable in ((f"frozen cadence R={INTERVAL}", nobody), (f"flexicache R={INTERVAL}", profile)):
            arms[name] = Arm(opened.enter_context(_flexicache(whole, unstable, attend, steps)))
        for name, rule in _drops(min(held) * PAGE, steps).items():
            arms[name] = DropArm(whole, rule)
        rows, seconds = _measured(engine, arms, script, rounds, context, on_round)
        length, full = len(whole.tokens), whole.stats.kv_bytes_full
    return {
        "bench": "residency", "model": engine.name, "context_tokens": length,
        "kv_bytes_full": full, "attend": attend, "page_size": PAGE,
        "steps": steps, "rounds": rounds, "questions": len(context.questions),
        "heads": sum(len(heads) for heads in profile), "unstable_heads": sum(int(heads.sum()) for heads in profile),
        "copy_bandwidth": copy_bandwidth(engine.device), "weight_bytes": weight_bytes(engine.model),
        "versions": versions(), "rows": rows, "seconds": seconds,
    }  # fmt: skip


def _context(engine: HFEngine, tokens: int, steps: int) -> Context:
    """Four facts, then unrelated turns, in at most so many tokens that an answer of `steps` has room."""
    length = tokens - max(0, steps - recall.NEW_TOKENS)
    options = SuiteOptions(length, 1, 0, lambda words: len(engine.encode(words)), tasks=("recall_4",))
    return next(recall.contexts(options))


def _script(engine: HFEngine, whole: Session, steps: int) -> Script:
    """What the whole cache writes behind the context, end-of-sequence ids included."""
    state = whole.state
    held, position, cache = state.physical_lengths, state.logical_length, engine.continuing([state])
    inputs = [torch.tensor([engine.encode("\n")[:1]], device=engine.device)]
    for step in range(steps):
        logits = engine.forward(engine.model, inputs[-1], cache, position + step, logits_to_keep=1).logits
        inputs.append(logits[:, -1].argmax(dim=-1, keepdim=True))
    state.truncate(held)
    return Script(inputs[:-1], torch.cat(inputs[1:])[:, 0])


def _policies(
    whole: Session, attend: int, held: Sequence[int], intervals: Sequence[int], steps: int
) -> dict[str, Policy]:  # fmt: skip
    found = {
        f"reactive B={pages} R={interval}": Residency(pages=pages, attend=attend, rerank=interval)
        for pages in held
        for interval in intervals
    }
    found["quest"] = Residency(pages=_all_pages(whole, steps), attend=attend, dense_layers=DENSE)
    return {name: Policy(unit="page", evicted="demote", residency=one) for name, one in found.items()}


def _drops(entries: int, steps: int) -> dict[str, DecodeDrop]:
    """As many entries per head as the least B has pages for; cut every 128 tokens, or often enough to be seen here."""
    every = max(8, min(128, steps // 4))
    return {
        f"rkv every {every}": RKV(entries, every),
        f"snapkv every {every}": DecodeSnapKV(entries, every),
    }


def _all_pages(session: Session, steps: int) -> int:
    """As many as there are at the end of an answer, its question included."""
    return (len(session.tokens) + steps + 512) // PAGE


def _profile(engine: HFEngine, attend: int, tokens: int) -> list[Tensor]:
    """Per attention layer bool [kv_head], the unstable heads, from decoding behind a calibration text."""
    ids = engine.encode(text.packaged("expository")[: 16 * tokens])[:tokens]
    sets: list[list[Tensor]] = []
    with engine.prefill(ids) as whole:
        residency = Residency(pages=_all_pages(whole, PROFILED), attend=attend)
        with whole.compact(Policy(unit="page", evicted="demote", residency=residency)) as session:
            for slots in session.state.paged:
                rows: list[Tensor] = []
                slots.listener = functools.partial(_remember, rows)
                sets.append(rows)
            _script(engine, session, PROFILED)
    wanted = torch.cat([torch.stack(rows) for rows in sets], dim=1).cpu().numpy()  # [step, head, K]
    count = int(wanted.max()) + 1
    unstable = torch.from_numpy(unstable_heads(pack(wanted, count), np.full(len(wanted), count, np.int64)))
    heads = [rows[0].shape[0] for rows in sets]
    return list(torch.split(unstable, heads))


def _remember(rows: list[Tensor], step: int, pages: Tensor, weights: Tensor) -> None:
    rows.append(pages)


def _flexicache(whole: Session, unstable: Sequence[Tensor], attend: int, steps: int) -> Session:
    """A session under FlexiCache's rule; its stable heads start with the pages that a reactive one starts with."""
    residency = Residency(pages=attend, attend=attend)
    room = _all_pages(whole, steps)
    with whole.compact(Policy(unit="page", evicted="demote", residency=residency)) as start:

        def make(layer: int) -> HeadGroups:
            like, source = start.state.slots[layer], whole.state.slots[layer]
            assert isinstance(like, PagedSlots)
            assert isinstance(source, Slots)
            first, (key, value) = like.table.slot_page.long(), map(source.read, ("key", "value"))
            return flexicache_slots(like._pool, like.plan, key, value, first, unstable[layer], room)

        state = whole.state._child(make, None)
    return Session(whole.engine, state, whole.frame, whole.recording, prefill_s=whole.prefill_s)


def _measured(
    engine: HFEngine, arms: dict[str, Arm], script: Script, rounds: int, context: Context,
    on_round: Callable[[int, int], None] | None,
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:  # fmt: skip
    recalled = {name: _recalled(arm, context) for name, arm in arms.items()}
    timed: dict[str, Callable[[], float]] = {PLAIN: _plain(engine, list(arms[WHOLE].session.tokens), script)}
    timed.update({name: functools.partial(arm.run, script) for name, arm in arms.items()})
    seconds = alternate(timed, rounds, on_round)
    steps = len(script.inputs)
    rows = [{"arm": PLAIN, **_speed(PLAIN, seconds, steps)}]
    for name, arm in arms.items():
        own = {"agreement": arm.agreed / len(script.inputs), "recall": recalled[name]}
        rows.append({"arm": name, **_speed(name, seconds, steps), **arm.cost(steps), **own})
    return rows, seconds


def _recalled(arm: Arm, context: Context) -> float:
    """Mean grade over the context's questions."""
    grades = [grade(question.grader, arm.ask(question), question.references) for question in context.questions]
    return sum(grades) / len(grades)


def _plain(engine: HFEngine, tokens: list[int], script: Script) -> Callable[[], float]:
    """transformers' own model and cache on the same tokens."""
    model = plain_model(engine)
    cache = plain_prefill(model, tokens, chunk=512)
    held, keywords = remember(cache), {compat.cache_keyword(model): cache, "use_cache": True}

    def run() -> float:
        start = _now(engine)
        with torch.no_grad():
            for token in script.inputs:
                model(input_ids=token, logits_to_keep=1, **keywords).logits[:, -1].argmax(dim=-1)
        seconds = _now(engine) - start
        rewind(cache, held)
        return seconds

    return run


def _speed(name: str, seconds: dict[str, list[float]], steps: int) -> dict[str, Any]:
    step_ms = median_ms(seconds[name], steps)
    return {
        "step_ms": step_ms, "tokens_per_s": 1e3 / step_ms, "speedup": vars(ratio(seconds[PLAIN], seconds[name])),
        "over_whole": vars(ratio(seconds[WHOLE], seconds[name])),
    }  # fmt: skip


def _read_bytes(slots: Slots | PagedSlots) -> int:
    """What a step reads of fast memory: all of it, but the slots of pages that are not wanted."""
    if isinstance(slots, HeadGroups):
        return sum(_read_bytes(part) for _, part in slots.groups)
    if not isinstance(slots, PagedSlots) or slots.plan.attend is None:
        return slots.held_bytes
    page = (slots.held_bytes - slots.sketch_bytes - slots.staging_bytes) // slots.plan.fast_pages
    return slots.held_bytes - page * (slots.plan.slots - slots.plan.attend)


def _now(engine: HFEngine) -> float:
    """The clock, when the device has done what it was given."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return time.perf_counter()

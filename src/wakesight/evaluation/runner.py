"""Run every arm of every question: one prefill and one scoring per context, all arms decoded as rows of one batch.

The protocol is prefix-only: a context is read, scored and compacted before its first question is encoded. Every
question starts from the same restored children. Arms of one kept fraction hold exactly as many entries.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from wakesight.budget.rounding import keep_to_count
from wakesight.core import KeptSet
from wakesight.engines.base import Generation
from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.evaluation.arms import Arm
from wakesight.evaluation.checks import check_runnable
from wakesight.evaluation.config import NAME, PLANNED, changed_input, first_difference, read_config
from wakesight.evaluation.fidelity import fidelity_grades
from wakesight.evaluation.items import Context, Question
from wakesight.evaluation.pieces import pieces
from wakesight.evaluation.problems import reason_to_skip
from wakesight.evaluation.records import Records, Row, locked, write_json, writing
from wakesight.evaluation.suites.files import noting
from wakesight.policy import Policy

Grade = Callable[..., float]  # graders.grade
HELD_CHARACTERS = 10**8  # of contexts that are kept in memory once they are made
PHASES = ("prefill", "score", "compact", "question", "decode", "grade")


@dataclass(frozen=True)
class Plan:
    """One run. contexts: the suite's, in order. config: what was asked for, as plain JSON; a resumed run must ask
    for the same. data: folder of the official files that the suite was told to read.

    rows: most arms decoded in one batch. held_bytes: most KV that children of one context may hold at once.
    shard: (i, n) runs every n-th context from the i-th on. limit: at most so many questions, the first ones of the
    whole run, so that shards of a limited run are a limited run. thinking: tokens a thinking model may spend before
    its closing tag, which do not count as answer (None: it does not think).
    """

    engine: Any
    arms: tuple[Arm, ...]
    contexts: Callable[[], Iterator[Context]]
    grade: Grade
    config: Mapping[str, Any]
    rows: int = 16
    held_bytes: int = 4 * 10**9
    shard: tuple[int, int] = (0, 1)
    limit: int | None = None
    chunk: int = 512
    thinking: int | None = None
    data: Path | None = None


@dataclass
class Progress:
    """What a run did and how long it took. seconds: by phase; `wall` minus their sum is the harness itself.

    total: questions of this run (of this shard), of which `resumed` were done before and `questions` now. skipped:
    rows without a grade.
    """

    total: int = 0
    contexts: int = 0
    questions: int = 0
    resumed: int = 0
    skipped: int = 0
    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def overhead(self) -> float:
        """Share of the wall time that is neither model, scoring, compaction nor grading."""
        return 1 - sum(self.seconds.values()) / self.wall if self.wall else 0.0

    @property
    def done(self) -> int:
        return self.questions + self.resumed

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None before the first question."""
        return self.wall / self.questions * (self.total - self.done) if self.questions else None


def run(
    plan: Plan, folder: Path, *, resume: bool = False, on_question: Callable[[Progress, Context], None] | None = None
) -> Progress:
    """Run `plan` into `folder`. Whatever cannot be run is a row with the reason in `skipped`.

    All contexts are made before the first is read: a task that has no room in the length is refused at once.
    Raises RequestError for that, for an arm that this model never runs, for thinking asked of a model that does not
    think, for data that nothing reads, if the folder holds another run, or this one without `resume`, or if another
    process is writing it; WorkError if the disk is full.
    """
    if plan.thinking is not None:
        plan.engine.thinking(plan.thinking)
    check_runnable(plan.engine, plan.arms, plan.chunk)
    started = time.perf_counter()
    with locked(folder):
        before = _before(plan, folder, resume)
        contexts, total, inputs = _made(plan)
        done = _begin(plan, folder, before, total, inputs)
        progress = Progress(total)
        for context in contexts:
            left = [question for question in context.questions if (context.id, question.id) not in done]
            progress.contexts += 1
            progress.resumed += len(context.questions) - len(left)
            for rows in _context(plan, folder, context, left, progress) if left else ():
                _check_counts(plan.arms, rows)
                Records(folder).append(rows)
                progress.questions += 1
                progress.skipped += sum(row["skipped"] is not None for row in rows)
                progress.wall = time.perf_counter() - started
                if on_question is not None:
                    on_question(progress, context)
        progress.wall = time.perf_counter() - started
        return progress


def _before(plan: Plan, folder: Path, resume: bool) -> dict[str, Any] | None:
    """The config of the run in this folder, which must have been asked for the same; None for a new one."""
    if not (folder / NAME).exists():
        return None
    if not resume:
        raise RequestError(f"{folder} holds a run already; add --resume to go on with it, or give another folder")
    before = read_config(folder)
    if changed := first_difference(before, plan.config):
        name, asked, now = changed
        raise RequestError(
            f"{folder} holds a run with {name}={asked!r}, and now {name}={now!r} was asked for; resume with the same "
            "arguments, or give another folder"
        )
    return before


def _begin(
    plan: Plan, folder: Path, before: dict[str, Any] | None, total: int, inputs: Mapping[str, Any]
) -> set[tuple[str, str]]:
    """Write what is run into config.json; returns the (context, question) ids that were answered before.

    Raises RequestError if the run in this folder was begun with other weights, files or items.
    """
    config = {**plan.config, "inputs": {**plan.config.get("inputs", {}), **inputs}, PLANNED: total}
    if before is None:
        write_json(folder / NAME, config)
        return set()
    if changed := changed_input(before, config):
        raise RequestError(
            f"{folder} holds a run that was begun with something else: {changed}; put back what it was begun with, or "
            "give another folder with --out"
        )
    if PLANNED not in before:  # begun by an older version; what it read then cannot be known any more
        write_json(folder / NAME, {**before, PLANNED: total})
    return Records(folder).keep_complete()


def _made(plan: Plan) -> tuple[Iterable[Context], int, dict[str, Any]]:
    """The contexts of this run, the number of their questions, and digests of all items and the files they are from.

    They are made once and held if they are not more than HELD_CHARACTERS, else counted and made again one by one.
    The digests are those of the whole run, whatever the shard.
    """
    held: list[Context] = []
    size = total = 0
    items = hashlib.sha256()
    with noting() as files:
        for number, context in enumerate(_limited(plan)):
            items.update(_said(context))
            if not _is_mine(plan, number):
                continue
            total += len(context.questions)
            size += len(context.text)
            if size <= HELD_CHARACTERS:
                held.append(context)
            else:
                held.clear()
    inputs = {"items": items.hexdigest(), "data": _digests(plan.data, files)}
    return (held if size <= HELD_CHARACTERS else _mine(plan)), total, inputs


def _limited(plan: Plan) -> Iterator[Context]:
    left = plan.limit
    for context in plan.contexts():
        if left is not None:
            if left <= 0:
                return
            context = replace(context, questions=context.questions[:left])
            left -= len(context.questions)
        yield context


def _mine(plan: Plan) -> Iterator[Context]:
    return (context for number, context in enumerate(_limited(plan)) if _is_mine(plan, number))


def _is_mine(plan: Plan, number: int) -> bool:
    index, shards = plan.shard
    return number % shards == index


def _said(context: Context) -> bytes:
    """What a model and a grader are given of a context, in one piece."""
    questions = [(q.id, q.text, q.answer_prefix, q.references, q.grader, q.max_new_tokens) for q in context.questions]
    return json.dumps([context.id, context.instruction, context.text, context.chat, questions], default=str).encode()


def _digests(data: Path | None, files: Iterable[Path]) -> dict[str, str]:
    """sha256 of every file that was read, by its name in `data`. Raises RequestError if none was: `data` is ignored."""
    found = {}
    for file in sorted(files):
        with open(file, "rb") as stream:
            name = file.relative_to(data) if data is not None and file.is_relative_to(data) else file
            found[name.as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    if data is not None and not found:
        raise RequestError(
            f"nothing in --data {data} was read: what was asked for has no official file there and would be "
            "generated; leave --data out, or name another folder"
        )
    return found


def _context(
    plan: Plan, folder: Path, context: Context, questions: Sequence[Question], progress: Progress
) -> Iterator[list[Row]]:
    """The rows of each question, all arms together."""
    try:
        whole = _prefill(plan, context, progress)
    except Exception as error:
        reason = reason_to_skip(error, "reading the context")
        for question in questions:
            yield [_skipped(plan, context, question, arm, reason) for arm in plan.arms]
        return
    with whole:
        groups = _groups(plan, whole)
        if len(groups) == 1:
            with _Children(plan, whole, groups[0], progress) as children:
                _describe(plan, folder, context, whole, children.kept)
                for question in questions:
                    yield _rows(plan, context, question, children, progress)
            return
        # Too many children to hold at once: each group answers all questions, rows are written when all are there.
        collected: list[list[Row]] = [[] for _ in questions]
        kept: dict[str, KeptSet] = {}
        for group in groups:
            with _Children(plan, whole, group, progress) as children:
                kept.update(children.kept)
                for rows, question in zip(collected, questions, strict=True):
                    rows += _rows(plan, context, question, children, progress)
        _describe(plan, folder, context, whole, kept)
        yield from collected


def _prefill(plan: Plan, context: Context, progress: Progress) -> Session:
    from wakesight.engines.recording import needs

    wanted = [needs(arm.policy.scorer_method, plan.engine) for arm in plan.arms if arm.policy is not None]
    record = sorted({name for each in wanted for name in each["record"]})
    window = max((each["query_window"] for each in wanted), default=64)
    start = time.perf_counter()
    whole: Session = plan.engine.prefill(
        context.text, instruction=context.instruction, chat=context.chat, chunk=plan.chunk, record=record,
        query_window=window,
    )  # fmt: skip
    progress.seconds["prefill"] += time.perf_counter() - start
    return whole


def _groups(plan: Plan, whole: Session) -> list[list[Arm]]:
    """Arms whose children fit into memory together, at most `rows` of them."""
    stats = whole.stats
    groups: list[list[Arm]] = [[]]
    held = 0.0
    for arm in plan.arms:
        size = 0.0 if arm.policy is None else stats.kv_bytes_full * (arm.policy.keep or 1) + stats.kv_bytes_slack
        if arm.policy is not None and arm.policy.evicted == "demote":
            size += stats.kv_bytes_full  # its reservoir
        if groups[-1] and (len(groups[-1]) == plan.rows or held + size > plan.held_bytes):
            groups.append([])
            held = 0.0
        groups[-1].append(arm)
        held += size
    return groups


class _Children:
    """The sessions of some arms of one context; failed: why an arm has none."""

    def __init__(self, plan: Plan, whole: Session, arms: Sequence[Arm], progress: Progress) -> None:
        self.arms = list(arms)
        self.sessions: dict[str, Session] = {}
        self.failed: dict[str, str] = {}
        self.kept: dict[str, KeptSet] = {}
        self.whole = whole
        for arm in arms:
            if arm.policy is None:
                self.sessions[arm.id] = whole
                continue
            start = time.perf_counter()
            try:
                child = whole.compact(sized(arm, whole))
            except Exception as error:
                self.failed[arm.id] = reason_to_skip(error, "compacting", arm.policy)
                continue
            finally:
                progress.seconds["compact"] += time.perf_counter() - start
            self.sessions[arm.id] = child
            if child.kept is not None:
                self.kept[arm.id] = child.kept

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *error: object) -> None:
        for session in self.sessions.values():
            if session is not self.whole:
                session.close()


def sized(arm: Arm, whole: Session) -> Policy:
    """The arm's policy. Where it must match in bytes, its size is what an arm that drops at the same kept fraction
    holds, flat, and the recurrent states, which both share.

    Raises RequestError if that is too little for a single page per head.
    """
    policy = arm.policy
    assert policy is not None
    if arm.match == "entries" or policy.keep is None:
        return policy
    state, geometry = whole.state, whole.engine.geometry
    prefix = state.prefix if policy.protect is None else policy.protect
    held = prefix + keep_to_count(policy.keep, state.logical_length - prefix)
    return policy.at(bytes=held * geometry.token_bytes + state.state_bytes)


def _check_counts(arms: Sequence[Arm], rows: Sequence[Row]) -> None:
    """Arms of one kept fraction hold exactly as many entries; pages may fall short by less than a page each.

    rows: of one question. A comparison of arms that differ in size would be none: the run ends.
    """
    counts: dict[tuple[float | None, str], int] = {}
    for arm, row in zip(arms, rows, strict=True):
        if arm.policy is None or arm.policy.unit != "entry" or "kept" not in row:
            continue
        expected = counts.setdefault((arm.policy.keep, arm.policy.evicted), row["kept"])
        if row["kept"] != expected:
            raise RuntimeError(f"the arm {arm.id} holds {row['kept']} entries where its equals hold {expected}")


def entries(session: Session) -> int:
    """Entries that a session holds, protected prefix included."""
    return sum(map(sum, session.stats.kept_entries))


def _rows(plan: Plan, context: Context, question: Question, children: _Children, progress: Progress) -> list[Row]:
    arms = [arm for arm in children.arms if arm.id in children.sessions]
    rows = {
        arm.id: _skipped(plan, context, question, arm, children.failed[arm.id])
        for arm in children.arms
        if arm.id in children.failed
    }
    sessions = [children.sessions[arm.id] for arm in arms]
    try:
        if question.grader == "fidelity":
            answered = _followed(plan, children.whole, sessions, question, progress)
        else:
            answered = _asked(plan, sessions, question, progress)
    except Exception as error:
        answered = [(None, {}, reason_to_skip(error, "answering"))] * len(arms)
    for arm, session, (made, grades, problem) in zip(arms, sessions, answered, strict=True):
        rows[arm.id] = _row(plan, context, question, arm, session, made, grades, problem)
    return [rows[arm.id] for arm in children.arms]


Answered = tuple[Generation | None, dict[str, float], str | None]


def _asked(plan: Plan, sessions: Sequence[Session], question: Question, progress: Progress) -> list[Answered]:
    engine = plan.engine
    ids = _question_ids(sessions[0], question)
    start = time.perf_counter()
    thinking = None if plan.thinking is None else engine.thinking(plan.thinking)
    states = [session.state for session in sessions]
    made = engine.generate(states, [ids] * len(sessions), question.max_new_tokens, None, thinking)
    decoded = made[0].decode_s if made else 0.0
    progress.seconds["decode"] += decoded
    progress.seconds["question"] += time.perf_counter() - start - decoded
    start = time.perf_counter()
    answered: list[Answered] = []
    for row in made:
        text = engine.decode(row.tokens if thinking is None else _after(row.tokens, thinking.close))
        answered.append((row, *_graded(plan.grade, question, text)))
    progress.seconds["grade"] += time.perf_counter() - start
    return answered


def _graded(grade: Grade, question: Question, text: str) -> tuple[dict[str, float], str | None]:
    """Grades under both rules, or why there are none: a grader that fails on one answer must not end the run."""
    extra = {name: value for name, value in question.extra.items() if name != "stop"}
    said = _until(text, question.extra.get("stop", ""))
    grades = {}
    try:
        for rule in ("official", "strict"):
            grades[rule] = float(grade(question.grader, said, list(question.references), rule=rule, **extra))
    except Exception as error:
        return {}, f"the grader of {question.grader} failed: {error or type(error).__name__}"
    if not all(map(math.isfinite, grades.values())):
        return {}, f"the grader of {question.grader} gave no number: {grades}"
    return grades, None


def _until(text: str, stop: str) -> str:
    """The answer up to `stop`, where decoding would have ended; what stands before its first word does not end it.

    Source: THUDM/LongBench LongBench/pred.py, where samsum ends at a newline, but not at the first token.
    """
    if not stop:
        return text
    first = len(text) - len(text.lstrip())
    end = text.find(stop, first)
    return text if end < 0 else text[:end]


def _after(tokens: Sequence[int], close: tuple[int, ...]) -> Sequence[int]:
    """What follows the last closing tag; nothing if the model never stopped thinking."""
    for end in range(len(tokens), len(close) - 1, -1):
        if tuple(tokens[end - len(close) : end]) == close:
            return tokens[end:]
    return ()


def _followed(
    plan: Plan, whole: Session, sessions: Sequence[Session], question: Question, progress: Progress
) -> list[Answered]:
    """How closely each session predicts a given continuation, against the whole one."""
    start = time.perf_counter()
    ids = plan.engine.encode(question.text)[: question.max_new_tokens]
    if len(ids) < 2:
        raise RequestError(f"the continuation of {question.id} has {len(ids)} tokens; fidelity needs at least 2")
    expected = whole.logits(ids)
    grades = [fidelity_grades(expected, session.logits(ids), ids) for session in sessions]
    progress.seconds["question"] += time.perf_counter() - start
    return [(None, row, None) for row in grades]


def _question_ids(session: Session, question: Question) -> list[int]:
    ids = session.question_ids(question.text)
    return [*ids, *session.engine.encode(question.answer_prefix)] if question.answer_prefix else ids


def _row(
    plan: Plan, context: Context, question: Question, arm: Arm, session: Session, made: Generation | None,
    grades: dict[str, float], problem: str | None,
) -> Row:  # fmt: skip
    stats = session.stats
    row = _skipped(plan, context, question, arm, problem)
    row.update(
        prompt=_digest(session.tokens, question),
        tokens=stats.logical_length,
        prefix=session.state.prefix,
        kept=entries(session),
        kept_per_layer=[sum(heads) for heads in stats.kept_entries],
        kv_bytes_full=stats.kv_bytes_full,
        kv_bytes_kept=stats.kv_bytes_kept,
        sketch_bytes=stats.sketch_bytes,
        reservoir_bytes=stats.reservoir_bytes,
        match=arm.match,
        state_bytes=stats.state_bytes,
        grades={name: round(value, 9) for name, value in grades.items()},
        seconds={"prefill": stats.prefill_s, "score": stats.score_s, "compact": stats.compact_s},
    )
    if made is not None:
        row.update(
            output=plan.engine.decode(made.tokens),
            output_ids=list(made.tokens),
            finish=made.finish,
            misses=made.misses,
            fetches=made.fetches,
            moved_bytes=made.moved_bytes,
            margin=None if made.margin == float("inf") else round(made.margin, 6),
        )
        row["seconds"].update(question=made.question_s, decode=made.decode_s)
    return row


def _skipped(plan: Plan, context: Context, question: Question, arm: Arm, reason: str | None) -> Row:
    return {
        "task": context.task,
        "context": context.id,
        "question": question.id,
        "arm": arm.id,
        "arms": len(plan.arms),
        "source": context.source,
        "grades": {},
        "skipped": reason,
    }


def _digest(tokens: Sequence[int], question: Question) -> str:
    digest = hashlib.sha256(np.asarray(tokens, dtype=np.int32).tobytes())
    digest.update(question.text.encode())
    digest.update(question.answer_prefix.encode())
    return digest.hexdigest()[:16]


def _describe(plan: Plan, folder: Path, context: Context, whole: Session, kept: Mapping[str, KeptSet]) -> None:
    """contexts/NAME.json: the text in tokens, the questions, and how many entries of each token every arm kept."""
    path = folder / "contexts" / f"{file_name(context.id)}.json"
    if path.exists():
        return
    with writing(path.parent):
        path.parent.mkdir(exist_ok=True)
    tokens = whole.tokens
    write_json(
        path,
        {
            "context": context.id,
            "task": context.task,
            "source": context.source,
            "meta": dict(context.meta),
            "pieces": pieces(plan.engine.decode, tokens),
            "heads": sum(plan.engine.geometry.kv_heads),
            "questions": {
                q.id: {"text": q.text, "answer_prefix": q.answer_prefix, "references": list(q.references)}
                for q in context.questions
            },
            "kept": {arm: pack(one.per_token(len(tokens)).numpy()) for arm, one in kept.items()},
        },
    )


def file_name(context_id: str) -> str:
    """A context's id as a file name."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in context_id)[:80]
    return f"{safe}-{hashlib.sha256(context_id.encode()).hexdigest()[:8]}"


def pack(counts: np.ndarray) -> str:
    """Whole numbers as text: uint16, compressed, base64."""
    return base64.b64encode(zlib.compress(np.asarray(counts, dtype=np.uint16).tobytes())).decode()


def unpack(text: str) -> np.ndarray:
    """Inverse of `pack`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint16)

"""Many sessions, one limit of fast memory: never passed, nothing leaked, and nobody's answer depends on the others."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from wakesight.cache.pool import Pool
from wakesight.engines.hf.engine import HFEngine, load
from wakesight.engines.session import Session
from wakesight.errors import RequestError, WorkError
from wakesight.models.families import family_of
from wakesight.models.load import LoadedModel
from wakesight.policy import Policy
from wakesight.residency import Residency
from wakesight.testing import tiny

ATTEND, PAGE = 2, 8
QUESTIONS = [tiny.tokens(3, seed=91), tiny.tokens(9, seed=92)]
CONTEXTS = [tiny.tokens(length, seed=length) for length in (40, 57, 64, 90)]
NEW_TOKENS = 5
VERBS = ("open", "open", "demote", "demote", "ask", "save", "load", "drop")
LIMIT = 120_000  # bytes: three or four whole contexts


class Watched(Pool):
    """Remembers the most that was ever held."""

    peak = 0

    def _count(self, lease, sign):
        super()._count(lease, sign)
        self.peak = max(self.peak, self.held_bytes)


def engine(limit: int | None = None) -> HFEngine:
    made = tiny.model("llama", num_hidden_layers=2)
    loaded = LoadedModel("tiny-llama", made, tiny.tokenizer(), family_of(made.config))
    return HFEngine(loaded, growth=0, pool=Watched(limit_bytes=limit, poison=True))


def demote(session: Session, pages: int, reservoir: str = "host") -> Session:
    """R = 1 and K fixed, so that a share changes what is fetched and never what is answered."""
    residency = Residency(pages=pages, attend=ATTEND, rerank=1, page_size=PAGE, reservoir=reservoir)
    return session.compact(Policy(unit="page", evicted="demote", residency=residency))


def answers(session: Session) -> list[tuple[int, ...]]:
    return [session.ask(question, max_new_tokens=NEW_TOKENS).tokens for question in QUESTIONS]


def test_a_loaded_model_may_hold_so_much_and_says_early_what_does_not_fit():
    long = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    limited = load(tiny.model("llama", **long), tokenizer=tiny.tokenizer(), memory=LIMIT, growth=0)
    with limited.prefill(CONTEXTS[0]) as session:
        assert 0 < session.stats.kv_bytes_kept <= limited.pool.held_bytes <= LIMIT
    with pytest.raises(WorkError, match=r"a prefill of 9\d\d tokens needs .* of the limit of 120,000 bytes only"):
        limited.prefill(tiny.tokens(900, seed=1))
    assert limited.pool.leases == 0


@pytest.mark.parametrize("memory", [0, -1, "much", 1.5])
def test_a_limit_that_is_no_amount_is_refused(memory):
    with pytest.raises(RequestError, match=r"^memory"):
        load(tiny.model("llama", num_hidden_layers=2), tokenizer=tiny.tokenizer(), memory=memory)


@pytest.fixture(scope="module")
def solo() -> dict[tuple[int, bool], list[tuple[int, ...]]]:
    """(context, demoted) -> its answers, alone and without a limit."""
    alone = engine()
    found = {}
    for index, context in enumerate(CONTEXTS):
        with alone.prefill(context) as whole, demote(whole, pages=30) as small:
            found[index, False], found[index, True] = answers(whole), answers(small)
    alone.close()
    assert any(found[i, False] != found[i, True] for i in range(len(CONTEXTS)))  # K pages do make a difference here
    return found


class Crowd:
    """Sessions that come and go at random."""

    def __init__(self, engine: HFEngine, solo: dict, folder: Path, seed: int) -> None:
        self.engine, self.solo, self.folder = engine, solo, folder
        self.rng = random.Random(seed)
        self.held: list[tuple[Session, int, bool]] = []
        self.files: list[tuple[Path, int, bool]] = []
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        verb = self.rng.choice(VERBS)
        try:
            getattr(self, verb)()
            self.done[verb] += 1
        except WorkError as error:
            self.done["refused" if "fast memory" in str(error) else str(error)] += 1
            self.drop()
        pool = self.engine.pool
        assert pool.held_bytes <= pool.limit_bytes

    def open(self) -> None:
        index = self.rng.randrange(len(CONTEXTS))
        self.held.append((self.engine.prefill(CONTEXTS[index]), index, False))

    def demote(self) -> None:
        if whole := [one for one in self.held if not one[2]]:
            session, index, _ = one = self.rng.choice(whole)
            where = self.rng.choice(["host", f"file:{self.folder}"])
            self.held.append((demote(session, self.rng.randint(ATTEND, 6), where), index, True))
            session.close()
            self.held.remove(one)

    def ask(self) -> None:
        if self.held:
            session, index, demoted = self.rng.choice(self.held)
            number = self.rng.randrange(len(QUESTIONS))
            answer = session.ask(QUESTIONS[number], max_new_tokens=NEW_TOKENS)
            assert answer.tokens == self.solo[index, demoted][number]
            self.done["asked demoted"] += demoted

    def save(self) -> None:
        if self.held:
            session, index, demoted = self.rng.choice(self.held)
            path = self.folder / f"{len(self.files)}.ws"
            session.save(path)
            self.files.append((path, index, demoted))

    def load(self) -> None:
        if self.files:
            path, index, demoted = self.rng.choice(self.files)
            self.held.append((Session.load(path, self.engine), index, demoted))

    def drop(self) -> None:
        if self.held:
            self.held.pop(self.rng.randrange(len(self.held)))[0].close()


def test_two_hundred_sessions_share_one_limit(solo, tmp_path):
    """Opened, asked, demoted, saved, loaded and dropped at random. R = 1, K fixed."""
    shared = engine(limit=LIMIT)
    crowd = Crowd(shared, solo, tmp_path, seed=1)
    while crowd.done["open"] + crowd.done["load"] < 200:
        crowd.step()
    for session, _, _ in crowd.held:
        session.close()

    pool = shared.pool
    assert pool.peak <= LIMIT
    assert (pool.held_bytes, pool.reservoir_bytes, pool.leases) == (0, 0, 0)
    assert not list(tmp_path.glob("*.pages"))
    assert min(crowd.done[verb] for verb in ("demote", "asked demoted", "save", "load", "drop")) >= 10, crowd.done
    assert set(crowd.done) <= {*VERBS, "asked demoted", "refused"}  # and nothing else went wrong
    assert crowd.done["refused"] >= 10, crowd.done  # the limit was felt


def test_a_prefill_that_does_not_fit_is_refused_and_leaves_nothing(solo):
    with pytest.raises(WorkError, match="fast memory"):
        engine(limit=100).prefill(CONTEXTS[0])
    shared = engine(limit=LIMIT)
    held = [shared.prefill(CONTEXTS[3])]
    before = (shared.pool.held_bytes, shared.pool.leases)
    while shared.pool.free_bytes >= shared.pool.held_bytes // len(held):
        held.append(shared.prefill(CONTEXTS[3]))
    with pytest.raises(WorkError, match="fast memory"):
        shared.prefill(CONTEXTS[3])

    assert answers(held[0]) == solo[3, False]
    for session in held[1:]:
        session.close()
    assert (shared.pool.held_bytes, shared.pool.leases) == before


def test_a_demotion_that_does_not_fit_leaves_its_parent_as_it_was(solo, tmp_path):
    shared = engine()
    whole = shared.prefill(CONTEXTS[3])
    shared.pool.limit_bytes = shared.pool.held_bytes + 3000
    before = (shared.pool.held_bytes, shared.pool.leases)

    for where in ("host", f"file:{tmp_path}"):
        with pytest.raises(WorkError, match="fast memory"):
            demote(whole, pages=6, reservoir=where)

    assert (shared.pool.held_bytes, shared.pool.leases, shared.pool.reservoir_bytes) == (*before, 0)
    assert list(tmp_path.iterdir()) == []
    assert answers(whole) == solo[3, False]


def test_an_answer_that_does_not_fit_leaves_its_session_as_it_was(solo):
    """Slots must grow while it decodes; the limit says no; with room the same session answers as ever."""
    shared = engine()
    whole = shared.prefill(CONTEXTS[2])  # 64 tokens: the slots are full
    assert whole.stats.kv_bytes_slack == 0
    before, shared.pool.limit_bytes = shared.pool.held_bytes, shared.pool.held_bytes

    with pytest.raises(WorkError, match="fast memory"):
        answers(whole)

    assert shared.pool.held_bytes == before
    shared.pool.limit_bytes = None
    assert answers(whole) == solo[2, False]

"""A random tiny Llama in float32 inside vLLM: exact where transformers is exact, and no block is ever lost."""

from __future__ import annotations

import os
import random

import pytest
import torch
from offline import Offline, distance, replayed, tokens_of

from wakesight.engines.hf.engine import load
from wakesight.policy import Policy
from wakesight.scores.base import score
from wakesight.testing import tiny

POOL = 120
CONTEXT, QUESTION = tiny.tokens(300, 3), tiny.tokens(12, 4)
PROMPT = [*CONTEXT, *QUESTION]
PROTECT = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save("llama", tmp_path_factory.mktemp("llama"), head_dim=32)


@pytest.fixture(scope="module")
def vllm(folder):
    return Offline(folder, dtype="float32", max_model_len=1024, num_gpu_blocks_override=POOL)


@pytest.fixture(scope="module")
def whole(folder):
    with torch.no_grad():
        session = load(str(folder)).prefill(CONTEXT, record=["expected_attention"])
    session.state.prefix = PROTECT
    return session


@pytest.fixture(autouse=True)
def _nothing_is_left(vllm):
    yield
    vllm.check_empty()


@pytest.fixture
def parent(vllm):
    return vllm.prefill(CONTEXT, ws_protect=PROTECT, ws_record="expected_attention")


def test_a_session_that_was_never_compacted_answers_as_the_stock_engine(vllm, whole, parent):
    (stock,) = vllm.ask(PROMPT)
    (attached,) = vllm.ask(PROMPT, ws_attach=parent)

    assert tokens_of(attached) == tokens_of(stock)
    assert distance(whole, None, QUESTION, stock) < 1e-3
    assert distance(whole, None, QUESTION, attached) < 1e-3


@pytest.mark.parametrize(
    ("scorer", "allocation"),
    [
        ("random", "flat"),
        ("streaming", "pyramid"),
        ("keydiff", "flat"),
        ("knorm", "pyramid"),
        ("snapkv", "flat"),
        ("snapkv:window=16,kernel=5", "10,40,100"),
        ("knorm", "0,40,295"),
        ("expected_attention", "flat"),
    ],
)
def test_a_child_keeps_and_answers_what_transformers_does(vllm, whole, parent, scorer, allocation):
    size = {} if "," in allocation else {"keep": 0.2}
    given = tuple(map(int, allocation.split(","))) if "," in allocation else allocation
    policy = Policy(scorer, given, **size)

    child, output = vllm.fork(
        parent, PROMPT, ws_scorer=scorer, ws_allocation=allocation, **{f"ws_{name}": x for name, x in size.items()}
    )
    kept = vllm.kept(child)

    assert_same_but_for_ties(whole, policy, kept)
    assert distance(whole, kept, QUESTION, output) < 1e-3
    assert tokens_of(output) == list(whole.engine.generate([replayed(whole, kept)], [QUESTION], 16)[0].tokens)
    (again,) = vllm.ask(PROMPT, ws_attach=child)
    assert tokens_of(again) == tokens_of(output)


def assert_same_but_for_ties(whole, policy, kept):
    theirs = whole.compact(policy).kept
    scores = score(policy.scorer_method, whole.signals(), whole.engine.geometry.kv_heads)
    for layer, heads in enumerate(kept.positions):
        for head, mine in enumerate(heads):
            other, row = theirs.positions[layer][head], scores.layers[layer][head]
            assert len(mine) == len(other)
            differ = sorted(set(mine.tolist()) ^ set(other.tolist()))
            if differ:
                cut = row[other[other >= PROTECT]].min()
                assert (row[differ] - cut).abs().max() <= 1e-5 * max(1.0, float(cut.abs()))


def test_at_a_tenth_of_random_entries_the_answer_is_another(vllm, whole, parent):
    child, output = vllm.fork(parent, PROMPT, ws_scorer="random", ws_keep=0.1)

    assert distance(whole, vllm.kept(child), QUESTION, output) < 1e-3
    assert distance(whole, None, QUESTION, output) > 0.1


def test_children_and_parent_are_asked_in_one_batch_and_none_is_changed(vllm, whole, parent):
    first, _ = vllm.fork(parent, PROMPT, ws_scorer="random", ws_keep=0.2)
    second, _ = vllm.fork(parent, PROMPT, ws_scorer="keydiff", ws_keep=0.1)
    questions = [tiny.tokens(length, 10 + length) for length in (1, 7, 33)]
    wanted = {
        session: [
            list(whole.engine.generate([replayed(whole, kept)], [question], 8)[0].tokens) for question in questions
        ]
        for session, kept in ((parent, None), (first, vllm.kept(first)), (second, vllm.kept(second)))
    }

    for _ in range(2):
        names = {
            vllm.add([*CONTEXT, *question], 8, ws_attach=session): (session, at)
            for session in wanted
            for at, question in enumerate(questions)
        }
        outputs = vllm.run()
        for name, (session, at) in names.items():
            made = tokens_of(outputs[name])
            assert made[: len(wanted[session][at])] == wanted[session][at]


def test_only_the_question_is_scheduled(vllm, parent):
    vllm.add(PROMPT, 4, ws_attach=parent)
    vllm.add([*CONTEXT, 7], 4, ws_attach=parent)

    output = vllm.scheduler.schedule()

    assert sorted(output.num_scheduled_tokens.values()) == [1, len(QUESTION)]
    executor = vllm.core.model_executor
    vllm.scheduler.update_from_output(output, executor.execute_model(output) or executor.sample_tokens(None))
    vllm.run()


def test_compaction_gives_blocks_back_and_others_run_in_them(vllm, parent):
    free = vllm.sessions.status()["free_blocks"]
    child, output = vllm.fork(parent, PROMPT, ws_scorer="random", ws_keep=0.1)
    assert vllm.told([1], ws_info=child)["blocks"] == 6  # 35 entries: two blocks of 32 for each of 3 layers
    assert vllm.sessions.status()["free_blocks"] == free - 6

    vllm.drop(parent)

    assert vllm.sessions.status()["free_blocks"] == POOL - 1 - 6
    (big,) = vllm.ask(tiny.tokens(900, 8), max_tokens=2)  # 87 of the 113 blocks
    assert big.outputs[0].finish_reason == "length"
    (again,) = vllm.ask(PROMPT, ws_attach=child)
    assert tokens_of(again) == tokens_of(output)


@pytest.mark.parametrize(
    ("prompt", "keys", "sentence"),
    [
        (PROMPT, {"ws_attach": "0" * 32}, "there is no session"),
        (CONTEXT, {"ws_attach": "parent"}, "at least one token behind"),
        ([*CONTEXT[:9], CONTEXT[9] ^ 1, *CONTEXT[10:], 5], {"ws_attach": "parent"}, "differs .* at token 9 of 300"),
        (CONTEXT, {"ws_session": "parent"}, "exists already"),
        (CONTEXT, {"ws_session": "1" * 32, "ws_protect": 301}, "protect fewer"),
        (CONTEXT, {"ws_session": "1" * 32, "ws_record": "h2o"}, "do not tell attention_sums"),
        (PROMPT, {"ws_fork": "parent", "ws_child": "1" * 32, "ws_keep": 0.001}, "keeps 0 of 295"),
        (PROMPT, {"ws_fork": "parent", "ws_child": "1" * 32, "ws_allocation": "1,2"}, "names 2 layers"),
        (PROMPT, {"ws_fork": "parent", "ws_child": "1" * 32, "ws_keep": 0.5, "ws_allocation": "gate"}, "gate"),
        (PROMPT, {"ws_fork": "parent", "ws_child": "1" * 32, "ws_keep": 0.5, "ws_scorer": "gatesight",
                  "ws_allocation": "flat"}, "needs an estimator"),
        (PROMPT, {"ws_fork": "parent", "ws_child": "1" * 32, "ws_keep": 0.5, "ws_scorer": "snapkv:window=100"},
         "last 100 queries"),
        ([1], {"ws_drop": "0" * 32}, "there is no session"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_a_sentence(vllm, parent, prompt, keys, sentence):
    keys = {name: parent if value == "parent" else value for name, value in keys.items()}

    (output,) = vllm.ask(prompt, max_tokens=1, **keys)

    assert output.outputs[0].finish_reason == "error"
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(output.outputs[0].stop_reason)
    assert [held.id for held in vllm.sessions.table.all()] == [parent]


def test_settings_that_do_not_go_together_are_refused_at_once(vllm):
    with pytest.raises(ValueError, match="send max_tokens=1, not 3"):
        vllm.ask(CONTEXT, max_tokens=3, ws_session="1" * 32)
    with pytest.raises(ValueError, match="did you mean 'ws_attach'"):
        vllm.ask(CONTEXT, ws_atach="1" * 32)


def test_a_child_of_a_child_is_refused(vllm, parent):
    child, _ = vllm.fork(parent, PROMPT, ws_keep=0.5)

    told = vllm.told(PROMPT, ws_fork=child, ws_child="2" * 32, ws_keep=0.1)

    assert "compacted already" in told["refused"]


def test_an_aborted_request_leaves_nothing(vllm, parent):
    before = vllm.sessions.status()["free_blocks"]
    for keys in (
        {"ws_session": "3" * 32},
        {"ws_fork": parent, "ws_child": "4" * 32, "ws_keep": 0.2},
        {"ws_attach": parent},
    ):
        for steps in (0, 1):
            prompt, most = (tiny.tokens(600, 5), 1) if "ws_session" in keys else (PROMPT, 50)
            name = vllm.add(prompt, most, **keys)
            for _ in range(steps):
                list(vllm.step())
            vllm.abort(name)
            vllm.run()
            vllm.ask([1], max_tokens=1)
            assert vllm.sessions.status()["free_blocks"] == before
            assert vllm.sessions.status()["requests"] == 0
            assert vllm.worker.running == {}
            assert list(vllm.worker.recordings) == [parent]


def test_a_session_dropped_under_a_running_request_stays_until_it_ends(vllm, whole, parent):
    child, output = vllm.fork(parent, PROMPT, ws_scorer="keydiff", ws_keep=0.3)
    name = vllm.add(PROMPT, ws_attach=child)
    list(vllm.step())

    vllm.add([1], 1, ws_drop=child)
    outputs = vllm.run()

    assert tokens_of(outputs[name]) == tokens_of(output)
    assert "no session" in vllm.told(PROMPT, ws_attach=child)["refused"]


def test_a_parent_dropped_before_its_fork_begins_is_still_forked(vllm, parent):
    (wanted,) = vllm.ask(PROMPT, ws_fork=parent, ws_child="8" * 32, ws_keep=0.2)
    fork = vllm.add(PROMPT, ws_fork=parent, ws_child="9" * 32, ws_keep=0.2)
    vllm.add([1], 1, ws_drop=parent)

    outputs = vllm.run()

    assert tokens_of(outputs[fork]) == tokens_of(wanted)


def test_preempted_requests_of_every_kind_answer_as_if_alone(vllm, parent):
    """The pool holds parent, children and two long answers, not six: vLLM preempts, and begins again."""
    child, _ = vllm.fork(parent, PROMPT, ws_scorer="random", ws_keep=0.2)
    long = 260
    asks = [{"ws_attach": child}, {"ws_attach": parent}] * 2
    asks += [{"ws_fork": parent, "ws_child": f"{at:032x}", "ws_scorer": "keydiff", "ws_keep": 0.2} for at in (1, 2)]
    alone = []
    for ask in asks:
        alone.append(tokens_of(vllm.ask(PROMPT, max_tokens=long, **ask)[0]))
        if "ws_child" in ask:
            vllm.drop(ask["ws_child"])

    names = [vllm.add(PROMPT, long, **ask) for ask in asks]
    requests = dict(vllm.scheduler.requests)
    outputs = vllm.run()

    assert sum(request.num_preemptions for request in requests.values()) > 0
    assert [tokens_of(outputs[name]) for name in names] == alone


def test_sessions_never_starve_a_request(vllm):
    """Three sessions fill the pool; a stock request that needs two thirds of it runs, the oldest ones go."""
    sessions = [vllm.prefill(tiny.tokens(300, 20 + at)) for at in range(3)]

    (output,) = vllm.ask(tiny.tokens(800, 8), max_tokens=2)

    assert output.outputs[0].finish_reason == "length"
    assert vllm.sessions.status()["evictions"] > 0
    assert sessions[0] not in vllm.sessions.table
    assert sessions[0] not in vllm.worker.recordings


def test_what_cannot_fit_beside_sessions_in_use_is_refused_and_not_left_waiting(vllm):
    """A session of 90 blocks is in use by the request that wants to fork it into 60 more."""
    session = vllm.prefill(tiny.tokens(900, 9))

    told = vllm.told([*tiny.tokens(900, 9), 1], 4, ws_fork=session, ws_child="5" * 32, ws_keep=0.9)

    assert "does not fit" in told["refused"]


def test_sessions_expire(vllm, parent):
    clock = vllm.sessions.table._clock
    try:
        vllm.sessions.table._clock = lambda: clock() + 10_000
        vllm.ask([1, 2], max_tokens=1)
        assert parent not in vllm.sessions.table
    finally:
        vllm.sessions.table._clock = clock


OPERATIONS = int(os.environ.get("WAKESIGHT_OPERATIONS", "100"))  # 1000 were run once


def test_random_operations_lose_no_block_and_every_answer_is_right(vllm):
    """Open, fork, ask, drop and abort, four at a time, in a pool too small for all of them."""
    dice = random.Random(7)
    contexts = [tiny.tokens(length, 30 + length) for length in (70, 150, 260)]
    sessions: dict[str, tuple[int, str]] = {}  # id -> context, what made it
    answers: dict[tuple[int, str, int], list[int]] = {}
    waiting: dict[str, tuple[str, tuple[int, str, int] | None, int, str]] = {}
    identifiers = (f"{number:032x}" for number in range(100, 10**6))
    done = 0

    def begin() -> None:
        what = dice.choice(["open", "fork", "ask", "ask", "ask", "drop", "abort", "stock"])
        at = dice.randrange(3)
        question = [dice.randrange(3), 5, 9]
        new = next(identifiers)
        mine = [name for name, (context, _) in sessions.items() if context == at]
        wholes = [name for name in mine if sessions[name][1] == "whole"]
        if what == "open":
            waiting[vllm.add(contexts[at], 1, ws_session=new)] = ("session", None, at, new)
        elif what == "stock":
            key = (at, "whole", question[0])
            waiting[vllm.add([*contexts[at], *question], 8)] = ("ask", key, at, "")
        elif what == "fork" and wholes:
            scorer = dice.choice(["random", "knorm"])
            key = (at, scorer, question[0])
            keys = {"ws_fork": dice.choice(wholes), "ws_child": new, "ws_scorer": scorer, "ws_keep": 0.3}
            waiting[vllm.add([*contexts[at], *question], 8, **keys)] = (scorer, key, at, new)
        elif what == "ask" and mine:
            session = dice.choice(mine)
            key = (at, sessions[session][1], question[0])
            waiting[vllm.add([*contexts[at], *question], 60, ws_attach=session)] = ("ask", key, at, "")
        elif what == "drop" and mine:
            session = dice.choice(mine)
            del sessions[session]
            waiting[vllm.add([1], 1, ws_drop=session)] = ("drop", None, at, "")
        elif what == "abort" and waiting:
            name = dice.choice(list(waiting))
            vllm.abort(name)
            del waiting[name]

    while done < OPERATIONS or waiting:
        while done < OPERATIONS and len(waiting) < 4:
            begin()
            done += 1
        for output in vllm.step():
            kind, key, at, new = waiting.pop(output.request_id, ("aborted", None, 0, ""))
            if kind == "aborted":
                continue
            if output.outputs[0].finish_reason == "error":
                assert "no session" in output.outputs[0].stop_reason or "does not fit" in output.outputs[0].stop_reason
                continue
            if key is not None:
                made = tokens_of(output)[:8]
                assert answers.setdefault(key, made) == made
            told = (output.kv_transfer_params or {}).get("wakesight", {})
            if new and "refused" not in told:
                sessions[new] = (at, "whole" if kind == "session" else kind)
    assert len(answers) > 5

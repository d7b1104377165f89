"""tiny-hybrid in bfloat16 inside vLLM: native signals, its estimator, and recurrent states that nobody overwrites.

Recurrent layers run in bfloat16 on a CPU, so nothing is compared bit by bit: the stock engine's own distance from the
float32 reference is the measure.
"""

from __future__ import annotations

import pytest
import torch
from offline import Offline, distance, replayed, tokens_of

from wakesight.engines.hf.engine import load
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import closed
from wakesight.models.load import weights_folder
from wakesight.policy import Policy

TASKS = ("closed_single", "closed_dense", "closed_keyvalue")
DRIFT = 2.0  # times the stock engine's own


@pytest.fixture(scope="module")
def vllm():
    return Offline(weights_folder("tiny-hybrid"), max_model_len=2048, num_gpu_blocks_override=200)


@pytest.fixture(scope="module")
def engine():
    return load("tiny-hybrid")


@pytest.fixture(scope="module")
def contexts(engine):
    options = SuiteOptions(length=600, items=1, seed=5, count=lambda text: len(engine.encode(text)), tasks=TASKS)
    with torch.no_grad():
        return [
            (engine.prefill(one.text, instruction=one.instruction, record=["gatesight"]), one.questions[:2])
            for one in closed.contexts(options)
        ]


@pytest.fixture(autouse=True)
def _nothing_is_left(vllm):
    yield
    vllm.check_empty()


def prefilled(vllm, whole):
    return vllm.prefill(whole.tokens, ws_protect=whole.state.prefix)


def stock_drift(vllm, whole, question):
    (stock,) = vllm.ask([*whole.tokens, *question], max_tokens=8)
    return distance(whole, None, question, stock)


def test_native_signals_are_those_of_transformers(vllm, contexts):
    whole, _ = contexts[0]
    parent = prefilled(vllm, whole)

    vllm.ask([1], max_tokens=1)  # what was recorded is the session's from the next step on
    mine, theirs = (one.native for one in (vllm.worker.recordings[parent], whole.recording))

    assert len(mine) == len(theirs) == 9
    for depth, (row, reference) in enumerate(zip(mine, theirs, strict=True)):
        row, reference = row.whole(), reference.whole()
        error = (row - reference).abs().mean(dim=(0, 1)) / reference.abs().mean(dim=(0, 1))
        assert error.max() < (0.005 if depth == 0 else 0.05)


@pytest.mark.parametrize(
    ("scorer", "allocation"),
    [("gatesight", "gate"), ("keydiff", "flat"), ("knorm", "pyramid"), ("snapkv", "utility"), ("random", "gate")],
)
def test_children_answer_as_the_same_entries_do_on_transformers(vllm, contexts, scorer, allocation):
    sure = same = 0
    for whole, questions in contexts:
        parent = prefilled(vllm, whole)
        theirs = whole.compact(Policy(scorer, allocation, keep=0.3))
        child = None
        for question in questions:
            ids = whole.question_ids(question.text)
            drift = stock_drift(vllm, whole, ids)
            if child is None:
                child, output = vllm.fork(
                    parent, [*whole.tokens, *ids], ws_scorer=scorer, ws_allocation=allocation, ws_keep=0.3
                )
                kept = vllm.kept(child)
                assert kept.counts == theirs.kept.counts
                assert overlap(kept, theirs.kept) > 0.95  # bfloat16 gates against float32 ones
            (output,) = vllm.ask([*whole.tokens, *ids], max_tokens=8, ws_attach=child)
            assert distance(whole, kept, ids, output) < DRIFT * drift + 0.01
            reference = whole.engine.generate([replayed(whole, kept)], [ids], 8)[0]
            if reference.margin > 0.5:
                sure += 1
                same += tokens_of(output)[: len(reference.tokens)] == list(reference.tokens)
        vllm.drop_all()
    assert same == sure


def overlap(one, other):
    pairs = [
        (set(a.tolist()), set(b.tolist()))
        for first, second in zip(one.positions, other.positions, strict=True)
        for a, b in zip(first, second, strict=True)
    ]
    return sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs)


def test_compaction_changes_answers_here_too(vllm, contexts):
    """The comparison above can fail: a tenth of random entries is far from the uncompacted model."""
    whole, questions = contexts[1]
    ids = whole.question_ids(questions[0].text)
    parent = prefilled(vllm, whole)

    child, output = vllm.fork(parent, [*whole.tokens, *ids], ws_scorer="random", ws_keep=0.1, ws_allocation="flat")

    drift = stock_drift(vllm, whole, ids)
    assert distance(whole, vllm.kept(child), ids, output) < DRIFT * drift + 0.01
    assert distance(whole, None, ids, output) > 10 * drift


def test_a_session_is_never_written_to(vllm, contexts):
    whole, questions = contexts[0]
    parent = prefilled(vllm, whole)
    ids = [whole.question_ids(question.text) for question in questions]
    child, _ = vllm.fork(parent, [*whole.tokens, *ids[0]], ws_scorer="gatesight", ws_keep=1)
    first = [tokens_of(vllm.ask([*whole.tokens, *one], ws_attach=parent)[0]) for one in ids]

    for session in (parent, child):
        outputs = vllm.ask(*([*whole.tokens, *one] for one in ids * 2), ws_attach=session)
        assert [tokens_of(output) for output in outputs] == first * 2


def test_a_child_shares_recurrent_states_and_frees_the_rest(vllm, contexts):
    whole, questions = contexts[0]
    ids = whole.question_ids(questions[0].text)
    parent = prefilled(vllm, whole)
    child, _ = vllm.fork(parent, [*whole.tokens, *ids], ws_scorer="gatesight", ws_keep=0.2)
    of_parent, of_child = vllm.told([1], ws_info=parent)["blocks"], vllm.told([1], ws_info=child)["blocks"]

    vllm.drop(parent)

    status = vllm.sessions.status()
    assert of_parent - of_child == 3 * 4 - 3  # 600 tokens in blocks of 160, by about 120 in one block per layer
    assert status["pool_blocks"] - status["free_blocks"] == of_child == 9 + 3


def test_an_estimator_of_other_weights_is_refused(vllm, contexts, monkeypatch):
    whole, _ = contexts[0]
    parent = prefilled(vllm, whole)
    monkeypatch.setattr("wakesight.models.fingerprint.checkpoint_fingerprint", lambda folder: "0" * 64)
    for facts in (vllm.sessions.facts, vllm.worker.facts):
        facts.__dict__.pop("artifact", None)

    told = vllm.told([*whole.tokens, 9], ws_fork=parent, ws_child="6" * 32, ws_scorer="gatesight", ws_keep=0.3)

    monkeypatch.undo()
    assert "other weights" in told["refused"]


def test_what_goes_wrong_in_the_worker_ends_one_request_and_no_other(vllm, contexts, monkeypatch):
    whole, questions = contexts[0]
    ids = whole.question_ids(questions[0].text)
    parent = prefilled(vllm, whole)
    (wanted,) = vllm.ask([*whole.tokens, *ids], ws_attach=parent)
    vllm.worker.recordings.pop(parent)

    failing = vllm.add([*whole.tokens, *ids], ws_fork=parent, ws_child="7" * 32, ws_keep=0.3)
    beside = vllm.add([*whole.tokens, *ids], ws_attach=parent)
    outputs = vllm.run()

    assert "prefill its context again" in outputs[failing].outputs[0].stop_reason
    assert tokens_of(outputs[beside]) == tokens_of(wanted)
    assert "7" * 32 not in vllm.sessions.table

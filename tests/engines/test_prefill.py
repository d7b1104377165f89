"""Prefill, sizes and answers: what is refused, what is reported, what is linear in n."""

from __future__ import annotations

import pytest
import torch

from wakesight.core import Scores
from wakesight.engines.hf.engine import load
from wakesight.engines.session import _Pieces
from wakesight.errors import RequestError, WorkError
from wakesight.models.chat import encode_template
from wakesight.policy import Policy
from wakesight.testing import tiny


def test_two_tokens_are_the_least(engine):
    for context, found in (([], "is empty"), ([5], "has one token"), ("", "is empty"), ("x", "has one token")):
        with pytest.raises(RequestError, match=found):
            engine.prefill(context)
    session = engine.prefill([5, 6])
    for keep in (0.3, 0.5, 1.0):
        assert session.compact(Policy(keep=keep)).ask([7], max_new_tokens=2).finish in ("length", "eos")


def test_wrong_ids_chunks_and_lengths_are_refused(engine):
    with pytest.raises(RequestError, match="outside the model's vocabulary of 259"):
        engine.prefill([1, 2, 999])
    for chunk in (0, 32, 100):
        with pytest.raises(RequestError, match="multiple of 64"):
            engine.prefill([1, 2], chunk=chunk)
    with pytest.raises(RequestError, match="query_window=0 must be at least 1"):
        engine.prefill([1, 2], query_window=0)
    with pytest.raises(RequestError, match=r"1024 tokens.*at most 1024"):
        engine.prefill(tiny.tokens(1024))


def test_the_instruction_is_protected_and_the_template_frames_the_question(engine):
    session = engine.prefill("the harbour froze", instruction="Read this.")
    head = encode_template(engine.tokenizer, "<|im_start|>user\n") + engine.encode("Read this.\n\n")

    assert session.tokens == (*head, *engine.encode("the harbour froze"))
    assert session.state.prefix == len(head)
    child = session.compact(Policy(scorer="random", keep=0.2))
    for positions in child.kept.positions:
        assert (positions[:, : len(head)] == torch.arange(len(head))).all()
    expected = engine.encode("\n\nWhen?") + encode_template(engine.tokenizer, "<|im_end|>\n<|im_start|>assistant\n")
    assert session.ask("When?", max_new_tokens=4).tokens == session.ask(expected, max_new_tokens=4).tokens


def test_the_protected_prefix_ends_at_256_tokens(engine):
    assert engine.prefill("the harbour froze", instruction="x" * 400).state.prefix == 256


def test_plain_text_has_no_template(engine):
    session = engine.prefill("the harbour froze", chat=False)
    assert session.tokens == tuple(engine.encode("the harbour froze"))
    assert session.state.prefix == 0


def test_answers_stop_at_end_of_sequence_also_as_first_token(engine, monkeypatch):
    session = engine.prefill(tiny.tokens(50))
    long = session.ask([7], max_new_tokens=12).tokens
    assert len(set(long)) > 2

    monkeypatch.setattr(engine, "_ends", frozenset({long[0]}))
    first = session.ask([7], max_new_tokens=12)
    monkeypatch.setattr(engine, "_ends", frozenset({long[3]}))
    later = session.ask([7], max_new_tokens=12)

    assert (first.tokens, first.text, first.finish) == ((), "", "eos")
    assert (later.tokens, later.finish) == (long[: long.index(long[3])], "eos")


def test_answers_stop_at_the_model_limit(engine):
    session = engine.prefill(tiny.tokens(1000))
    answer = session.ask(tiny.tokens(20, seed=2), max_new_tokens=50)
    assert answer.finish in ("limit", "eos")
    assert len(answer.tokens) <= 1024 - 1020 + 1
    with pytest.raises(RequestError, match="1030 tokens"):
        session.ask(tiny.tokens(30, seed=2))


def test_streamed_pieces_add_up_to_the_answer(engine):
    session = engine.prefill("the harbour froze in the second week of March")
    for question in ("When?", "Where was it?", "Who?"):
        pieces: list[str] = []
        answer = session.ask(question, max_new_tokens=40, stream=pieces.append)
        assert "".join(pieces) == answer.text


def test_a_character_is_streamed_whole():
    """Bytes of one character never show up as replacement marks."""
    tokenizer, pieces = tiny.tokenizer(), []
    streamer = _Pieces(lambda ids: tokenizer.decode(ids), pieces.append)
    for token in tokenizer("a é 日本 \U0001f600!", add_special_tokens=False).input_ids:
        streamer.add(token)
    streamer.finish()
    assert pieces == list("a é 日本 \U0001f600!")


def test_one_scoring_serves_a_whole_sweep(engine):
    calls = []

    class Counting:
        reads = ("keys",)

        def score(self, signals):
            calls.append(signals)
            return Scores(tuple(-keys.norm(dim=-1) for keys in signals["keys"]))

    scorer = Counting()
    session = engine.prefill(tiny.tokens(80))
    for keep in (0.1, 0.5, 0.9):
        for allocation in ("flat", "pyramid"):
            session.compact(Policy(scorer=scorer, keep=keep, allocation=allocation))
    assert len(calls) == 1


def test_scores_that_are_not_finite_name_the_entry(engine):
    class Broken:
        reads = ("keys",)

        def score(self, signals):
            layers = [keys.norm(dim=-1) for keys in signals["keys"]]
            layers[1][1, 17] = float("nan")
            return Scores(tuple(layers))

    with pytest.raises(WorkError, match="nan at attention layer 1, KV head 1, position 17"):
        engine.prefill(tiny.tokens(80)).compact(Policy(scorer=Broken(), keep=0.5))


def test_a_scorer_that_needs_what_was_not_recorded_is_refused(engine):
    class Greedy:
        reads = ("keys", "gates")

        def score(self, signals):
            raise AssertionError("must not run")

    with pytest.raises(RequestError, match="'gates' was not recorded"):
        engine.prefill(tiny.tokens(80)).compact(Policy(scorer=Greedy(), keep=0.5))


def test_no_question_reaches_a_scorer(engine):
    """Scores are equal whatever was asked before, and signals cover the context only."""
    session = engine.prefill(tiny.tokens(80))
    before = [t.clone() for t in session.signals()["keys"]]
    queries = [t.clone() for t in session.signals()["queries"]]
    session.ask(tiny.tokens(20, seed=5), max_new_tokens=30)
    after = session.signals()
    assert all(torch.equal(a, b) for a, b in zip(before, after["keys"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(queries, after["queries"], strict=True))
    assert {t.shape[1] for t in after["keys"]} == {80}


def test_children_cannot_be_compacted_again(engine):
    child = engine.prefill(tiny.tokens(80)).compact(Policy(keep=0.5))
    with pytest.raises(RequestError, match="already compacted"):
        child.compact(Policy(keep=0.2))


def test_a_policy_needs_a_size(engine):
    with pytest.raises(RequestError, match=r"policy.at\(keep=0.3\)"):
        engine.prefill(tiny.tokens(80)).compact(Policy())


def test_lack_of_memory_in_prefill_leaves_nothing(monkeypatch):
    engine = tiny.engine("qwen3_5")
    calls = iter(range(100))
    lease = engine.pool.lease

    def failing(*arguments):
        if next(calls) == 3:
            raise MemoryError
        return lease(*arguments)

    monkeypatch.setattr(engine.pool, "lease", failing)
    with pytest.raises(WorkError, match="out of memory in prefill"):
        engine.prefill(tiny.tokens(80))
    assert (engine.pool.held_bytes, engine.pool.leases) == (0, 0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_prefill_memory_is_linear_in_the_context(family):
    """No single allocation grows with n * n, and none holds logits for the context."""
    engine = tiny.engine(family, max_position_embeddings=8192, poison=False)
    largest = []
    for n in (1024, 4096):
        with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
            engine.prefill(tiny.tokens(n), chunk=128).close()
        largest.append(max(event.cpu_memory_usage for event in profile.events()))
    logits = 4096 * tiny.VOCABULARY * 4
    assert largest[1] < 6 * largest[0]
    assert largest[1] < max(logits, 4096 * 4096)


@pytest.mark.gpu
def test_cuda_gives_the_same_answers():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    cpu = tiny.engine("qwen3_5")
    gpu = load(tiny.model("qwen3_5").cuda(), tokenizer=tiny.tokenizer())
    context, question = tiny.tokens(300), tiny.tokens(5, seed=2)
    for keep in (1.0, 0.3):
        policy = Policy(scorer="streaming", keep=keep)
        expected = cpu.prefill(context).compact(policy).logits(question)
        found = gpu.prefill(context).compact(policy).logits(question).cpu()
        assert (found - expected).abs().max() < 1e-3 * expected.abs().max()

"""Prefill, append, sizes and answers: what is refused, what is reported, what is linear in n."""

from __future__ import annotations

import gc

import pytest
import torch

from wakesight.core import Scores
from wakesight.engines.hf.engine import load
from wakesight.engines.hf.layers import SlotLayer
from wakesight.engines.session import _Pieces
from wakesight.errors import RequestError, WorkError
from wakesight.models.chat import encode_template
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import clear_margin, relative_gap, state_digest

PLAIN_AND_HYBRID = ("llama", "qwen3_5", "falcon_h1")
OTHERS = tuple(f for f in ("gemma3", "kimi_linear", "jamba", "zamba2", "qwen4_exp") if f in tiny.FAMILIES)


@pytest.fixture(scope="module", params=PLAIN_AND_HYBRID)
def engine(request):
    return tiny.engine(request.param)


@pytest.mark.parametrize("context", [[], ""])
def test_an_empty_context_is_refused(engine, context):
    with pytest.raises(RequestError, match=r"the context is empty; give a document of at least one token"):
        engine.prefill(context)


@pytest.mark.parametrize("context", [[5], [5, 6]])
@pytest.mark.parametrize("family", [*PLAIN_AND_HYBRID, *OTHERS])
def test_one_token_is_a_context(family, context):
    """As good as any other: it equals transformers on the same ids, and can be compacted and continued."""
    engine, plain = tiny.engine(family), tiny.model(family)
    session, question = engine.prefill(context), [7, 8]

    assert relative_gap(session.logits(question), plain(torch.tensor([context + question])).logits[0, -2:]) < 1e-5
    for keep in (0.6, 1.0):
        if engine.only_whole is None or keep == 1:
            child = session.compact(Policy(scorer="random", keep=keep))
            assert child.ask(question, max_new_tokens=2).finish in ("length", "eos")
            if keep == 1 or len(context) == 1:
                assert torch.equal(child.logits(question), session.logits(question))
    session.append([9])
    assert relative_gap(session.logits([7]), plain(torch.tensor([[*context, 9, 7]])).logits[0, -1:]) < 1e-5


def test_one_letter_is_a_document(engine):
    session = engine.prefill("x", chat=False)
    assert len(session.tokens) == 1
    assert session.ask("y", max_new_tokens=2).finish in ("length", "eos")


def test_wrong_ids_chunks_and_lengths_are_refused(engine):
    with pytest.raises(RequestError, match="outside the model's vocabulary of 259"):
        engine.prefill([1, 2, 999])
    for chunk in (0, 32, 100, -64):
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
    for heads in child.kept.positions:
        assert all(torch.equal(positions[: len(head)], torch.arange(len(head))) for positions in heads)
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


def test_children_are_compacted_again_by_their_logical_length(engine):
    """What a child holds competes for a share of the whole context; a head that holds less keeps all of it."""
    parent = engine.prefill(tiny.tokens(80))
    child = parent.compact(Policy(scorer="knorm", keep=0.5))

    smaller = child.compact(Policy(scorer="knorm", keep=0.2))
    direct = parent.compact(Policy(scorer="knorm", keep=0.2))
    larger = child.compact(Policy(scorer="random", keep=0.9))

    assert smaller.stats.kept_entries == direct.stats.kept_entries
    for mine, expected in zip(smaller.kept.positions, direct.kept.positions, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))  # the norms are the same
    assert torch.equal(smaller.logits([7, 8]), direct.logits([7, 8]))
    assert larger.stats.kept_entries == child.stats.kept_entries
    assert torch.equal(larger.logits([7, 8]), child.logits([7, 8]))


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


def as_before(session) -> tuple:
    """All that a failed append must leave alone."""
    pool, state = session.engine.pool, session.state
    held = (pool.held_bytes, pool.leases)
    return state_digest(state), session.tokens, id(state.kept), id(session.recording), *map(id, state.states), held


def failing_update(monkeypatch, call: int, error: BaseException) -> None:
    """The `call`-th layer that stores keys from now on raises instead."""
    update, calls = SlotLayer.update, iter(range(1, 1000))

    def some(self, *args, **kwargs):
        if next(calls) == call:
            raise error
        return update(self, *args, **kwargs)

    monkeypatch.setattr(SlotLayer, "update", some)


@pytest.mark.parametrize("keep", [None, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("layer", [1, 2])
def test_an_append_that_fails_midway_leaves_the_session_as_it_was(engine, keep, chunk, layer, monkeypatch):
    """Storage of some layers has the new tokens by then, and recurrent states have moved."""
    gc.collect()
    session, question = engine.prefill(tiny.tokens(150), record=["h2o", "expected_attention"]), tiny.tokens(5, seed=2)
    if keep is not None:
        session = session.compact(Policy(scorer="random", keep=keep))
    expected, before = session.logits(question), as_before(session)
    call = (chunk - 1) * len(engine.geometry.attention_layers) + layer

    for error, found in (
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), WorkError),
        (ValueError(), ValueError),
    ):
        with monkeypatch.context() as patch:
            failing_update(patch, call, error)
            with pytest.raises(found):
                session.append(tiny.tokens(100, seed=3), chunk=64)
        assert as_before(session) == before

    assert torch.equal(session.logits(question), expected)
    session.append(tiny.tokens(100, seed=3), chunk=64)  # and the next try succeeds
    assert session.state.logical_length == 250


def test_lack_of_memory_in_append_says_so(engine, monkeypatch):
    session = engine.prefill(tiny.tokens(50))
    failing_update(monkeypatch, 2, MemoryError())
    with pytest.raises(WorkError, match="out of memory in append; use a shorter context"):
        session.append([1, 2, 3])


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_storage_that_cannot_grow_in_append_leaves_the_session_as_it_was(call, monkeypatch):
    """Some layers may have grown already; they keep the room, and hold what they held."""
    engine = tiny.engine("llama")
    session, question = engine.prefill(tiny.tokens(150)), tiny.tokens(5, seed=2)
    expected, before, leases = session.logits(question), state_digest(session.state), engine.pool.leases
    lease, calls = engine.pool.lease, iter(range(1, 100))

    def failing(*arguments):
        if next(calls) == call:
            raise WorkError("out of memory: no room")
        return lease(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "lease", failing)
        with pytest.raises(WorkError, match="no room"):
            session.append(tiny.tokens(400, seed=3), chunk=64)

    assert (state_digest(session.state), engine.pool.leases) == (before, leases)
    assert engine.pool.held_bytes == sum(s.held_bytes + s.slack_bytes for s in session.state.slots)
    assert torch.equal(session.logits(question), expected)
    session.append(tiny.tokens(400, seed=3), chunk=64)
    session.close()
    assert (engine.pool.held_bytes, engine.pool.leases) == (0, 0)


@pytest.mark.parametrize("family", [*PLAIN_AND_HYBRID, *OTHERS])
@pytest.mark.parametrize("first", [1, 63, 100])
def test_a_session_that_read_on_equals_one_that_read_at_once(family, first):
    engine = tiny.engine(family)
    tokens, question = tiny.tokens(200), tiny.tokens(6, seed=2)
    fresh = engine.prefill(tokens)

    session = engine.prefill(tokens[:first])
    session.ask(question, max_new_tokens=9)
    session.append(tokens[first:190], chunk=64)
    session.append(tokens[190:])

    assert session.tokens == tuple(tokens)
    assert session.stats.logical_length == 200
    assert session.stats.physical_lengths == fresh.stats.physical_lengths
    assert session.stats.state_bytes == fresh.stats.state_bytes
    assert session.stats.kv_bytes_kept == fresh.stats.kv_bytes_kept
    expected = fresh.logits(question)
    assert relative_gap(session.logits(question), expected) < 1e-5
    if clear_margin(expected[-1]):
        assert session.ask(question, max_new_tokens=1).tokens == fresh.ask(question, max_new_tokens=1).tokens


def test_a_child_that_read_on_holds_every_new_entry(engine):
    parent = engine.prefill(tiny.tokens(100))
    child = parent.compact(Policy(scorer="random", keep=0.3))
    before, digest = child.kept, state_digest(parent.state)

    child.append(tiny.tokens(20, seed=2))

    assert child.stats.kept_entries == [[50] * heads for heads in engine.geometry.kv_heads]
    for mine, old in zip(child.kept.positions, before.positions, strict=True):
        assert all(torch.equal(a, torch.cat([b, torch.arange(100, 120)])) for a, b in zip(mine, old, strict=True))
    assert len(child.tokens) == 120
    assert state_digest(parent.state) == digest
    again = child.compact(Policy(scorer="streaming", keep=0.2))
    assert again.stats.kept_entries == [[24] * heads for heads in engine.geometry.kv_heads]


def test_text_is_appended_as_plain_tokens(engine):
    session = engine.prefill("the harbour froze")
    tokens = session.tokens
    session.append(" in March")
    assert session.tokens == (*tokens, *engine.encode(" in March"))


def test_a_session_that_read_on_is_ranked_anew(engine):
    session = engine.prefill(tiny.tokens(80))
    session.compact(Policy(scorer="knorm", keep=0.5))
    session.append(tiny.tokens(40, seed=2))
    fresh = session.compact(Policy(scorer="knorm", keep=0.5))
    assert fresh.stats.kept_entries == [[60] * heads for heads in engine.geometry.kv_heads]
    assert any(int(head[-1]) >= 80 for heads in fresh.kept.positions for head in heads)


def test_what_cannot_be_appended_is_refused_and_changes_nothing(engine):
    session = engine.prefill(tiny.tokens(1000))
    before = as_before(session)
    for tokens, chunk, found in (
        ([], 512, "nothing to append"),
        ("", 512, "nothing to append"),
        ([1], 100, "multiple of 64"),
        ([1, 999], 512, "outside the model's vocabulary"),
        (tiny.tokens(24), 512, "1024 tokens with its template, but .* reads at most 1024"),
    ):
        with pytest.raises(RequestError, match=found):
            session.append(tokens, chunk=chunk)
        assert as_before(session) == before
    session.append(tiny.tokens(23))
    session.close()
    with pytest.raises(RequestError, match="closed"):
        session.append([1])


def test_nothing_is_appended_while_a_question_is_answered(engine):
    session = engine.prefill(tiny.tokens(50))
    with pytest.raises(RequestError, match="is answering"):
        session.ask([7], stream=lambda piece: session.append([1]))
    assert len(session.tokens) == 50


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("qwen3_5", 4), ("falcon_h1", 1)])
def test_prefill_memory_is_linear_in_the_context(family, layers):
    """No single allocation grows with n * n, and none holds logits for the context."""
    engine = tiny.engine(family, num_hidden_layers=layers, max_position_embeddings=8192, poison=False)
    largest = []
    for n in (512, 2048):
        with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
            engine.prefill(tiny.tokens(n), chunk=128).close()
        largest.append(max(event.cpu_memory_usage for event in profile.events()))
    logits = 2048 * tiny.VOCABULARY * 4
    assert largest[1] < 6 * largest[0]
    assert largest[1] < max(logits, 2048 * 2048)


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


def test_a_thinking_model_is_given_its_answer_tokens_after_the_closing_tag(monkeypatch):
    """Scripted: the model thinks 5 tokens, closes with two ids, then answers."""
    from wakesight.engines.base import Thinking
    from wakesight.engines.hf.engine import Answering

    def finish(made: list[int], **changes) -> tuple[str | None, int]:
        answer = Answering(
            frozenset({99}), 3, changes.get("room", 100), None, Thinking((7, 8), changes.get("tokens", 10))
        )
        for token in made:
            if answer.finish is None:
                answer.take(token, 1.0)
        return answer.finish, len(answer.made)

    assert finish([1, 2, 7, 3, 4, 7, 8, 5, 5, 5, 5]) == ("length", 10)  # 7 to think and close, 3 to answer
    assert finish([1, 7, 8, 99]) == ("eos", 3)
    assert finish([1] * 20) == ("thinking", 10)
    assert finish([1] * 20, room=6) == ("limit", 6)

"""A loaded model keeps working with other caches, and `close` gives it back as it was."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from wakesight.engines.hf.attach import attach, left_pads, override
from wakesight.engines.hf.engine import load
from wakesight.engines.hf.layers import OwnLayer, SlotLayer, take_pending
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import cached

SOME = ("llama", "qwen3_5", "falcon_h1")


@pytest.fixture(params=tiny.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module", params=SOME)
def engine(request):
    return load(tiny.model(request.param), growth=64)


def generate(engine, ids, cache, **settings):
    return engine.model.generate(torch.tensor(ids), **cached(cache), do_sample=False, pad_token_id=258, **settings)


class Speaker(nn.Module):
    def say(self, word: str) -> str:
        return f"says {word}"


def louder(stock):
    return lambda word: f"{stock(word)}!"


def test_an_override_changes_one_object_and_is_undone():
    one, other = Speaker(), Speaker()
    before = dict(vars(one))

    undo = override(one, "say", louder)

    assert (one.say("a"), other.say("a")) == ("says a!", "says a")
    undo()
    assert one.say("a") == "says a"
    assert vars(one) == before


def test_overrides_lie_on_top_of_each_other():
    speaker = Speaker()
    undos = [override(speaker, "say", louder) for _ in range(3)]
    assert speaker.say("a") == "says a!!!"
    for left, undo in zip((2, 1, 0), reversed(undos), strict=True):
        undo()
        assert speaker.say("a") == "says a" + "!" * left


def test_a_method_that_the_object_had_of_its_own_comes_back():
    speaker = Speaker()
    mine = speaker.say = types.MethodType(lambda self, word: f"my {word}", speaker)

    undo = override(speaker, "say", louder)
    assert speaker.say("a") == "my a!"
    undo()

    assert vars(speaker)["say"] is mine


def snapshot(model) -> dict:
    """All that `attach` may touch: own attributes of every module by identity, hooks, the config."""
    return {
        "own": [{name: id(value) for name, value in vars(module).items()} for module in model.modules()],
        "hooks": [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()],
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_close_leaves_no_trace(family, threads, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)  # with two, linear layers are changed as well
    model = tiny.model(family)
    before = snapshot(model)

    engine = load(model)
    assert snapshot(model) != before
    engine.close()

    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["forward", "prepare_inputs_for_generation"])
def test_close_gives_back_methods_that_the_model_had_of_its_own(name):
    model = tiny.model("llama")
    stock, calls = getattr(model, name), []

    def mine(self, *args, **kwargs):
        calls.append(name)
        return stock(*args, **kwargs)

    own = types.MethodType(mine, model)
    setattr(model, name, own)
    before = snapshot(model)

    engine = load(model)
    session = engine.prefill(tiny.tokens(20))
    generate(engine, [tiny.tokens(4, seed=2)], session.cache(), max_new_tokens=2)
    engine.close()

    assert calls  # ours lay on top of it, not in its place
    assert vars(model)[name] is own
    assert snapshot(model) == before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_that_was_set_before_comes_back(attention):
    model = tiny.model("llama")
    model.set_attn_implementation(attention)
    load(model, attention="sdpa").close()
    assert model.config._attn_implementation == attention


def test_an_unknown_attention_is_refused_and_changes_nothing():
    model = tiny.model("llama")
    before = snapshot(model)
    with pytest.raises(RequestError, match="attention 'flash' is unknown; use sdpa or eager"):
        attach(model, "flash")
    assert snapshot(model) == before


@pytest.mark.parametrize("family", SOME)
def test_a_closed_engine_refuses(family):
    engine = load(tiny.model(family))
    session = engine.prefill(tiny.tokens(20))
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        session.ask([1, 2])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_caches_and_padded_batches_work_as_before(family, attention):
    plain = tiny.model(family)
    plain.set_attn_implementation(attention)
    ours = load(tiny.model(family), attention=attention).model
    rows = [tiny.tokens(12), [258] * 5 + tiny.tokens(7)]
    inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor([[1] * 12, [0] * 5 + [1] * 7])}
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 258}

    expected = plain.generate(**inputs, **settings)

    assert torch.equal(ours.generate(**inputs, **settings), expected)
    assert torch.equal(ours.generate(**inputs, **settings, **cached(DynamicCache(config=ours.config))), expected)


PADS = [
    ([[1, 1, 1]], 3, [0]),
    ([[0, 0, 1], [1, 1, 1], [0, 1, 1]], 3, [2, 0, 1]),
    ([[0, 0, 0, 1, 1]], 2, [0]),  # pads of what was read before
    ([[1, 1, 1, 0, 1]], 2, [1]),  # a pad behind a context
]


@pytest.mark.parametrize(("mask", "width", "pads"), PADS)
def test_pads_are_counted_in_the_newest_columns(mask, width, pads):
    assert left_pads(torch.tensor(mask), width) == pads
    assert left_pads(torch.tensor(mask).bool(), width) == pads


def test_without_a_mask_there_are_no_pads_and_another_form_is_refused():
    assert left_pads(None, 4) == [0]
    for mask in (torch.ones(1, 1, 4, 4), torch.ones(1, 3)):  # a float mask of another form; one that is too narrow
        with pytest.raises(RequestError, match="does not fit 4 tokens"):
            left_pads(mask, 4)


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_arguments_may_be_given_by_position(family):
    engine = tiny.engine(family)
    session = engine.prefill(tiny.tokens(40))
    ids = torch.tensor([tiny.tokens(5, seed=2)])
    by_position = engine.model(ids, torch.ones_like(ids), **cached(session.cache())).logits
    assert torch.equal(by_position, engine.model(input_ids=ids, **cached(session.cache())).logits)


@pytest.mark.parametrize(
    "mask", [[[1, 1, 0]], [[1, 0, 1]], [[0, 1, 0]], [[1, 1, 1], [1, 0, 0]], [[0, 0, 0]], [[1, 1, 1], [0, 0, 0]]]
)
def test_a_mask_may_hide_the_start_of_a_row_only(mask):
    with pytest.raises(RequestError, match="pad the rows on the left"):
        left_pads(torch.tensor(mask), 3)


def test_right_padding_is_refused_and_the_cache_can_still_be_used(engine):
    session = engine.prefill(tiny.tokens(40))
    cache, question = session.cache(), tiny.tokens(3, seed=2)
    ids, mask = [[*question, 258, 258]], torch.tensor([[1] * 43 + [0] * 2])
    with pytest.raises(RequestError, match="pad the rows on the left"):
        engine.model(input_ids=torch.tensor(ids), attention_mask=mask, **cached(cache))

    made = generate(engine, [question], cache, max_new_tokens=4)
    expected = generate(engine, [question], session.cache(), max_new_tokens=4)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("more", [0, 5])
def test_full_ids_are_refused_by_name(engine, beams, more):
    context, question = tiny.tokens(40), tiny.tokens(5, seed=2)
    session = engine.prefill(context)
    with pytest.raises(RequestError, match=r"start with the 40 context tokens.*pass the question's ids only"):
        generate(engine, [context + question[:more]], session.cache(), max_new_tokens=2, num_beams=beams)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}])
def test_full_ids_in_any_row_of_a_batch_are_refused(engine, settings):
    """Beams repeat every row, so row i of the ids is not row i of the cache."""
    contexts = [tiny.tokens(40), tiny.tokens(30, seed=3)]
    batch = engine.prefill_batch(contexts)
    wrong = [tiny.tokens(35, seed=4), contexts[1] + tiny.tokens(5, seed=5)]
    with pytest.raises(RequestError, match="start with the 30 context tokens"):
        generate(engine, wrong, batch.cache(), max_new_tokens=2, **settings)
    right = [contexts[1] + tiny.tokens(5, seed=6), tiny.tokens(35, seed=7)]  # the other row's context is no mistake
    assert len(generate(engine, right, batch.cache(), max_new_tokens=2, **settings)) == 2


def test_a_question_that_repeats_part_of_the_context_is_no_full_context(engine):
    context = tiny.tokens(40)
    session = engine.prefill(context)
    made = generate(engine, [context[:39]], session.cache(), max_new_tokens=2)
    assert made.shape[1] >= 40


def test_a_batch_of_the_wrong_size_is_refused_by_name(engine):
    questions = [tiny.tokens(5, seed=seed) for seed in range(3)]
    single = engine.prefill(tiny.tokens(40))
    pair = engine.prefill_batch([tiny.tokens(40), tiny.tokens(30)])

    used = single.cache()
    generate(engine, questions[:1], used, max_new_tokens=2)
    with pytest.raises(RequestError, match=r"holds one sequence, not a batch of 2; .* one cache\(\) for each call"):
        generate(engine, questions[:2], used, max_new_tokens=2)
    with pytest.raises(RequestError, match="holds 2 sequences, not a batch of 3; give generate one question per"):
        generate(engine, questions, pair.cache(), max_new_tokens=2)
    with pytest.raises(RequestError, match="holds 2 sequences, not a batch of 1"):
        generate(engine, questions[:1], pair.cache(), max_new_tokens=2)


def test_a_fresh_cache_takes_several_questions(engine):
    """Each row then continues a copy of the one context."""
    session = engine.prefill(tiny.tokens(40)).compact(Policy(scorer="random", keep=0.5))
    questions = [tiny.tokens(5, seed=seed) for seed in range(3)]

    made = generate(engine, questions, session.cache(), max_new_tokens=6)

    for row, question in zip(made, questions, strict=True):
        alone = generate(engine, [question], session.cache(), max_new_tokens=6)[0]
        assert row[: len(alone)].tolist() == alone.tolist()


def test_questions_of_different_lengths_are_padded_on_the_left(engine):
    batch = engine.prefill_batch([tiny.tokens(40), tiny.tokens(70, seed=3)]).compact(Policy(scorer="random", keep=0.5))
    questions = [tiny.tokens(3, seed=5), tiny.tokens(7, seed=6)]
    mask = torch.tensor([[0] * 4 + [1] * 3, [1] * 7])

    made = generate(engine, [[258] * 4 + questions[0], questions[1]], batch.cache(), attention_mask=mask,
                    max_new_tokens=6)  # fmt: skip

    for row, session, question in zip(made, batch, questions, strict=True):
        expected = session.ask(question, max_new_tokens=6).tokens
        assert tuple(t for t in row[7:].tolist() if t < 256) == expected


def test_sampling_continues_from_a_compacted_cache(engine):
    child = engine.prefill(tiny.tokens(60)).compact(Policy(scorer="random", keep=0.4))
    question = torch.tensor([tiny.tokens(5, seed=2)])
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(engine.model.generate(question, **cached(child.cache()), max_new_tokens=8, do_sample=True))
    assert torch.equal(made[0], made[1])


def test_ids_may_come_without_their_name(engine):
    session = engine.prefill(tiny.tokens(40))
    question = tiny.tokens(5, seed=2)
    found = engine.model(torch.tensor([question]), **cached(session.cache())).logits[0]
    assert torch.equal(found, session.logits(question))


def test_embeddings_continue_a_session_as_ids_do(engine):
    session = engine.prefill(tiny.tokens(40))
    question = tiny.tokens(5, seed=2)
    embedded = engine.model.get_input_embeddings()(torch.tensor([question]))
    found = engine.model(inputs_embeds=embedded, **cached(session.cache())).logits[0]
    assert torch.equal(found, session.logits(question))


def bypassing(monkeypatch, model) -> None:
    """Let a model hand its keys to transformers' own attention."""
    monkeypatch.setattr(model.config, "_attn_implementation", "sdpa")


@pytest.fixture
def _forgets_pending():
    yield
    take_pending()


WITHOUT_INDEXER = [family for family in tiny.FAMILIES if family != "qwen4_exp"]  # its layers attend by themselves


@pytest.mark.usefixtures("_forgets_pending")
@pytest.mark.parametrize("family", WITHOUT_INDEXER)
def test_a_model_that_bypasses_our_attention_fails_loudly(family, monkeypatch):
    """Whatever masks it then used would be wrong for a compacted session; it must not go unnoticed."""
    engine = tiny.engine(family)
    bypassing(monkeypatch, engine.model)
    with pytest.raises(RuntimeError, match="bypassed wakesight's attention"):
        engine.prefill(tiny.tokens(20))
    assert (engine.pool.held_bytes, engine.pool.leases) == (0, 0)


@pytest.mark.parametrize("family", SOME)
def test_a_model_that_skips_the_cache_of_a_layer_fails_loudly(family, monkeypatch):
    engine = tiny.engine(family)
    update, skipped = SlotLayer.update, []

    def some(self, key, value, *args, **kwargs):
        if not skipped:
            skipped.append(self)
            return key, value
        return update(self, key, value, *args, **kwargs)

    monkeypatch.setattr(SlotLayer, "update", some)
    with pytest.raises(RuntimeError, match="did not store their keys"):
        engine.prefill(tiny.tokens(20))


@pytest.mark.usefixtures("_forgets_pending")
def test_an_interrupted_pass_leaves_nothing_to_the_next_one(monkeypatch):
    """Between storing and attending a pass may stop: out of memory, Ctrl-C. Other caches must not notice later."""
    engine = tiny.engine("llama")
    ids = torch.tensor([tiny.tokens(12)])
    expected = engine.model(input_ids=ids, use_cache=False).logits
    store = OwnLayer._store

    def interrupted(self, new):
        store(self, new)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OwnLayer, "_store", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(tiny.tokens(20))

    assert torch.equal(engine.model(input_ids=ids, use_cache=False).logits, expected)

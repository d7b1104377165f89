"""compacting(): generate, or a loop of one's own, on a compacted cache; afterwards the model is as it was."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import QuantizedCache

from wakesight.engines.hf import compat
from wakesight.engines.hf.compacting import Compacting, compacting
from wakesight.engines.hf.engine import load
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import cached

FAMILIES = [name for name in ("llama", "qwen3_5", "falcon_h1", "gemma3", "jamba", "bamba") if name in tiny.FAMILIES]
CONTEXT, QUESTION = tiny.tokens(90), tiny.tokens(7, seed=2)
PROMPT = CONTEXT + QUESTION
ALL = Policy(keep=1.0)
PAD = 258
ROWS = [PROMPT, [PAD] * 30 + tiny.tokens(len(PROMPT) - 30, seed=3)]
MASK = torch.tensor([[1] * len(PROMPT), [0] * 30 + [1] * (len(PROMPT) - 30)])


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny.model(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny.model("llama")


def generate(model, rows, **settings):
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": PAD, **settings}
    return model.generate(torch.tensor(rows), **settings)


def answer(row, prompt: int) -> tuple[int, ...]:
    """What was generated, without the end and its padding."""
    return tuple(t for t in row[prompt:].tolist() if t < 256)


# --- keeping everything changes nothing ---------------------------------------------------------------------------

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefix", [None, len(CONTEXT)])
def test_keeping_everything_generates_what_the_plain_model_does(model, mode, prefix):
    torch.manual_seed(0)
    expected = generate(model, [PROMPT], **MODES[mode])
    torch.manual_seed(0)
    with compacting(model, ALL, prefix_tokens=prefix) as run:
        found = generate(model, [PROMPT], **MODES[mode])
    assert torch.equal(found, expected)
    assert len(run.stats) == 1  # beams and several return sequences share one prefill


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_left_padded_batches_generate_what_each_row_does_alone(model, mode):
    """Alone, not what the plain model makes of pads: those enter the recurrent states of some families."""
    with compacting(model, ALL, prefix_tokens=[80, 50]) as run:
        found = generate(model, ROWS, attention_mask=MASK, **MODES[mode])
    assert len(run.stats) == 2
    assert [stats.logical_length for stats in run.stats] == [80, 50]
    count = len(found) // 2
    for index, row in enumerate(ROWS):
        alone = [t for t in row if t != PAD]
        expected = generate(model, [alone], **MODES[mode])
        for one, other in zip(found[index * count : (index + 1) * count], expected, strict=True):
            assert answer(one, len(row)) == answer(other, len(alone))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_left_padded_batches_equal_the_plain_model_where_pads_do_no_harm(family):
    model = tiny.model(family)
    expected = generate(model, ROWS, attention_mask=MASK)
    with compacting(model, ALL, prefix_tokens=60):
        assert torch.equal(generate(model, ROWS, attention_mask=MASK), expected)


def test_equal_rows_are_read_once(model):
    with compacting(model, ALL) as run:
        found = generate(model, [PROMPT, PROMPT, CONTEXT + QUESTION[::-1]])
    assert len(run.kept) == len(run.stats) == 2
    assert torch.equal(found[0], found[1])
    expected = generate(model, [CONTEXT + QUESTION[::-1]])[0]
    assert answer(found[2], len(PROMPT)) == answer(expected, len(PROMPT))


@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT[:2]])
def test_a_prompt_of_one_or_two_tokens(model, prompt):
    expected = generate(model, [prompt])
    with compacting(model, ALL):
        assert torch.equal(generate(model, [prompt]), expected)


# --- keeping less equals the library ------------------------------------------------------------------------------

POLICIES = [
    Policy(scorer="keydiff", keep=0.3),
    Policy(scorer="knorm", keep=0.4, allocation="global"),
    Policy(scorer="h2o", keep=0.4, unit="page", page_size=8),
    Policy(scorer="expected_attention", keep=0.3),
    Policy(scorer="snapkv:window=80", keep=0.5),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.scorer)
def test_keeping_less_answers_as_a_compacted_session_does(model, policy):
    with compacting(model, policy, prefix_tokens=len(CONTEXT)) as run:
        found = generate(model, [PROMPT])[0]
    assert run.label == "query-agnostic"
    assert run.query_aware is False

    engine = load(model)
    try:
        record = {"record": (policy.scorer.partition(":")[0],), "query_window": 80}
        child = engine.prefill(CONTEXT, **record).compact(policy)
        expected = child.ask(QUESTION, max_new_tokens=10)
    finally:
        engine.close()
    assert answer(found, len(PROMPT)) == expected.tokens
    assert run.stats[0].kept_entries == child.stats.kept_entries
    assert run.kept[0] is not None
    for mine, theirs in zip(run.kept[0].positions, child.kept.positions, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_without_prefix_tokens_the_whole_prompt_is_scored_and_the_run_is_labelled(model):
    policy = Policy(scorer="keydiff", keep=0.3)
    with compacting(model, policy) as run:
        found = generate(model, [PROMPT], max_new_tokens=6, eos_token_id=None)[0]
    assert (run.query_aware, run.label) == (True, "query-aware")
    assert run.stats[0].logical_length == len(PROMPT)

    first = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
    assert found[len(PROMPT)] == first  # the prompt's own last token sees everything
    engine = load(model)
    try:
        whole = engine.prefill(PROMPT)
        logits = whole.compact(policy).logits(found[len(PROMPT) : -1].tolist())
    finally:
        engine.close()
    made = [int(row.argmax()) for row in logits]
    assert made == found[len(PROMPT) + 1 :].tolist()


def test_every_prompt_may_have_a_prefix_of_its_own(llama):
    policy = Policy(scorer="knorm", keep=0.5)
    with compacting(llama, policy, prefix_tokens=[80, 50]) as run:
        found = generate(llama, ROWS, attention_mask=MASK, num_beams=2, num_return_sequences=1)
    assert [stats.logical_length for stats in run.stats] == [80, 50]
    for row, prefix, made in zip(ROWS, (80, 50), found, strict=True):
        alone = [t for t in row if t != PAD]
        with compacting(llama, policy, prefix_tokens=prefix):
            expected = generate(llama, [alone], num_beams=2, num_return_sequences=1)[0]
        assert answer(made, len(row)) == answer(expected, len(alone))


def test_sampling_equals_sampling_on_a_sessions_cache(model):
    policy, settings = Policy(scorer="keydiff", keep=0.3), {"do_sample": True, "num_return_sequences": 4}
    torch.manual_seed(5)
    with compacting(model, policy, prefix_tokens=len(CONTEXT)):
        found = generate(model, [PROMPT], **settings)
    engine = load(model)
    try:
        cache = engine.prefill(CONTEXT).compact(policy).cache()
        torch.manual_seed(5)
        expected = generate(model, [QUESTION], **cached(cache), **settings)
    finally:
        engine.close()
    assert torch.equal(found[:, len(PROMPT) :], expected[:, len(QUESTION) :])
    assert len({tuple(row) for row in found.tolist()}) > 1


def test_several_calls_in_one_block(llama):
    with compacting(llama, Policy(keep=0.4), prefix_tokens=20) as run:
        first = generate(llama, [PROMPT])
        generate(llama, [CONTEXT])
        assert torch.equal(generate(llama, [PROMPT]), first)
    assert [stats.logical_length for stats in run.stats] == [20, 20, 20]


def test_pads_are_not_counted_as_context(llama):
    with compacting(llama, Policy(entries=5), prefix_tokens=40) as run:
        generate(llama, ROWS[1:], attention_mask=MASK[1:])
    assert run.stats[0].kept_entries == [[5, 5]] * 3


# --- one's own loop -----------------------------------------------------------------------------------------------


def loop(model, ids, steps: int) -> list[int]:
    """Greedy, as people write it. With positions: without them some plain models (bamba) restart at 0."""
    output = model(torch.tensor([ids]), use_cache=True)
    made = [int(output.logits[0, -1].argmax())]
    while len(made) < steps:
        name = compat.cache_keyword(model)
        at = torch.tensor([[len(ids) + len(made) - 1]])
        output = model(torch.tensor([made[-1:]]), position_ids=at, use_cache=True, **{name: output[name]})
        made.append(int(output.logits[0, -1].argmax()))
    return made


def test_a_loop_of_ones_own(model):
    expected = loop(model, PROMPT, 8)
    with compacting(model, ALL, prefix_tokens=len(CONTEXT)):
        assert loop(model, PROMPT, 8) == expected
    with compacting(model, Policy(keep=0.3), prefix_tokens=len(CONTEXT)) as run:
        found = loop(model, PROMPT, 8)
        generated = generate(model, [PROMPT], max_new_tokens=8, eos_token_id=None)[0, len(PROMPT) :].tolist()
    assert found == generated
    assert len(run.stats) == 2


def test_a_pass_without_a_cache_is_the_models_own(model):
    expected = model(torch.tensor([PROMPT]), use_cache=False).logits
    with compacting(model, Policy(keep=0.3)) as run:
        output = model(torch.tensor([PROMPT]), use_cache=False)
    assert torch.allclose(output.logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert output.logits.shape == expected.shape
    assert run.stats == []


def test_the_configs_use_cache_decides_where_the_call_says_nothing(llama, monkeypatch):
    monkeypatch.setattr(llama.config, "use_cache", False)
    with compacting(llama, Policy(keep=0.3)) as run:
        llama(torch.tensor([PROMPT]))
    assert run.stats == []


def test_an_empty_cache_may_be_handed_over(model):
    expected = generate(model, [PROMPT])
    with compacting(model, ALL):
        assert torch.equal(generate(model, [PROMPT], **cached(DynamicCache(config=model.config))), expected)


def test_a_cache_that_was_handed_over_is_not_taken_for_an_empty_one_again(model):
    """What was read lies in the output's cache; going on with one's own would start every token anew."""
    mine = cached(DynamicCache(config=model.config))
    with compacting(model, Policy(keep=0.5)) as run:
        model(torch.tensor([PROMPT]), use_cache=True, **mine)
        with pytest.raises(RequestError, match="go on with the cache of the model's output"):
            model(torch.tensor([QUESTION]), use_cache=True, **mine)
    assert len(run.stats) == 1


def test_no_gradients_are_kept_of_the_reading(llama):
    with torch.enable_grad(), compacting(llama, Policy(keep=0.3), prefix_tokens=len(CONTEXT)):
        assert not llama(torch.tensor([PROMPT]), use_cache=True).logits.requires_grad


# --- what is refused ----------------------------------------------------------------------------------------------


class FakeQuantized(QuantizedCache):
    """As transformers' own, whose constructor needs a package."""

    def __init__(self) -> None:
        self.layers = []


def filled(model):
    cache = DynamicCache(config=model.config)
    outside = tiny.model("llama") if model.config.model_type == "llama" else tiny.model("qwen3_5")
    outside(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True, **cached(cache))
    return cache


def handed(make):
    return lambda model: model(input_ids=torch.tensor([PROMPT]), use_cache=True, **cached(make(model)))


def embedded(model):
    return model(inputs_embeds=model.get_input_embeddings()(torch.tensor([PROMPT])), use_cache=True)


def right_padded(model):
    mask = torch.tensor([[1] * len(PROMPT), [1] * (len(PROMPT) - 4) + [0] * 4])
    return generate(model, [PROMPT, PROMPT[:-4] + [PAD] * 4], attention_mask=mask)


INSTEAD = "leave the cache argument and cache_implementation out, or use engine.prefill and session.cache()"
REFUSED = {
    "static": (handed(lambda m: StaticCache(config=m.config, max_cache_len=200)), f"a StaticCache has .*; {INSTEAD}"),
    "static by name": (lambda m: generate(m, [PROMPT], cache_implementation="static"), "a StaticCache has storage"),
    "quantized": (handed(lambda m: FakeQuantized()), f"a FakeQuantized has storage of its own .*; {INSTEAD}"),
    "offloaded": (handed(lambda m: offloaded(m)), f"an offloaded cache keeps everything, .*; {INSTEAD}"),
    "filled": (handed(lambda m: filled(m)), f"already holds 3 tokens that were read outside the block .*; {INSTEAD}"),
    "embeddings": (embedded, "needs token ids; give input_ids, not inputs_embeds"),
    "right pads": (right_padded, "pad the rows on the left"),
    "labels": (lambda m: m(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])), "labels"),
    "hidden states": (lambda m: m(torch.tensor([PROMPT]), output_hidden_states=True), "output_hidden_states"),
}


def offloaded(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # the constructor's own flag makes a CUDA stream
    return cache


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_what_cannot_be_compacted_is_refused_by_name(family, case):
    model = tiny.model(family)
    call, expected = REFUSED[case]
    handed_over = generate(model, [PROMPT])
    with compacting(model, Policy(keep=0.5)) as run, pytest.raises(RequestError, match=expected):
        call(model)
    assert run.stats == []
    assert torch.equal(generate(model, [PROMPT]), handed_over)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (0, "prefix_tokens=0 does not fit prompt 0, which has 97 tokens"),
        (-3, "prefix_tokens=-3 does not fit"),
        (68, "prefix_tokens=68 does not fit prompt 1, which has 67 tokens; .* pads not counted"),
        ([97, 68], "does not fit prompt 1"),
        ([10, 10, 10], "3 prefix_tokens for 2 prompts"),
        ([], "0 prefix_tokens for 2 prompts"),
    ],
)
def test_prefix_tokens_that_do_not_fit(llama, prefix, expected):
    with compacting(llama, Policy(keep=0.5), prefix_tokens=prefix), pytest.raises(RequestError, match=expected):
        generate(llama, ROWS, attention_mask=MASK)


def entered(model, policy=ALL):
    with compacting(model, policy):
        raise AssertionError("the block was entered")


def test_models_and_policies_that_are_refused_before_the_block(llama):
    before = snapshot(llama)
    engine = load(tiny.model("llama"))
    with pytest.raises(RequestError, match=r"belongs to an engine already; use engine\.prefill, or engine\.close"):
        entered(engine.model)
    with compacting(llama, ALL), pytest.raises(RequestError, match="belongs to an engine already"):
        entered(llama)
    with pytest.raises(RequestError, match="the policy names no size; give keep="):
        entered(llama, Policy())
    with pytest.raises(RequestError, match=r"training mode, .* call model\.eval\(\) first"):
        entered(tiny.model("llama").train())
    engine.close()
    with compacting(engine.model, ALL):
        pass
    assert snapshot(llama) == before


def test_a_model_that_can_only_be_kept_whole():
    if "qwen4_exp" not in tiny.FAMILIES:
        pytest.skip("this transformers has no qwen4_exp")
    model = tiny.model("qwen4_exp")
    expected = generate(model, [PROMPT])
    with compacting(model, ALL, prefix_tokens=len(CONTEXT)):
        assert torch.equal(generate(model, [PROMPT]), expected)
    with compacting(model, Policy(keep=0.5)), pytest.raises(RequestError, match="cannot be evicted"):
        generate(model, [PROMPT])


# --- afterwards ---------------------------------------------------------------------------------------------------


def snapshot(model) -> dict:
    """All that a block may touch: every module's own attributes by identity, hooks, modes, the config."""
    return {
        "own": [{name: id(value) for name, value in vars(module).items()} for module in model.modules()],
        "hooks": [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()],
        "training": [module.training for module in model.modules()],
        "grad": [weight.requires_grad for weight in model.parameters()],
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_is_given_back_as_it_was(model, threads, fails, attention, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)  # with two, linear layers are changed as well
    model.set_attn_implementation(attention)
    expected, before = generate(model, [PROMPT]), snapshot(model)
    logits = model(torch.tensor([PROMPT])).logits

    class Stop(Exception):
        pass

    def block():
        with compacting(model, Policy(keep=0.3), prefix_tokens=len(CONTEXT)):
            assert snapshot(model) != before
            generate(model, [PROMPT])
            if fails:
                raise Stop

    if fails:
        with pytest.raises(Stop):
            block()
    else:
        block()

    assert snapshot(model) == before
    assert torch.equal(model(torch.tensor([PROMPT])).logits, logits)
    assert torch.equal(generate(model, [PROMPT]), expected)
    model.set_attn_implementation("sdpa")


def test_a_prompt_that_fails_half_way_leaves_the_model_usable(llama):
    before, expected = snapshot(llama), generate(llama, [PROMPT])
    with compacting(llama, Policy(scorer="keydiff", keep=0.0001)) as run:
        with pytest.raises(RequestError, match="keeps 0 of"):
            generate(llama, [PROMPT])
        assert run.stats == []
    assert snapshot(llama) == before
    assert torch.equal(generate(llama, [PROMPT]), expected)


def live_tensors() -> tuple[int, int]:
    """Count and bytes of all tensors that Python still holds."""
    gc.collect()
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor)
    }
    return len(found), sum(found.values())


def used(model, fails: bool) -> Compacting:
    with compacting(model, Policy(keep=0.3), prefix_tokens=len(CONTEXT)) as run:
        generate(model, [PROMPT], num_beams=2)
        loop(model, PROMPT, 3)
        if fails:
            raise KeyboardInterrupt
    return run


@pytest.mark.parametrize("fails", [False, True])
def test_all_memory_is_returned(model, fails):
    generate(model, [PROMPT])
    before = live_tensors()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            used(model, fails)
    else:
        run = used(model, fails)
        assert live_tensors()[1] > before[1]  # only which entries were kept
        del run
    assert live_tensors() == before

"""Sampled continuations: the checkpoint's own settings, one seed one outcome, and states left as they were."""

from __future__ import annotations

import types

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from wakesight.engines.hf.sampling import Sampling, draw, filtered
from wakesight.errors import RequestError
from wakesight.testing import tiny

FAMILIES = tuple(f for f in ("llama", "qwen3_5", "gemma3", "falcon_h1", "jamba", "zamba2") if f in tiny.FAMILIES)
PLAIN = tuple(f for f in tiny.FAMILIES if f not in ("kimi_linear", "qwen4_exp"))


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    return tiny.engine(request.param)


def logits(rows: int = 3, words: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, Sampling()),
        (GenerationConfig(), Sampling()),
        (GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95), Sampling(0.6, 20, 0.95)),
        (GenerationConfig(temperature=0.7), Sampling(0.7)),
        (types.SimpleNamespace(do_sample=False, temperature=0.7, top_p=0.5), Sampling()),
        (types.SimpleNamespace(temperature=0.0), Sampling()),
        (GenerationConfig(repetition_penalty=1.1, min_p=0.1), Sampling(ignored=("min_p", "repetition_penalty"))),
        (GenerationConfig(do_sample=True, repetition_penalty=1.0), Sampling()),
    ],
)  # fmt: skip
def test_the_settings_are_the_checkpoints_own(config, expected):
    assert Sampling.of(config) == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 40, 99])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 1.0])
def test_filtering_is_that_of_transformers(temperature, top_k, top_p):
    expected = TemperatureLogitsWarper(temperature)(None, logits())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)

    found = filtered(logits(), Sampling(temperature, top_k, top_p))

    assert torch.equal(torch.isinf(found), torch.isinf(expected))
    assert torch.allclose(found.softmax(-1), expected.softmax(-1))


def test_draws_follow_the_probabilities():
    one = logits(1)
    noise = torch.Generator().manual_seed(3)
    drawn = torch.tensor(draw(one.expand(20_000, -1), Sampling(top_p=0.9), noise))
    shares = filtered(one, Sampling(top_p=0.9)).softmax(-1)[0]
    found = torch.bincount(drawn, minlength=40) / 20_000
    assert float((found - shares).abs().max()) < 0.02
    assert bool((found[shares == 0] == 0).all())


def test_the_same_seed_draws_the_same_and_another_does_not(engine):
    with engine.prefill(tiny.tokens(70)) as session:
        before = session.logits([5, 6, 7])
        first = engine.sample(session.state, [3, 4], 4, 12, 7)
        again = engine.sample(session.state, [3, 4], 4, 12, 7)
        other = engine.sample(session.state, [3, 4], 4, 12, 8)
        assert torch.equal(session.logits([5, 6, 7]), before)
        assert session.state.physical_lengths == [(70,) * heads for heads in engine.geometry.kv_heads]
    assert first == again
    assert first != other
    assert len(first) == 4
    assert len({tuple(row) for row in first}) > 1
    assert all(1 <= len(row) <= 12 for row in first) or any(len(row) == 0 for row in first)


def test_cold_sampling_is_the_greedy_answer(engine, monkeypatch):
    monkeypatch.setattr(engine.model, "generation_config", GenerationConfig(do_sample=True, top_k=1, eos_token_id=257))
    with engine.prefill(tiny.tokens(70)) as session:
        (greedy,) = engine.generate([session.state], [[3, 4]], 9)
        assert engine.sample(session.state, [3, 4], 3, 9, 0) == [list(greedy.tokens)] * 3


def test_rows_stop_at_an_end_of_sequence_each_for_itself(monkeypatch):
    """Rows that go on are not disturbed by those that stopped: each prefix is what the model could have drawn."""
    engine = tiny.engine("qwen3_5")
    with engine.prefill(tiny.tokens(40)) as session:
        free = engine.sample(session.state, [3], 4, 20, 1)
        monkeypatch.setattr(engine, "_ends", frozenset(range(0, 256, 6)))
        rows = engine.sample(session.state, [3], 4, 20, 1)
        assert engine.sample(session.state, [3], 4, 20, 1) == rows
    lengths = [len(row) for row in rows]
    assert len(set(lengths)) > 1
    assert not {token for row in rows for token in row} & engine._ends
    assert all(rows[i][:1] == free[i][:1] for i in range(4) if rows[i])


def test_what_cannot_be_sampled_is_refused():
    engine = tiny.engine("llama", max_position_embeddings=64)
    with engine.prefill(tiny.tokens(50)) as session:
        for arguments, said in (
            (([], 2, 3, 0), "empty"),
            (([300], 2, 3, 0), "vocabulary"),
            (([1], 0, 3, 0), "count=0"),
            (([1], 2, 0, 0), "max_new_tokens=0"),
            (([1], 2, 3, -1), "seed=-1"),
            (([1] * 15, 2, 3, 0), "at most 64"),
        ):
            with pytest.raises(RequestError, match=said):
                engine.sample(session.state, *arguments)
        assert max(map(len, engine.sample(session.state, [1] * 10, 2, 30, 0))) <= 64 - 60 + 1
        assert session.state.physical_lengths == [(50, 50)] * 3


@pytest.mark.parametrize("family", PLAIN)
def test_followed_layers_hold_what_the_model_computed(family):
    """Keys and values are the ones that are stored when the tokens are read for good; outputs give the layer's W_O."""
    engine = tiny.engine(family)
    more = tiny.tokens(9, seed=4)
    with engine.prefill(tiny.tokens(50), record=["hidden"]) as session:
        before = session.logits([5])
        rows = engine.follow(session.state, more)
        assert torch.equal(session.logits([5]), before)
        caught = _projected(engine, lambda: engine.follow(session.state, more))
        session.append(more)
        signals = session.signals()
        for layer, row in enumerate(rows):
            assert torch.allclose(row.keys, signals["keys"][layer][:, 50:], atol=1e-5)
            assert torch.allclose(row.values, signals["values"][layer][:, 50:], atol=1e-5)
            assert torch.allclose(row.queries, signals["queries"][layer][:, -9:], atol=1e-4)
            assert row.residual.shape == (9,)
            assert row.scaling == signals.scaling[layer]
            gated, out = caught[layer]
            output = engine.output_projection(layer)
            assert output.shape[1:] == (engine.geometry.query_heads, engine.geometry.value_dims[layer])
            assert torch.allclose(torch.einsum("qtd,hqd->th", gated, output), out, atol=1e-4)
            if family in ("llama", "gemma3", "falcon_h1", "zamba2", "jamba"):  # no output gate
                assert torch.equal(gated, row.outputs)


def _projected(engine, run):
    """Per attention layer what enters the output projection, by head, and what leaves it (bias taken off)."""
    from wakesight.engines.hf.projection import attention_module

    caught, hooks = [], []
    modules = {}
    for index in engine.geometry.attention_layers:
        module = attention_module(engine._decoder.layers[index], index, "tiny")
        modules[id(module)] = module
    for module in modules.values():
        linear = module.o_proj if hasattr(module, "o_proj") else module.out_proj

        def hear(linear, args, out):
            heads = args[0].view(args[0].shape[1], engine.geometry.query_heads, -1).transpose(0, 1)
            caught.append((heads.clone(), out[0] - (0 if linear.bias is None else linear.bias)))

        hooks.append(linear.register_forward_hook(hear))
    run()
    for hook in hooks:
        hook.remove()
    layers = len(engine.geometry.attention_layers)
    passes = [caught[layer::layers] for layer in range(layers)]  # one-at-a-time models make a pass per token
    return [(torch.cat([p[0] for p in each], 1), torch.cat([p[1] for p in each])) for each in passes]


@pytest.mark.parametrize(("family", "why"), [("kimi_linear", "latent keys"), ("qwen4_exp", "sparse indexer")])
def test_attention_that_has_no_closed_form_is_refused_by_name(family, why):
    if family not in tiny.FAMILIES:
        pytest.skip(f"the installed transformers does not know {family}")
    engine = tiny.engine(family)
    with engine.prefill(tiny.tokens(20)) as session, pytest.raises(RequestError, match=why):
        engine.follow(session.state, [1, 2])
    with pytest.raises(RequestError, match=why):
        engine.output_projection(0)


@pytest.mark.parametrize("change", ["quantised", "adapted", "softcap", "sinks"])
def test_weights_and_softmaxes_of_another_form_are_refused_by_name(change):
    engine = tiny.engine("llama")
    module = engine._decoder.layers[1].self_attn

    class Adapted(torch.nn.Linear):
        pass

    if change == "quantised":
        module.o_proj.weight = torch.nn.Parameter(torch.zeros(48, 96, dtype=torch.int8), requires_grad=False)
    elif change == "adapted":
        module.o_proj = Adapted(96, 48)
    elif change == "softcap":
        module.config.attn_logit_softcapping = 30.0
    else:
        module.sinks = torch.nn.Parameter(torch.zeros(6))
    named = {"quantised": "is a Linear", "adapted": "is a Adapted", "softcap": "has a softcap", "sinks": "has sinks"}
    with pytest.raises(RequestError, match=named[change]):
        engine.output_projection(1)


def test_past_the_end_a_continuation_goes_on(monkeypatch):
    """Where every token ends the turn, a plain continuation is empty and one past the end has its full length."""
    engine = tiny.engine("llama")
    monkeypatch.setattr(engine, "_ends", frozenset(range(engine.model.config.vocab_size)))
    with engine.prefill([5, 6, 7, 8]) as session:
        assert engine.sample(session.state, [9], 2, 6, 0) == [[], []]
        assert [len(row) for row in engine.sample(session.state, [9], 2, 6, 0, past_end=True)] == [6, 6]

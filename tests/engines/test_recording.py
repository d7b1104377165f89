"""What prefill overhears is what the model computed, and a session that reads on overhears the rest."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from wakesight.engines.hf import compat
from wakesight.engines.recording import ON_REQUEST, _mask, needs, wanted_signals
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.scores.table import scorer
from wakesight.signals.rope import rotate
from wakesight.testing import tiny

FAMILIES = tuple(
    f for f in ("llama", "qwen3_5", "falcon_h1", "gemma3", "kimi_linear", "granitemoehybrid") if f in tiny.FAMILIES
)
N, MORE = 150, 40
EVERYTHING = ("attention_sums", "query_mean", "query_covariance", "future_rotation")
WHOLE = Policy(scorer="random", keep=1.0)


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    return tiny.engine(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny.engine("llama")


def prefilled(engine, count: int = N, **options):
    return engine.prefill(tiny.tokens(N + MORE)[:count], record=EVERYTHING, **options)


def more() -> list[int]:
    return tiny.tokens(N + MORE)[N:]


def streams(session) -> dict[str, list[torch.Tensor]]:
    """Clones of everything a scorer could read."""
    signals = session.signals()
    return {name: [tensor.clone() for tensor in signals[name]] for name in signals.streams}


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_signals_and_scorers_may_be_named():
    assert wanted_signals([]) == ()
    assert wanted_signals(["attention_sums"]) == ("attention_sums",)
    assert wanted_signals(["query_mean", "attention_sums", "query_mean"]) == ("attention_sums", "query_mean")
    assert wanted_signals(["h2o"]) == ("attention_sums",)
    assert wanted_signals(["keys", "values", "queries", "knorm", "snapkv:window=16"]) == ()
    needed = wanted_signals(["expected_attention"])
    assert needed == tuple(name for name in ON_REQUEST if name in needed)
    assert {"query_mean", "future_rotation"} <= set(needed)
    assert wanted_signals(["expected_attention", "h2o"]) == ("attention_sums", *needed)


@pytest.mark.parametrize(
    ("name", "near"), [("attention_sum", "attention_sums"), ("h20", "h2o"), ("querymean", "query_mean"), ("zzz", None)]
)
def test_a_name_that_is_neither_is_refused(name, near):
    with pytest.raises(RequestError, match=f"record names '{name}', which is no signal and no scorer") as found:
        wanted_signals(["h2o", name])
    assert (f"did you mean {near}" in str(found.value).replace("'", "")) == (near is not None)
    assert "signals: attention_sums, query_mean" in str(found.value)


def test_a_scorer_says_what_it_needs():
    assert needs(scorer("h2o")) == {"record": ("attention_sums",), "query_window": 64}
    assert needs(scorer("knorm")) == {"record": (), "query_window": 64}
    assert needs(scorer("snapkv:window=16"))["query_window"] == 64
    assert needs(scorer("snapkv:window=100"))["query_window"] == 100


@pytest.mark.parametrize("chunk", [64, 512])
def test_keys_and_values_are_those_of_a_plain_cache(llama, chunk):
    plain, cache = tiny.model("llama"), DynamicCache(config=llama.model.config)
    plain(input_ids=torch.tensor([tiny.tokens(N)]), **{compat.cache_keyword(plain): cache}, use_cache=True)

    signals = llama.prefill(tiny.tokens(N), chunk=chunk).signals()

    assert (signals.tokens, signals.prefix, signals.held) == (N, 0, None)
    assert signals.scaling == (0.25,) * 3
    for layer in range(3):
        assert close(signals["keys"][layer], cache.layers[layer].keys[0])
        assert close(signals["values"][layer], cache.layers[layer].values[0])


@pytest.mark.parametrize("chunk", [64, 512])
def test_queries_and_their_moments_are_those_of_the_projection(llama, chunk):
    """Read off transformers' own modules: query projections, RoPE, weights of the softmax."""
    plain = tiny.model("llama")
    plain.set_attn_implementation("eager")
    projected: list[torch.Tensor] = []
    for layer in plain.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: projected.append(output))
    weights = plain(input_ids=torch.tensor([tiny.tokens(N)]), output_attentions=True).attentions
    cos, sin = plain.model.rotary_emb(torch.empty(1, 1), torch.arange(N)[None])

    signals = prefilled(llama, chunk=chunk, query_window=20).signals()

    for layer in range(3):
        raw = projected[layer][0].view(N, 6, 16).transpose(0, 1)
        assert close(signals["queries"][layer], rotate(raw, cos[0], sin[0])[:, -20:])
        assert close(signals["query_mean"][layer], raw[:, 4:].mean(dim=1))
        assert close(signals["query_covariance"][layer], torch.stack([head[4:].T.cov(correction=0) for head in raw]))
        assert close(signals["attention_sums"][layer], weights[layer][0].sum(dim=1))


def test_only_what_was_asked_for_is_recorded(engine):
    always = {"keys", "queries"} if engine.name == "tiny-kimi_linear" else {"keys", "values", "queries"}
    signals = engine.prefill(tiny.tokens(20)).signals()
    assert set(signals.streams) == always
    assert set(prefilled(engine).signals().streams) == always | set(EVERYTHING)
    with pytest.raises(RequestError, match=r"prefill with record=\['attention_sums'\]"):
        _ = signals["attention_sums"]


def test_sums_count_every_query_once(engine):
    """A query's softmax weights add up to one, whichever layer, head and chunk it was in."""
    for sums in prefilled(engine, chunk=64).signals()["attention_sums"]:
        assert sums.shape == (engine.geometry.query_heads, N)
        assert torch.allclose(sums.sum(dim=1), torch.full((len(sums),), float(N)), rtol=1e-4)


def test_the_future_starts_behind_the_context(engine):
    session = prefilled(engine)
    session.append(more())
    for i, layer in enumerate(engine.geometry.attention_layers):
        expected = compat.rotation(engine.model, layer, N + MORE, N + MORE + 512)
        found = session.signals()["future_rotation"][i]
        assert found.shape[:2] == (2, 512)
        assert found.shape[2] == 0 if expected is None else torch.equal(found, expected)


def test_a_child_shows_its_entries_among_zeros(engine):
    parent = prefilled(engine)
    child = parent.compact(Policy(scorer="random", keep=0.3))
    whole, part = parent.signals(), child.signals()

    assert part.tokens == N
    for layer, kept in enumerate(child.kept.positions):
        mask = _mask(kept, N)
        assert torch.equal(part.held[layer], mask)
        assert mask.sum(dim=1).tolist() == [45] * len(kept)
        for name in {"keys", "values"} & set(part.streams):
            assert torch.equal(part[name][layer], whole[name][layer].masked_fill(~mask[..., None], 0))
        for name in ("queries", *EVERYTHING):
            assert torch.equal(part[name][layer], whole[name][layer])
    with pytest.raises(IndexError):
        part["keys"][len(child.kept.positions)]


def test_uneven_heads_are_each_shown_where_they_belong(llama):
    parent = prefilled(llama)
    child = parent.compact(Policy(scorer="knorm", keep=0.3, allocation="ada"))
    assert any(len({len(head) for head in heads}) > 1 for heads in child.kept.positions)
    for layer, kept in enumerate(child.kept.positions):
        for name in ("keys", "values"):
            dense, whole = child.signals()[name][layer], parent.signals()[name][layer]
            for head, where in enumerate(kept):
                rest = torch.ones(N, dtype=torch.bool).index_fill(0, where, False)
                assert torch.equal(dense[head, where], whole[head, where])
                assert not dense[head, rest].any()


@pytest.mark.parametrize("compacted", [False, True])
def test_a_session_that_read_on_overheard_what_one_prefill_overhears(engine, compacted):
    session, fresh = prefilled(engine), prefilled(engine, N + MORE)
    if compacted:
        session = session.compact(WHOLE)

    session.append(more()[:1])
    session.append(more()[1:])

    found, expected = session.signals(), fresh.signals()
    assert found.tokens == expected.tokens == N + MORE
    assert found.scaling == expected.scaling
    assert set(found.streams) == set(expected.streams)
    assert (found.held is None) == (not compacted)
    assert found.held is None or all(bool(mask.all()) and mask.shape[1] == N + MORE for mask in found.held)
    for name in expected.streams:
        for one, other in zip(found[name], expected[name], strict=True):
            assert close(one, other), name


def test_the_window_of_queries_reaches_back_across_an_append(llama):
    session = llama.prefill(tiny.tokens(N + MORE)[:N], query_window=64)
    session.append(more())
    fresh = llama.prefill(tiny.tokens(N + MORE), query_window=64)
    for one, other in zip(session.signals()["queries"], fresh.signals()["queries"], strict=True):
        assert one.shape == (6, 64, 16)
        assert close(one, other)


@pytest.mark.parametrize("allocation", ["flat", "ada"])
def test_a_child_that_reads_on_sums_over_what_it_holds(llama, allocation):
    """The first layer's queries and keys do not depend on what was dropped, so a loop can say what they see."""
    child = prefilled(llama).compact(Policy(scorer="knorm", keep=0.3, allocation=allocation))
    before = child.signals()["attention_sums"][0]
    kept = child.kept.positions[0]
    whole = llama.prefill(tiny.tokens(N + MORE), query_window=MORE).signals()
    expected = torch.zeros(6, N + MORE)
    for head in range(6):
        where = kept[head // 3]
        expected[head, where] = before[head, where]
        for j in range(MORE):
            seen = torch.cat([where, torch.arange(N, N + j + 1)])
            logits = whole["keys"][0][head // 3, seen] @ whole["queries"][0][head, j] * whole.scaling[0]
            expected[head, seen] += logits.softmax(dim=0)

    child.append(more(), chunk=64)

    assert close(child.signals()["attention_sums"][0], expected)
    assert [head.tolist() for head in child.kept.positions[0]] == [[*w.tolist(), *range(N, N + MORE)] for w in kept]


def test_what_was_dropped_has_no_sums_and_new_queries_count_once(engine):
    child = prefilled(engine).compact(Policy(scorer="random", keep=0.3))
    before = child.signals()["attention_sums"]
    group = [sums.shape[0] // len(kept) for sums, kept in zip(before, child.kept.positions, strict=True)]
    masks = [_mask(kept, N).repeat_interleave(g, 0) for kept, g in zip(child.kept.positions, group, strict=True)]

    child.append(more())

    for sums, old, mask in zip(child.signals()["attention_sums"], before, masks, strict=True):
        assert not sums[:, :N][~mask].any()
        assert torch.allclose(sums.sum(dim=1), (old * mask).sum(dim=1) + MORE, rtol=1e-4)


def test_a_childs_append_is_not_heard_by_its_parent_or_siblings(engine):
    parent = prefilled(engine)
    child, sibling = parent.compact(WHOLE), parent.compact(Policy(scorer="random", keep=0.3))
    given_out = {name: list(parent.signals()[name]) for name in EVERYTHING}
    before, beside = streams(parent), streams(sibling)
    assert child.recording is parent.recording

    child.append(more())

    assert child.recording is not parent.recording
    for session, expected in ((parent, before), (sibling, beside)):
        assert session.signals().tokens == N
        for name, tensors in expected.items():
            assert all(torch.equal(a, b) for a, b in zip(session.signals()[name], tensors, strict=True)), name
    for name, tensors in given_out.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, before[name], strict=True))


def test_a_parents_append_is_not_heard_by_its_children(engine):
    parent = prefilled(engine)
    child = parent.compact(WHOLE)
    before = streams(child)

    parent.append(more())

    assert child.signals().tokens == N
    for name, tensors in before.items():
        assert all(torch.equal(a, b) for a, b in zip(child.signals()[name], tensors, strict=True)), name


@pytest.mark.parametrize("name", ["h2o", "expected_attention", "snapkv", "tova", "keydiff"])
def test_a_session_that_read_on_is_scored_as_one_that_read_at_once(llama, name):
    session, fresh = prefilled(llama), prefilled(llama, N + MORE)
    session.append(more())
    policy = Policy(scorer=name, keep=0.4)
    one, other = (policy.scorer_method.score(each.signals()).layers for each in (session, fresh))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(one, other, strict=True))


@pytest.mark.skipif("kimi_linear" not in tiny.FAMILIES, reason="this transformers has no kimi_linear")
def test_latent_keys_are_the_stored_ones_and_values_are_refused_by_name():
    session = prefilled(tiny.engine("kimi_linear"))
    signals = session.signals()
    assert signals["keys"][0].shape == (1, N, 24 + 8)
    assert signals["queries"][0].shape == (6, 64, 24 + 8)
    with pytest.raises(RequestError, match="latent keys and no values of their own"):
        _ = signals["values"]

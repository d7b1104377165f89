"""Shape edges and numbers that overflow: a defined result or a refusal in words, with every scorer."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from wakesight.cache.pool import Pool
from wakesight.core import Scores
from wakesight.engines.hf.engine import HFEngine
from wakesight.errors import RequestError, WorkError
from wakesight.models.families import family_of
from wakesight.models.load import LoadedModel
from wakesight.policy import Policy
from wakesight.scores.table import SCORERS
from wakesight.testing import tiny
from wakesight.testing.artifacts import fitted
from wakesight.testing.laws import Masked, relative_gap, state_digest

TOLERANCE = 1e-5
WINDOW = 32  # of snapkv and h2o
QUESTION = tiny.tokens(5, seed=2)
SOME = ("llama", "qwen3_5", "falcon_h1")


@functools.cache
def engine_of(family: str) -> HFEngine:
    return fitted(tiny.engine(family))


@functools.cache
def plain_of(family: str):
    return tiny.model(family)


def session_of(family: str, n: int, scorer: str):
    return engine_of(family).prefill(tiny.tokens(n), record=[scorer])


def check_against_the_mask(family: str, child) -> None:
    expected = Masked(plain_of(family), child.tokens).logits(QUESTION, child.kept)
    assert relative_gap(child.logits(QUESTION), expected) < TOLERANCE
    assert child.ask(QUESTION, max_new_tokens=2).finish in ("length", "eos")


@pytest.mark.parametrize("n", [1, WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("family", SOME)
def test_contexts_around_the_observation_window(family, scorer, n):
    session = session_of(family, n, scorer)
    heads = engine_of(family).geometry.kv_heads
    for policy, count in (
        (Policy(scorer=scorer, entries=1), 1),
        (Policy(scorer=scorer, keep=1.0), n),
        (Policy(scorer=scorer, keep=1.0, allocation="global"), n),
        (Policy(scorer=scorer, keep=1.0, allocation="pyramid"), n),
        (Policy(scorer=scorer, keep=0.5), round(n / 2)),
        (Policy(scorer=scorer, keep=0.5, allocation="ada"), None),
        (Policy(scorer=scorer, keep=0.5, allocation="global"), None),
        (Policy(scorer=scorer, keep=0.5, unit="page"), None),
    ):
        if n == 1 and policy.keep == 0.5:
            with pytest.raises(RequestError, match=r"keeps 0 of 1 entries per KV head; raise --keep to at least 1"):
                session.compact(policy)
            continue
        with session.compact(policy) as child:
            if count is not None:
                assert child.kept.counts == [[count] * have for have in heads]
            assert sum(map(sum, child.kept.counts)) <= sum(heads) * (count or round(n / 2))
            if policy.keep == 1.0:
                assert torch.equal(child.logits(QUESTION), session.logits(QUESTION))
            elif policy.allocation in ("flat", "global"):
                check_against_the_mask(family, child)


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_fraction_that_keeps_nothing_is_refused_with_the_least_that_does(scorer):
    session = session_of("llama", 100, scorer)
    before = state_digest(session.state)
    for allocation in ("flat", "pyramid", "ada", "global"):
        policy = Policy(scorer=scorer, keep=0.004, allocation=allocation)
        sentence = "keep=0.004 keeps 0 of 100 entries per KV head; raise --keep to at least 0.01, or give the count"
        with pytest.raises(RequestError, match=re.escape(sentence)):
            session.compact(policy)
        assert session.compact(policy.at(keep=0.01)).kept.counts[0][0] >= 0
    assert state_digest(session.state) == before
    for keep in (0, -0.1, 1.01, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="is no kept fraction"):
            Policy(scorer=scorer, keep=keep)


class OneHead:
    """All that matters lies in the last KV head of the last layer."""

    reads = ("keys",)

    def score(self, signals):
        layers = [torch.zeros(keys.shape[:2]) for keys in signals["keys"]]
        layers[-1][-1] = 1 + torch.arange(signals.tokens)
        return Scores(tuple(layers))


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("allocation", ["global", "ada:alpha=0"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_head_may_be_left_with_its_prefix_only_or_with_nothing(family, allocation, prefix):
    if engine_of(family).only_whole:
        pytest.skip("keep < 1 is refused by name, see test_families.py")
    session = engine_of(family).prefill(tiny.tokens(80))
    child = session.compact(Policy(scorer=OneHead(), entries=10, allocation=allocation, protect=prefix))
    heads = engine_of(family).geometry.kv_heads
    total = 10 * (sum(heads) if allocation == "global" else heads[-1])

    assert child.kept.counts[-1] == [prefix] * (heads[-1] - 1) + [prefix + min(total, 80 - prefix)]
    if allocation == "global" and total <= 80 - prefix:
        assert child.kept.counts[:-1] == [[prefix] * count for count in heads[:-1]]
    check_against_the_mask(family, child)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("allocation", ["flat", "pyramid", "ada", "global"])
def test_scores_that_are_not_finite_name_layer_head_and_position(value, allocation):
    class Broken:
        reads = ("keys",)

        def score(self, signals):
            layers = [keys.norm(dim=-1) for keys in signals["keys"]]
            layers[1][1, 17] = value
            return Scores(tuple(layers))

    session = engine_of("llama").prefill(tiny.tokens(80))
    ledger = (session.engine.pool.held_bytes, session.engine.pool.leases)
    with pytest.raises(WorkError, match=rf"gave {value} at attention layer 1, KV head 1, position 17; scores must be"):
        session.compact(Policy(scorer=Broken(), keep=0.5, allocation=allocation))
    assert (session.engine.pool.held_bytes, session.engine.pool.leases) == ledger


def half(family: str, scaled: str = "", factor: float = 1.0) -> HFEngine:
    """A float16 engine; `scaled`: the projection whose weights are multiplied by `factor`."""
    model = tiny.model(family)
    for name, weight in model.named_parameters():
        weight.data = (weight.data * (factor if scaled and scaled in name else 1.0)).to(torch.float16)
    loaded = LoadedModel(f"half-{family}", model, tiny.tokenizer(), family_of(model.config))
    engine = HFEngine(loaded, growth=64, pool=Pool(poison=True))
    engine.artifact = engine_of(family).artifact  # measured where nothing overflowed
    return engine


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("scaled", ["k_proj", "v_proj", "q_proj"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "lfm2"])
def test_float16_that_overflows_is_refused_at_compact_or_at_the_question(family, scaled, scorer):
    engine = half(family, scaled, 1e5)
    session = engine.prefill(tiny.tokens(60), record=[scorer])
    stored = session.signals()["keys" if scaled == "k_proj" else "values"]
    if scaled != "q_proj":
        assert not all(bool(torch.isfinite(layer).all()) for layer in stored), "nothing overflowed"

    with pytest.raises(WorkError, match=r"scores must be finite: check the model's keys for overflow|not finite"):
        session.compact(Policy(scorer=scorer, keep=0.5)).ask(QUESTION, max_new_tokens=3)
    with pytest.raises(WorkError, match="not finite: its activations overflow this dtype; load it with --dtype"):
        session.logits(QUESTION)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("family", SOME)
def test_float16_that_does_not_overflow_works(family, scorer):
    engine = half(family)
    session = engine.prefill(tiny.tokens(60), record=[scorer])
    child = session.compact(Policy(scorer=scorer, keep=0.5))
    same = session.compact(Policy(scorer=scorer, keep=1.0))

    assert torch.equal(same.logits(QUESTION), session.logits(QUESTION))
    single = tiny.model(family)
    for weight in single.parameters():
        weight.data = weight.data.half().float()
    exact = Masked(single, child.tokens).logits(QUESTION, child.kept)
    plain = Masked(engine_plain(family), child.tokens).logits(QUESTION, child.kept)
    loss = relative_gap(plain.float(), exact)
    assert relative_gap(child.logits(QUESTION).float(), exact) < 2 * loss < 0.02
    assert child.ask(QUESTION, max_new_tokens=3).tokens


def engine_plain(family: str):
    model = tiny.model(family)
    for weight in model.parameters():
        weight.data = weight.data.half()
    return model

"""The closing-heads study: heads are silent where they should be, and the arms are what they say."""

from __future__ import annotations

import json
import math

import pytest
import torch

from wakesight.errors import RequestError
from wakesight.learning import closing
from wakesight.learning.analysis import static_half_lives
from wakesight.learning.closing import ALL, LOWEST, RANDOM, WHOLE, accuracy, arms, close_heads, markdown, summary
from wakesight.learning.documents import Document
from wakesight.models.families import FAMILIES as ROWS
from wakesight.testing import tiny

HALF = tuple(row.name for row in ROWS if row.native_signals in ("gated_delta", "mamba2") and row.name in tiny.FAMILIES)


def documents(count: int = 6) -> list[Document]:
    return [Document(f"doc {n}", ("code", "wiki")[n % 2], "", tuple(tiny.tokens(60 + n, n))) for n in range(count)]


def zero_columns(engine, closed) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Set the columns of W_O that closed heads feed to 0; returns what undoes it."""
    undo = []
    for layer, heads in closed.items():
        weight = engine.output_projection(layer)  # a view [hidden, query_head, dim]
        undo.append((weight, weight.clone()))
        weight[:, list(heads)] = 0
    return undo


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "phi3", "falcon_h1", "lfm2"])
def test_a_closed_head_is_one_whose_columns_of_the_projection_are_zero(family):
    engine = tiny.engine(family)
    ids, closed = tiny.tokens(90), {0: [0, 3, 5], 1: [2]}
    before = engine.next_tokens(ids)
    with engine.closing(closed):
        found = engine.next_tokens(ids, chunk=64)
    after = engine.next_tokens(ids)
    undo = zero_columns(engine, closed)
    expected = engine.next_tokens(ids)
    for weight, old in undo:
        weight.copy_(old)

    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-5)
    assert torch.equal(after.log_probs, before.log_probs)
    assert float((found.log_probs - before.log_probs).abs().max()) > 0.01


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_can_be_closed(family):
    engine = tiny.engine(family)
    ids = tiny.tokens(70)
    before = engine.next_tokens(ids).log_probs
    last = len(engine.geometry.attention_layers) - 1
    with engine.closing({last: range(6)}):
        one = engine.next_tokens(ids).log_probs
    with engine.closing({layer: range(6) for layer in range(last + 1)}):
        all_of_them = engine.next_tokens(ids).log_probs
    assert float((one - before).abs().max()) > 1e-3
    assert last == 0 or float((one - all_of_them).abs().max()) > 1e-3
    with engine.closing({}):
        assert torch.equal(engine.next_tokens(ids).log_probs, before)


def test_next_tokens_are_what_logits_say(smallest):
    ids = tiny.tokens(130)
    found = smallest.next_tokens(ids, chunk=64)
    with smallest.prefill(ids[:1]) as session:
        logits = session.logits(ids[1:])
    expected = logits[:-1].log_softmax(dim=-1).gather(1, torch.tensor(ids[2:])[:, None])[:, 0]
    assert found.hits.shape == found.log_probs.shape == (129,)
    torch.testing.assert_close(found.log_probs[1:], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.hits[1:], logits[:-1].argmax(dim=-1) == torch.tensor(ids[2:]))
    with pytest.raises(RequestError, match="has no next one"):
        smallest.next_tokens([1])


@pytest.fixture(scope="module")
def smallest():
    return tiny.engine("llama")


@pytest.mark.parametrize("closed", [{9: [0]}, {0: [6]}, {-1: [0]}])
def test_heads_that_are_not_there_are_refused(smallest, closed):
    with pytest.raises(RequestError, match="attention layers of 6 query heads"), smallest.closing(closed):
        pass


def test_arms_close_the_lowest_gates_and_as_many_random_heads():
    gates = [torch.tensor([0.5, 0.1, 0.3, 0.9]), torch.tensor([0.2, 0.8, 0.1, 0.7])]
    plan = arms(2, 4, gates, 0.375, 3, 0)

    assert [arm.kind for arm in plan] == [WHOLE, LOWEST, RANDOM, RANDOM, RANDOM, "layer", "layer", ALL]
    assert [arm.heads for arm in plan] == [0, 3, 3, 3, 3, 4, 4, 8]
    assert plan[1].closed == {0: [1], 1: [0, 2]}
    assert len({json.dumps(arm.closed) for arm in plan[2:5]}) == 3
    assert len(arms(1, 4, None, 0.25, 9, 0)) == 1 + 4 + 1 + 1  # four different choices of one head are all there are
    assert arms(2, 4, gates, 0.375, 3, 0) == plan
    assert [arm.kind for arm in arms(2, 4, None, 0.01, 1, 0)] == [WHOLE, RANDOM, "layer", "layer", ALL]
    assert arms(2, 4, None, 0.01, 1, 0)[1].heads == 1


def test_whole_layers_are_closed_alone_and_one_after_the_other():
    plan = [list(arm.closed) for arm in arms(4, 2, None, 0.1, 1, 0) if arm.kind in ("layer", "layers", ALL)]

    assert plan == [[0], [1], [2], [3], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_the_summary_compares_accuracy_lost():
    rows = [{"kind": kind, "accuracy": x} for kind, x in ((WHOLE, 0.9), (LOWEST, 0.85), (RANDOM, 0.7), (RANDOM, 0.8))]
    found = summary([*rows, {"kind": ALL, "accuracy": 0.1}])
    assert found["lost"] == pytest.approx({LOWEST: 0.05, RANDOM: 0.15, ALL: 0.8})
    assert found["random_over_lowest"] == pytest.approx(3)
    assert summary([rows[0], {**rows[1], "accuracy": 0.95}, rows[2]])["random_over_lowest"] is None
    assert summary([rows[0], rows[2]])["lost"][LOWEST] is None


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_the_study_as_a_whole(family):
    engine = tiny.engine(family)
    told: list[tuple[int, int]] = []
    found = close_heads(engine, documents(), seeds=2, on_arm=lambda done, total: told.append((done, total)))
    again = close_heads(engine, documents()[::-1], seeds=2)

    assert found == again
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    layers = len(engine.geometry.attention_layers)
    gated = family == "qwen3_5"
    assert len(found["arms"]) == 4 + gated + layers + max(0, layers - 2)
    assert told[-1] == (len(found["arms"]), len(found["arms"]))
    assert found["documents"] + found["calibration_documents"] == 6
    assert (found["calibration_documents"] > 0) == gated
    whole = found["arms"][0]
    texts = [(one.corpus, one.ids) for one in documents()]
    if not gated:
        assert whole["accuracy"] == pytest.approx(accuracy(engine, {}, texts)[""]["accuracy"])
    assert len({round(row["loss"], 9) for row in found["arms"]}) > len(found["arms"]) // 2
    text = markdown(found)
    assert "| all attention layers |" in text
    assert ("give no output gates" in text) != gated
    with pytest.raises(RequestError, match="no share"):
        close_heads(engine, documents(), share=0)
    with pytest.raises(RequestError, match="documents or more"):
        close_heads(engine, documents(1 if gated else 0))


def test_gates_are_measured_on_documents_that_are_not_foretold(monkeypatch):
    engine = tiny.engine("qwen3_5")
    measured, judged = [], []
    monkeypatch.setattr(closing, "measure", lambda e, texts, **_: measured.extend(texts) or Gates)
    monkeypatch.setattr(
        closing, "accuracy", lambda e, c, texts, k: judged.extend(texts) or {"": {"accuracy": 0.5, "loss": 1.0}}
    )
    close_heads(engine, documents(), seeds=1)
    assert {ids for _, ids in measured} & {ids for _, ids in judged} == set()
    assert len(measured) == 2


class Gates:
    mean = tuple(torch.rand(6) for _ in range(2))


@pytest.mark.parametrize("family", HALF)
def test_static_half_lives_come_from_the_weights_of_every_recurrent_layer(family):
    engine = tiny.engine(family)
    weights = engine.decay_weights()
    assert [len(layer.a_log) for layer in weights] == list(engine.geometry.native_heads)
    names = dict(engine.model.named_parameters())
    stored = [tensor for name, tensor in names.items() if name.endswith("A_log")]
    assert len(stored) == len(weights)
    for layer, a_log in zip(weights, stored, strict=True):
        assert torch.equal(layer.a_log, a_log)
        life = static_half_lives(*layer)
        for head, value in enumerate(life.tolist()):
            step = math.log1p(math.exp(float(layer.dt_bias[head])))
            assert value == pytest.approx(math.log(2) / (math.exp(float(a_log[head])) * step), rel=1e-5)


def test_a_clamped_time_step_forgets_at_its_limit():
    life = static_half_lives(torch.zeros(2), torch.tensor([-9.0, 9.0]), (0.1, 2.0))
    assert life.tolist() == pytest.approx([math.log(2) / 0.1, math.log(2) / 2.0])


@pytest.mark.parametrize("family", [f for f in ("llama", "jamba", "lfm2", "kimi_linear") if f in tiny.FAMILIES])
def test_families_without_one_decay_per_head_have_no_static_half_life(family):
    assert tiny.engine(family).decay_weights() is None

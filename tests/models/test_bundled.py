"""The small hybrid that comes with the package: what its card claims, its estimator, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from wakesight.errors import RequestError
from wakesight.estimator.artifact import Artifact, best_scorer
from wakesight.evaluation.graders import grade
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import closed
from wakesight.models.load import BUNDLED, own_artifact
from wakesight.policy import Policy

MUST = ("closed_single", "closed_multikey", "closed_keyvalue")
ITEMS = 5


def contexts(engine, tasks=MUST, items=ITEMS, length=1024):
    """Up to four questions each, of a seed that neither training nor fitting used."""
    return closed.contexts(
        SuiteOptions(length=length, items=items, seed=99, count=lambda text: len(engine.encode(text)), tasks=tasks)
    )


def grades(session, context) -> list[float]:
    found = []
    for question in context.questions:
        said = session.ask(f"{question.text}", max_new_tokens=question.max_new_tokens + 4).text
        found.append(grade("niah", said, question.references))
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def sessions(tiny_hybrid):
    """Read once for every test of this file, whole, with what the estimator reads."""
    read = [
        (context, tiny_hybrid.prefill(context.text, instruction=context.instruction, record=["gatesight+"]))
        for context in contexts(tiny_hybrid)
    ]
    yield read
    for _, session in read:
        session.close()


def test_needles_and_pairs_are_found_at_1024_tokens(sessions):
    for task in MUST:
        assert mean([each for context, s in sessions if context.task == task for each in grades(s, context)]) >= 0.9


@pytest.fixture
def closed_attention(tiny_hybrid):
    """Every attention layer's output times 0."""
    layers = tiny_hybrid.model.model.layers
    hooks = [
        layers[index].self_attn.o_proj.register_forward_hook(lambda module, args, output: output * 0)
        for index in tiny_hybrid.geometry.attention_layers
    ]
    yield
    for hook in hooks:
        hook.remove()


def test_without_its_attention_layers_they_are_lost(sessions, closed_attention):
    for task in MUST:
        context, session = next(pair for pair in sessions if pair[0].task == task)
        assert mean(grades(session, context)) == 0


def test_its_estimator_finds_more_than_chance_recency_and_the_last_queries(sessions):
    """At a tenth of the entries, on the same contexts and equal counts."""
    found: dict[str, list[float]] = {}
    kept: dict[str, set[int]] = {}
    for scorer in ("gatesight", "gatesight+", "random", "streaming", "snapkv"):
        plain = Policy(scorer=scorer)
        policy = plain.at(allocation=plain.natural_allocation, keep=0.1)
        for context, session in sessions:
            with session.compact(policy) as child:
                found.setdefault(scorer, []).extend(grades(child, context))
                kept.setdefault(context.id, set()).add(sum(map(sum, child.stats.kept_entries)))
    assert all(len(counts) == 1 for counts in kept.values())
    learned = min(mean(found["gatesight"]), mean(found["gatesight+"]))
    assert learned > max(mean(found[name]) for name in ("random", "streaming", "snapkv")) + 0.1


def test_its_artifact_is_whole(tiny_hybrid):
    artifact = tiny_hybrid.artifact
    assert isinstance(artifact, Artifact)
    assert {"signals", "signals+keys"} <= set(artifact.readers)
    assert all(getattr(artifact.tables, field.name) for field in dataclasses.fields(artifact.tables))
    assert artifact.query_stats
    assert "json_sha256" in json.loads((own_artifact("tiny-hybrid") / "artifact.json").read_text())
    assert best_scorer(own_artifact("tiny-hybrid")) == "gatesight+"


def test_its_card_tells_every_task_at_four_lengths():
    folder = BUNDLED["tiny-hybrid"].path()
    rows = json.loads((folder / "eval.json").read_text())
    assert {(row["task"], row["length"]) for row in rows} == {
        (task, length) for task in closed.TASKS for length in (256, 512, 1024, 2048)
    }
    card = (folder / "README.md").read_text()
    for row in rows:
        assert f"| {row['task']} | {row['length']} | {row['answers']} | {row['forced']:.3f} |" in card
        if row["task"] in MUST and row["length"] == 1024:
            assert row["forced"] >= 0.9
            assert row["all_closed"] < 0.1


def test_it_is_small(tiny_hybrid):
    folder = BUNDLED["tiny-hybrid"].path()
    assert sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) <= 20e6
    assert len(tiny_hybrid.geometry.attention_layers) >= 3


def test_words_it_cannot_write_are_refused_by_name(tiny_hybrid):
    with pytest.raises(RequestError, match="xylophone"):
        tiny_hybrid.prefill("the otter watches the xylophone .")


def test_bfloat16_has_the_same_estimator():
    from wakesight.engines.hf.engine import load

    engine = load("tiny-hybrid", dtype=torch.bfloat16)
    assert engine.artifact is not None
    engine.close()

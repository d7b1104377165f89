"""The artifact of random numbers that tests and plug-in authors use: whole, seeded, and saved like a real one."""

from __future__ import annotations

import pytest
import torch

from wakesight.estimator.artifact import Artifact
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.artifacts import fitted, random_artifact, scores_of

FITTED = ("triattention", "gatesight", "gatesight+")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_it_belongs_to_its_model_and_comes_back_from_disk(family, tmp_path):
    engine = tiny.engine(family)
    before = (engine.pool.held_bytes, engine.pool.leases)
    made = random_artifact(engine)
    made.save(tmp_path / "one")

    back = Artifact.load(tmp_path / "one")

    back.check(engine.geometry, engine.weights_fingerprint())
    assert (engine.pool.held_bytes, engine.pool.leases) == before
    assert back.tables == made.tables
    assert set(back.readers) == _readers(engine)
    assert (back.query_stats is None) == (engine.only_whole is not None)
    for name, tensor in (made.query_stats or {}).items():
        assert torch.equal(back.query_stats[name], tensor)


def _readers(engine) -> set[str]:
    if engine.only_whole is not None:
        return set()
    kind = "signals" if engine.geometry.native_heads else "hidden"
    return {kind, f"{kind}+keys"}


def test_a_seed_is_an_artifact():
    engine = tiny.engine("qwen3_5")
    one, same, other = (random_artifact(engine, seed) for seed in (0, 0, 1))

    assert one.tables == same.tables != other.tables
    nets = [each.reader("signals").layers[0].first for each in (one, same, other)]
    assert torch.equal(nets[0], nets[1])
    assert not torch.equal(nets[0], nets[2])


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_with_it_every_fitted_scorer_has_something_to_say(family):
    """Scores as `compact` gets them: finite, of the right form, and not all alike."""
    engine = fitted(tiny.engine(family))
    session = engine.prefill(tiny.tokens(100), record=list(FITTED))
    for name in FITTED:
        scores = scores_of(session, Policy(scorer=name).scorer_method)
        for layer, heads in zip(scores.layers, engine.geometry.kv_heads, strict=True):
            assert layer.shape == (heads, 100), name
            assert all(len(row.unique()) > 50 for row in layer), name

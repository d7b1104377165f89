"""GateSight gives what its artifact's reader gives, and says what is missing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from wakesight.core import ModelGeometry, Signals
from wakesight.errors import RequestError
from wakesight.estimator.artifact import Artifact, described
from wakesight.estimator.features import READERS, FeatureSpec
from wakesight.estimator.net import empty_reader
from wakesight.scores.base import reads_of, score
from wakesight.scores.gatesight import GateSight, GateSightPlus

TOKENS, HEADS = 30, (2, 3)
GEOMETRY = ModelGeometry(
    family="drawn", n_layers=4, attention_layers=(2, 3), recurrent_layers=(0, 1), query_heads=6, kv_heads=HEADS,
    key_dims=(4, 4), value_dims=(4, 4), itemsize=4, max_positions=512, native_heads=(2, 3),
)  # fmt: skip


def artifact(*names: str) -> Artifact:
    readers = {name: empty_reader(FeatureSpec(READERS[name]), GEOMETRY, 8, hidden_size=5) for name in names}
    return Artifact("ab" * 32, described(GEOMETRY), readers=readers)


def signals(fitted: Artifact | None, held: bool = False, recorded: tuple[str, ...] = ("native", "hidden")) -> Signals:
    noise = torch.Generator().manual_seed(0)
    streams = {
        "native": [torch.rand(TOKENS, heads, 3, generator=noise) for heads in (2, 3)],
        "hidden": [torch.randn(TOKENS, 5, generator=noise) for _ in range(2)],
        "keys": [torch.randn(heads, TOKENS, 4, generator=noise) for heads in HEADS],
        "values": [torch.randn(heads, TOKENS, 4, generator=noise) for heads in HEADS],
    }
    there = None
    if held:
        there = tuple(torch.rand(heads, TOKENS, generator=noise) < 0.5 for heads in HEADS)
        for name in ("keys", "values"):
            for tensor, mask in zip(streams[name], there, strict=True):
                tensor[~mask] = math.nan
    kept = {name: x for name, x in streams.items() if name in (*recorded, "keys", "values")}
    return Signals(TOKENS, 2, (0.5, 0.5), kept, there, artifact=fitted)


@pytest.mark.parametrize(
    ("scorer", "reader", "reads"),
    [
        (GateSight(), "signals", ("native",)),
        (GateSightPlus(), "signals+keys", ("native",)),
        (GateSight("hidden"), "hidden", ("hidden",)),
        (GateSightPlus("hidden+keys"), "hidden+keys", ("hidden",)),
        (GateSight("age"), "age", ()),
    ],
)
@pytest.mark.parametrize("held", [False, True])
def test_the_score_is_the_readers_and_nothing_else_is_recorded(scorer, reader, reads, held):
    fitted = artifact(*READERS)
    found = signals(fitted, held, recorded=reads)
    scores = score(scorer, found, HEADS)

    assert reads_of(scorer) == reads
    for layer, (mine, wanted) in enumerate(zip(scores.layers, fitted.reader(reader).scores(found), strict=True)):
        there = torch.ones_like(wanted, dtype=torch.bool) if found.held is None else found.held[layer]
        assert torch.equal(mine[there], wanted[there])
        assert not mine[~there].any()
    assert scores.must_keep is None


@pytest.mark.parametrize("scorer", [GateSight(), GateSightPlus()])
def test_on_a_model_without_signals_the_hidden_reader_takes_the_place(scorer):
    fitted = artifact("hidden", "hidden+keys")
    twin = scorer.resolved(fitted)

    assert type(twin) is type(scorer)
    assert twin.reader == scorer.reader.replace("signals", "hidden")
    assert reads_of(twin) == ("hidden",)
    assert scorer.resolved(artifact("signals", "signals+keys", "hidden", "hidden+keys")) == scorer
    found = signals(fitted, recorded=("hidden",))
    for mine, wanted in zip(score(twin, found, HEADS).layers, fitted.reader(twin.reader).scores(found), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize(("scorer", "name"), [(GateSight(), "gatesight"), (GateSightPlus(), r"gatesight\+")])
def test_without_an_estimator_it_names_the_command_that_makes_one(scorer, name):
    message = f"^{name} needs an estimator fitted for this model; make one with: wakesight label .*wakesight fit"
    with pytest.raises(RequestError, match=message):
        scorer.score(signals(None))
    with pytest.raises(RequestError, match=message):
        scorer.resolved(None)


def test_what_is_missing_is_named():
    with pytest.raises(RequestError, match=r"no reader 'signals\+keys' \(it has signals\)"):
        GateSightPlus().score(signals(artifact("signals")))
    with pytest.raises(RequestError, match="'native' was not recorded"):
        GateSight().score(signals(artifact("signals"), recorded=()))
    with pytest.raises(RequestError, match="no reader 'signal', did you mean 'signals'"):
        GateSight("signal")


def test_they_are_values_with_an_allocation_of_their_own():
    assert hash(GateSight()) == hash(GateSight("signals"))
    assert GateSight.natural_allocation == "gate"
    assert GateSightPlus.natural_allocation == "utility_global"
    assert GateSight("signals+keys") != GateSightPlus()
    with pytest.raises(dataclasses.FrozenInstanceError):
        GateSight().reader = "age"

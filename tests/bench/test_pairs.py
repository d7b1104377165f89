"""Arms alternate, ratios are taken inside rounds, intervals hold what they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wakesight.bench.machine import copy_bandwidth, weight_bytes
from wakesight.bench.pairs import alternate, median_ms, ratio
from wakesight.testing import tiny


def test_arms_alternate_in_both_orders_after_one_uncounted_round():
    calls: list[str] = []
    seconds = alternate({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_ratio_ignores_drift_that_both_arms_share():
    drift = np.linspace(1, 5, 9)
    found = ratio(list(2 * drift), list(drift))
    assert found.mean == pytest.approx(2)
    assert found.low == pytest.approx(2)
    assert found.high == pytest.approx(2)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    noise = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        found = ratio(list(np.exp(noise.normal(0.3, 0.2, 12))), [1.0] * 12, seed=seed)
        hits += found.low <= np.exp(0.3) <= found.high
    assert 170 <= hits <= 200


def test_medians_and_bytes():
    assert median_ms([0.3, 0.1, 0.2], per=10) == pytest.approx(20)
    assert copy_bandwidth(torch.device("cpu"), megabytes=4, repeats=2) > 1e6
    untied, tied = tiny.model("llama"), tiny.model("llama", tie_word_embeddings=True)
    embedding = untied.get_input_embeddings().weight.nbytes
    assert weight_bytes(untied) == sum(p.nbytes for p in untied.parameters()) - embedding
    assert weight_bytes(tied) == sum(p.nbytes for p in tied.parameters())

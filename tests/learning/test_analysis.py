"""Analyses and untrained predictors against their definitions, on numbers whose answer is known."""

from __future__ import annotations

import json
import math

import planted
import pytest
import torch
from scipy import stats

from wakesight.core import Signals
from wakesight.errors import RequestError
from wakesight.learning import analysis, heuristics
from wakesight.learning.analysis_report import markdown
from wakesight.learning.fit import fit
from wakesight.learning.survey import half_lives
from wakesight.report.analysis_figures import figure_files
from wakesight.scores.keydiff import KeyDiff


def native(tokens: int = 40, heads: int = 3, seed: int = 0) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    drawn = torch.rand(tokens, heads, 3, generator=noise) + 0.01
    drawn[..., 1] *= -1
    return drawn


def test_a_half_life_is_the_time_in_which_half_is_forgotten():
    found = native()
    for head, life in enumerate(half_lives(found).tolist()):
        assert math.exp(float(found[:, head, 1].double().mean()) * life) == pytest.approx(0.5)
    never = found.clone()
    never[..., 1] = 0
    assert bool(torch.isfinite(half_lives(never)).all())


def test_the_static_half_life_is_that_of_a_zero_input():
    a_log, dt_bias = torch.tensor([0.0, 1.0]), torch.tensor([0.5, -3.0])
    for life, a, b in zip(analysis.static_half_lives(a_log, dt_bias).tolist(), [0.0, 1.0], [0.5, -3.0], strict=True):
        decay = math.exp(a) * math.log1p(math.exp(b))
        assert math.exp(-decay * life) == pytest.approx(0.5)


def test_the_variance_split_is_the_two_way_table():
    found = native(7, 4)
    table = [[math.log(float(b) * float(v)) for b, _, v in row.double()] for row in found]
    mean = sum(map(sum, table)) / 28
    of_token = [sum(row) / 4 - mean for row in table]
    of_head = [sum(row[head] for row in table) / 7 - mean for head in range(4)]
    total = sum((x - mean) ** 2 for row in table for x in row)
    rest = sum((table[t][h] - mean - of_token[t] - of_head[h]) ** 2 for t in range(7) for h in range(4))
    split = analysis.variance_split(found)

    assert split["head"] == pytest.approx(7 * sum(x * x for x in of_head) / total, rel=1e-6)
    assert split["token"] == pytest.approx(4 * sum(x * x for x in of_token) / total, rel=1e-6)
    assert split["rest"] == pytest.approx(rest / total, rel=1e-6)


def test_the_slow_set_is_that_of_the_medians():
    lives = torch.tensor([[10.0, 1000, 3000, 400], [20, 999, 900, 500], [5, 2000, 5000, 1500]], dtype=torch.float64)
    found = analysis.slow_set(lives)

    assert (found["slow"], found["heads"]) == (2, 4)
    # documents: {1, 2}, {}, {1, 2, 3} against {1, 2}
    assert found["jaccard"] == pytest.approx((1 + 0 + 2 / 3) / 3)
    assert (found["always"], found["never"], found["between"]) == (0, 1, 3)
    assert analysis.jaccard(torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)) == 1.0


def test_decile_lifts_are_counts_against_chance():
    utility = torch.randn(2, 60, generator=torch.Generator().manual_seed(1))
    signal = utility[0] * 2 + 1
    top, bottom = analysis.decile_lifts(signal, utility[:1])
    assert top == bottom == pytest.approx(10)
    k, hits = 6, 0
    best = sorted(range(60), key=lambda i: -float(signal[i]))[:k]
    for head in range(2):
        truth = sorted(range(60), key=lambda i: -float(utility[head, i]))[:k]
        hits += len(set(best) & set(truth)) / k
    assert analysis.decile_lifts(signal, utility)[0] == pytest.approx(hits / 2 / 0.1)


def test_cells_correlate_as_scipy_says():
    layers, utility = [native(seed=1), native(heads=2, seed=2)], torch.rand(2, 40)
    found = analysis.cell_correlations(layers, utility)

    for m, layer in enumerate(layers):
        for row in range(2):
            for head in range(layer.shape[1]):
                for c, sign in enumerate((1, -1, 1)):
                    rho = stats.spearmanr(sign * layer[:, head, c], utility[row]).statistic
                    assert float(found[m][row, head, c]) == pytest.approx(rho, abs=1e-9)


def test_untrained_signals_are_means_over_the_window():
    layers = [native(seed=1), native(heads=2, seed=2), native(seed=3)]
    found = Signals(40, 2, (1.0,), {"native": layers, "keys": [torch.randn(2, 40, 4)]})
    slow = [torch.tensor([True, False, False]), torch.tensor([False, True]), torch.tensor([True, True, True])]
    window = (0, 1)

    for t in (0, 17):
        cells = [layer[t, head].tolist() for layer in layers[:2] for head in range(layer.shape[1])]
        expected = {
            "beta": sum(b for b, _, _ in cells) / 5,
            "forgetting": sum(-g for _, g, _ in cells) / 5,
            "norm_v": sum(v for _, _, v in cells) / 5,
            "write": sum(b * v for b, _, v in cells) / 5,
        }
        for name, value in expected.items():
            assert float(heuristics.window_mean(found, window, name)[t]) == pytest.approx(value, rel=1e-5)
        of_slow = (float(layers[0][t, 0, 2]) + float(layers[1][t, 1, 2])) / 2
        assert float(heuristics.slow_mean(found, window, "norm_v", slow)[t]) == pytest.approx(of_slow, rel=1e-5)
    assert heuristics.slow_mean(found, (0,), "write", [torch.zeros(3, dtype=torch.bool)]) is None
    assert heuristics.window_mean(found, (), "beta") is None
    (same,) = KeyDiff().score(found).layers
    torch.testing.assert_close(heuristics.keydiff(found["keys"][0]), same)


def test_the_oracle_is_the_best_cell_of_a_loop():
    layers = [native(60, seed=4), native(60, heads=2, seed=5)]
    utility = torch.rand(2, 60, generator=torch.Generator().manual_seed(6))
    utility[1] = layers[1][:, 1, 1]  # the log-decay itself: forgetting with the sign turned
    cells = heuristics.BestCells()
    cells.add(layers, utility)
    (first, _), (second, cell) = cells.best()

    best = 0.0
    truth = set(sorted(range(60), key=lambda i: -float(utility[0, i]))[:6])
    for layer in layers:
        for head in range(layer.shape[1]):
            for c in range(3):
                for sign in (1, -1):
                    guess = sorted(range(60), key=lambda i: -sign * float(layer[i, head, c]))[:6]
                    best = max(best, len(truth & set(guess)) / 6)
    assert first == pytest.approx(best)
    assert (second, cell) == (1.0, (1, 1, "forgetting", -1))


def test_analyze_puts_it_together_and_says_it_in_text_and_figures(tmp_path):
    labels = planted.labels(2)
    artifact = fit(labels, tmp_path / "a", epochs=1, rows=50, leave_one_out=False)
    static = [torch.rand(planted.RECURRENT_HEADS) * 100 for _ in range(6)]
    found = analysis.analyze(labels, static=static, artifact=artifact)

    assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(json.dumps(found))
    assert found["documents"] == 6
    assert found["slow_set"]["heads"] == 24
    assert found["half_life"]["order_between_documents"]["median"] > 0.9
    assert sum(found["variance"].values()) == pytest.approx(1)
    assert found["summaries"]["write"]["mean"] > 0.1
    assert found["summaries"]["retention"]["mean"] == pytest.approx(-found["summaries"]["forgetting"]["mean"])
    assert set(found["summaries"]["beta"]["corpora"]) == set(planted.CORPORA)
    first, second = found["cells"]["layers"]
    assert (first["cells"], second["cells"]) == (36, 72)
    assert first["best_layer"] in (0, 1)  # what utility of layer 0 is made of
    assert second["best_layer"] in (2, 4)  # recurrent layers 2 and 3 stand at depths 2 and 4
    assert "signals" in found["transfer"]["predictors"]
    text = markdown(found)
    assert "| slow heads (median of 1000 tokens or more) |" in text
    assert "293 of 2304" in text
    pytest.importorskip("matplotlib")
    files = dict(figure_files(found))
    assert sorted(files) == sorted(
        f"{name}.{end}" for name in ("half-lives", "summaries", "cells") for end in ("png", "svg")
    )
    assert files["cells.png"].startswith(b"\x89PNG")


def test_every_nth_document_is_used_and_labels_without_signals_are_refused():
    assert analysis.analyze(planted.labels(2), every=4)["documents"] == 2
    with pytest.raises(RequestError, match="has no native signals"):
        analysis.analyze(planted.labels(2, native=False))

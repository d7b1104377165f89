"""Labels to artifact: planted functions are found, nothing is found in noise, and a killed fit loses nothing."""

from __future__ import annotations

import dataclasses
import json

import planted
import pytest
import torch
from torch import nn

from wakesight.core import Tables
from wakesight.errors import RequestError
from wakesight.estimator.artifact import JSON, WEIGHTS, Artifact, described
from wakesight.estimator.features import FeatureSpec
from wakesight.learning import train as training
from wakesight.learning.budgets import UtilityTables
from wakesight.learning.dataset import LayerRows, positions, sample
from wakesight.learning.fit import fit
from wakesight.learning.survey import survey
from wakesight.learning.train import Checkpoint, Recipe, train

QUICK = {"epochs": 2, "batch": 512, "rows": 60}


def overlap(artifact: Artifact, predictor: str) -> float:
    return artifact.metrics["predictors"][predictor]["mean"]["overlap"]


def test_a_planted_function_of_the_signals_is_found_and_beats_every_untrained_signal(tmp_path):
    artifact = fit(planted.labels(), tmp_path / "a", epochs=20, batch=256)
    found = artifact.metrics["predictors"]
    untrained = [name for name in found if name.split()[0] in ("mean", "slow", "older", "keydiff")]

    assert len(untrained) == 8
    assert overlap(artifact, "signals") > 0.6
    assert overlap(artifact, "signals") > 2 * max(overlap(artifact, name) for name in untrained)
    assert overlap(artifact, "ridge on signals") > 0.5
    assert overlap(artifact, "age") < 0.2
    assert artifact.metrics["judged"] == "leave one corpus out"
    # the oracle reads one cell of the two that utility is made of
    assert overlap(artifact, "mean write") < artifact.metrics["oracle"]["overlap"] < overlap(artifact, "signals")
    (code, *_) = artifact.metrics["oracle"]["layers"][1]["cells"]
    assert code["recurrent"] in (2, 3)


def test_shuffled_labels_give_chance(tmp_path):
    artifact = fit(planted.labels(utility=planted.shuffled), tmp_path / "a", epochs=6, batch=256)

    for name in ("signals", "age", "ridge on signals"):
        mean = artifact.metrics["predictors"][name]["mean"]
        assert 0.05 < mean["overlap"] < 0.15
        assert abs(mean["rho"]) < 0.06


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        fit(planted.labels(3), tmp_path / name, seed=seed, **QUICK)
    one, two, three = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "two", "three"))

    assert set(one) == {JSON, WEIGHTS, "report.json", "report.md"}
    assert one == two
    assert one[WEIGHTS] != three[WEIGHTS]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three", "two"]


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 5, 9, 20, 30, 47])
def test_a_fit_that_is_killed_and_resumed_gives_the_same_artifact(tmp_path, monkeypatch, after):
    monkeypatch.setattr(training.Checkpoint.__init__, "__defaults__", (0.0,))  # a checkpoint after every epoch
    fit(planted.labels(3), tmp_path / "whole", **QUICK)
    calls = 0

    def die(done, total, what):
        nonlocal calls
        calls += 1
        if calls == after:
            raise Killed

    with pytest.raises(Killed):
        fit(planted.labels(3), tmp_path / "cut", on_progress=die, **QUICK)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(RequestError, match=r"a stopped fit lies in .*cut.partial; go on with it by --resume"):
        fit(planted.labels(3), tmp_path / "cut", **QUICK)
    with pytest.raises(RequestError, match="was another one; repeat its arguments"):
        fit(planted.labels(3), tmp_path / "cut", resume=True, **{**QUICK, "epochs": 3})
    fit(planted.labels(3), tmp_path / "cut", resume=True, **QUICK)

    for name in (JSON, WEIGHTS, "report.json", "report.md"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "cut.partial").exists()


def drawn_rows(own: bool, layer: int = 0, seed: int = 0) -> LayerRows:
    noise = torch.Generator().manual_seed(seed)
    return LayerRows(
        layer,
        torch.randn(300, 6, generator=noise) * 3 + 1,
        torch.randn(2, 300, 4, generator=noise) if own else None,
        torch.rand(2, 300, generator=noise),
    )


@pytest.mark.parametrize("own", [False, True])
def test_training_together_is_training_every_network_alone_with_torchs_own_parts(own):
    rows, chosen, recipe = drawn_rows(own), torch.arange(280), Recipe(hidden=5, epochs=3, batch=64, clip=0.05)
    nets = train(rows, chosen, recipe)
    start = train(rows, chosen, dataclasses.replace(recipe, epochs=1, lr=0.0))  # first weights, nothing learned
    for head in range(2):
        x = rows.shared if rows.own is None else torch.cat([rows.shared, rows.own[head]], dim=1)
        x = (x - x[chosen].mean(dim=0)) / x[chosen].std(dim=0, unbiased=False)
        model = nn.Sequential(nn.Linear(x.shape[1], 5), nn.ReLU(), nn.Linear(5, 1))
        model[0].weight.data, model[0].bias.data = start.first[head].T.clone(), start.first_bias[head].clone()
        model[2].weight.data, model[2].bias.data = (
            start.second[head][None].clone(),
            start.second_bias[head][None].clone(),
        )
        optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
        with torch.enable_grad():
            for epoch in range(3):
                order = torch.randperm(280, generator=torch.Generator().manual_seed(epoch))
                for batch in order.split(64):
                    logits = model(x[batch])[:, 0]
                    loss = nn.functional.binary_cross_entropy_with_logits(logits, rows.label[head, batch])
                    optimiser.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    optimiser.step()
        torch.testing.assert_close(nets.first[head].T, model[0].weight.data, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(nets.second[head], model[2].weight.data[0], rtol=1e-3, atol=1e-5)
    assert not torch.equal(nets.first, start.first)


def test_a_network_does_not_know_its_neighbours():
    rows, chosen, recipe = drawn_rows(True), torch.arange(300), Recipe(hidden=5, epochs=2, batch=64)
    other = dataclasses.replace(rows, label=torch.stack([rows.label[0], 1 - rows.label[1]]))
    one, two = train(rows, chosen, recipe), train(other, chosen, recipe)

    torch.testing.assert_close(one.first[0], two.first[0], rtol=0, atol=0)
    assert not torch.equal(one.first[1], two.first[1])


def test_statistics_are_of_the_chosen_rows_and_have_a_floor():
    rows, chosen = drawn_rows(True), torch.arange(0, 300, 3)
    rows.shared[:, 2] = 4.0
    mean, std = rows.statistics(chosen)

    x = torch.cat([rows.shared, rows.own[1]], dim=1)[chosen]
    torch.testing.assert_close(mean[1], x.mean(dim=0))
    torch.testing.assert_close(std[1], x.std(dim=0, unbiased=False).clamp_min(1e-6))
    assert float(std[0, 2]) == pytest.approx(1e-6)


def test_training_resumes_from_its_checkpoint_bit_for_bit(tmp_path):
    rows, chosen, recipe = drawn_rows(True), torch.arange(300), Recipe(hidden=5, epochs=4, batch=64)
    checkpoint = Checkpoint(tmp_path / "c.safetensors", "unit", every_s=0.0)

    def stop(epoch):
        if epoch == 3:
            raise Killed

    with pytest.raises(Killed):
        train(rows, chosen, recipe, checkpoint, on_epoch=stop)
    epochs = []
    resumed = train(rows, chosen, recipe, checkpoint, on_epoch=epochs.append)
    whole = train(rows, chosen, recipe)
    elsewhere = train(rows, chosen, recipe, Checkpoint(tmp_path / "c.safetensors", "another unit"))

    assert epochs == [4]
    for name, tensor in whole.tensors().items():
        assert torch.equal(resumed.tensors()[name], tensor)
        assert torch.equal(elsewhere.tensors()[name], tensor)


def test_rows_are_the_documents_entries_at_the_same_positions_for_all_heads(tmp_path):
    labels = planted.labels(2)
    rows = sample(labels, tmp_path / "rows", ["native", "key", "key_stats", "hidden"], rows=50, seed=3)
    spec = FeatureSpec(("native", "age", "hidden", "key_stats", "key"), window=2)
    at = 0
    for document in labels.documents():
        where = positions(document, 50, 3)
        assert len(where) == 50
        assert len(set(where.tolist())) == 50
        assert int(where.min()) >= document.prefix
        for layer in range(2):
            window = spec.windows(labels.geometry)[layer]
            data = rows.layer(spec, layer, window)
            wanted = spec.matrix(document.signals, layer, window)[:, where]
            shared = data.shared[at : at + 50].expand(2, -1, -1)
            found = torch.cat([shared, data.own[:, at : at + 50]], dim=2)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)  # hidden states are kept in half precision
            body = document.utility[layer][:, document.prefix :]
            label = document.utility[layer][:, where] / body.amax(dim=1, keepdim=True)
            torch.testing.assert_close(data.label[:, at : at + 50], label)
        at += 50
    assert at == rows.count


def test_positions_hang_on_seed_and_id_alone():
    first, second, *_ = planted.labels(2).documents()

    assert torch.equal(positions(first, 50, 0), positions(first, 50, 0))
    assert not torch.equal(positions(first, 50, 0), positions(first, 50, 1))
    assert not torch.equal(positions(first, 50, 0), positions(second, 50, 0))
    assert positions(first, 10_000, 0).tolist() == list(range(first.prefix, first.tokens))
    assert positions(first, 10_000, 0, exclude_prefix=False).tolist() == list(range(1, first.tokens))


def test_tables_are_means_of_peaks_and_of_the_best_fifth():
    made, peaks, masses = UtilityTables(), [], []
    for document in planted.labels(2).documents():
        utility = [layer[:, document.prefix :] for layer in document.utility]
        made.add(utility)
        count = int(0.2 * utility[0].shape[1])
        peaks.append([[max(head) for head in layer.tolist()] for layer in utility])
        masses.append([[sum(sorted(head)[-count:]) for head in layer.tolist()] for layer in utility])
    tables = made.tables()

    assert torch.tensor(tables.utility_peak) == pytest.approx(torch.tensor(peaks).mean(dim=0), rel=1e-6)
    assert torch.tensor(tables.utility_mass) == pytest.approx(torch.tensor(masses).mean(dim=0), rel=1e-6)
    assert survey(planted.labels(2)).tables == tables


def test_an_artifact_keeps_the_gates_and_statistics_that_were_measured_before(tmp_path):
    labels, gate = planted.labels(2), ((0.25, 0.5), (0.75, 1.0))
    stats = {"mean.0": torch.ones(4, 1, 2)}
    Artifact("f" * 64, described(labels.geometry), Tables(gate=gate), query_stats=stats).save(tmp_path / "a")
    made = fit(labels, tmp_path / "a", readers=("signals", "signals+keys"), leave_one_out=False, **QUICK)

    assert made.tables.gate == gate
    assert made.tables.utility_peak is not None
    assert torch.equal(made.query_stats["mean.0"], stats["mean.0"])
    assert list(made.readers) == ["signals", "signals+keys"]
    assert made.metrics["judged"] == "in sample"
    made.check(labels.geometry, labels.fingerprint)


def test_a_model_without_recurrent_layers_is_read_by_its_hidden_states(tmp_path):
    def from_hidden(found, layer):
        return torch.exp(found["hidden"][layer][:, :2].T).float()

    labels = planted.labels(3, native=False, utility=from_hidden)
    artifact = fit(labels, tmp_path / "a", readers=("hidden", "hidden+keys"), epochs=8, batch=128)

    assert overlap(artifact, "hidden") > 0.5
    assert artifact.metrics["oracle"] is None
    assert set(artifact.metrics["predictors"]) == {
        "hidden", "hidden+keys", "age", "ridge on hidden", "older first", "keydiff",
    }  # fmt: skip
    with pytest.raises(RequestError, match="no native signals"):
        fit(labels, tmp_path / "b")


def test_the_window_study_stands_in_the_report_beside_the_papers(tmp_path):
    artifact = fit(planted.labels(2), tmp_path / "a", window_study=True, **QUICK)
    text = (tmp_path / "a" / "report.md").read_text()
    plain = json.loads((tmp_path / "a" / "report.json").read_text())

    assert {f"signals, window {w}" for w in (3, 6, 9, 12)} <= set(artifact.metrics["predictors"])
    assert "| layers | overlap | rho | overlap, paper (its 27B model) | rho, paper |" in text
    assert "| signals |" in text
    assert "+0.543 | 41.0% | 58.4% |" in text
    assert plain["metrics"] == artifact.metrics


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"readers": ("signal",)}, "no reader 'signal'"),
        ({"readers": ()}, "name each reader once"),
        ({"readers": ("age", "age")}, "name each reader once"),
        ({"epochs": 0}, "epochs=0"),
        ({"rows": 0}, "rows=0"),
        ({"top_share": 0.0}, "top_share=0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, change, message):
    with pytest.raises(RequestError, match=message):
        fit(planted.labels(2), tmp_path / "a", **{**QUICK, **change})
    assert not (tmp_path / "a").exists()


def test_one_corpus_cannot_be_left_out_and_another_models_artifact_is_kept(tmp_path):
    with pytest.raises(RequestError, match=r"two corpora or more, and all documents belong to 'code'.*--no-loco"):
        fit(planted.labels(2, corpora=("code",)), tmp_path / "a", **QUICK)
    labels = planted.labels(2)
    Artifact("e" * 64, described(labels.geometry)).save(tmp_path / "b")
    with pytest.raises(RequestError, match="estimator of another model"):
        fit(labels, tmp_path / "b", **QUICK)


def test_labels_without_what_a_reader_needs_name_the_record(tmp_path):
    with pytest.raises(RequestError, match=r"hold no hidden, which a reader of 'hidden' needs.* --record hidden"):
        fit(bare(), tmp_path / "a", readers=("hidden",), **QUICK)
    with pytest.raises(RequestError, match="hold no keys, which a reader of 'key' needs"):
        fit(bare(), tmp_path / "b", readers=("signals+keys",), **QUICK)


def bare():
    """Labels with native signals alone."""
    labels = planted.labels(2)

    def documents():
        for one in labels.documents():
            streams = {"native": one.signals["native"]}
            yield dataclasses.replace(one, signals=dataclasses.replace(one.signals, streams=streams))

    return dataclasses.replace(labels, documents=documents)


def test_a_paper_reader_needs_no_keys(tmp_path):
    artifact = fit(bare(), tmp_path / "a", **QUICK)

    assert "keydiff" not in artifact.metrics["predictors"]
    assert list(artifact.readers) == ["signals"]

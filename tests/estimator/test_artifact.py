"""The artifact folder: what goes in comes out, and everything else is refused in a sentence."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from test_features import geometry, signals

from wakesight.core import Tables
from wakesight.errors import RequestError
from wakesight.estimator.artifact import JSON, WEIGHTS, Artifact, described, restored
from wakesight.estimator.features import READERS, FeatureSpec
from wakesight.estimator.net import empty_reader


def artifact(names=("signals", "signals+keys", "hidden")) -> Artifact:
    known = geometry()
    return Artifact(
        fingerprint="ab" * 32,
        geometry=described(known),
        tables=Tables(gate=((0.1, 0.2), (0.3, 0.4, 0.5)), utility_peak=((1.0, 2.0), (3.0, 4.0, 5.0))),
        readers={name: empty_reader(FeatureSpec(READERS[name]), known, 8, hidden_size=5) for name in names},
        query_stats={"mean.0": torch.ones(4, 2, 2), "abs.0": torch.ones(4, 2)},
        training={"seed": 0},
        metrics={"rho": 0.5},
    )


def test_it_comes_back_as_it_was(tmp_path):
    made = artifact()
    made.save(tmp_path / "one")
    found = Artifact.load(tmp_path / "one")

    assert (found.fingerprint, found.tables, found.training, found.metrics) == (
        made.fingerprint, made.tables, made.training, made.metrics,
    )  # fmt: skip
    assert restored(found.geometry) == geometry()
    assert list(found.readers) == sorted(made.readers)
    context = signals()
    for name, reader in made.readers.items():
        assert found.readers[name].features == reader.features
        assert found.readers[name].windows == reader.windows
        for a, b in zip(found.reader(name).scores(context), reader.scores(context), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(found.query_stats["mean.0"], made.query_stats["mean.0"])


def test_the_same_content_gives_the_same_bytes_and_the_order_is_written_down(tmp_path):
    artifact().save(tmp_path / "one")
    artifact().save(tmp_path / "two")
    for name in (JSON, WEIGHTS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    order = json.loads((tmp_path / "one" / JSON).read_text())["readers"]["signals"]["layers"][1]["order"]
    assert order[0] == {
        "part": "native", "width": 45, "recurrent_layers": [0, 1, 2, 4, 5, 6], "heads": [2, 3, 2, 3, 2, 3],
        "channels": ["beta", "g", "norm_v"],
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_saving_again_replaces_the_artifact_and_keeps_its_report(tmp_path):
    target = tmp_path / "one"
    artifact().save(target)
    (target / "report.md").write_text("mine")
    artifact(("age",)).save(target)

    assert list(Artifact.load(target).readers) == ["age"]
    assert (target / "report.md").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]


def test_nothing_else_is_overwritten(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("x")

    for name, message in (("work", "holds no artifact"), ("file", "is a file")):
        with pytest.raises(RequestError, match=message):
            artifact().save(tmp_path / name)
    assert (tmp_path / "work" / "thesis.txt").read_text() == "years"
    (tmp_path / "empty").mkdir()
    artifact().save(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "other"}, "its family is drawn and the loaded model has other"),
        ({"kv_heads": (2, 4)}, "its kv_heads is"),
        ({"attention_layers": (3, 6)}, "its attention_layers is"),
        ({"native_heads": (2,) * 6}, "its native_heads is"),
    ],
)
def test_another_model_is_refused_by_name(change, message):
    with pytest.raises(RequestError, match=message):
        artifact().check(dataclasses.replace(geometry(), **change), "ab" * 32)


def test_the_same_model_passes_in_any_memory_and_other_weights_do_not():
    artifact().check(dataclasses.replace(geometry(), itemsize=2, max_positions=9), "ab" * 32)
    with pytest.raises(RequestError, match=r"fitted on other weights of a model.*fingerprint abab.*wakesight fit"):
        artifact().check(geometry(), "cd" * 32)


def test_a_reader_that_is_not_there_names_those_that_are():
    with pytest.raises(RequestError, match=r"no reader 'hidden\+keys' \(it has signals, age\).*--readers hidden\+keys"):
        artifact(("signals", "age")).reader("hidden+keys")


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def flip(folder):
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-5] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def edit(change=None, **changes):
    """Of the JSON, with the checksum taken out: an artifact that an older version wrote has none."""

    def edited(folder):
        about = json.loads((folder / JSON).read_text())
        del about["json_sha256"]
        about.update(changes)
        if change is not None:
            change(about)
        (folder / JSON).write_text(json.dumps(about))

    return edited


def window(*layers):
    return lambda about: about["readers"]["signals"]["layers"][1].update(window=list(layers))


def loud(folder):
    about = json.loads((folder / JSON).read_text())
    about["tables"]["utility_peak"][0][0] *= 1000
    (folder / JSON).write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is damaged or belongs to another artifact"),
        (flip, "is damaged or belongs to another artifact"),
        (lambda folder: (folder / WEIGHTS).unlink(), "cannot be read"),
        (lambda folder: (folder / JSON).unlink(), "is no estimator: it has no artifact.json"),
        (lambda folder: (folder / JSON).write_text("{"), "is damaged or cannot be read"),
        (lambda folder: (folder / JSON).write_text("[]"), "another format"),
        (edit(format="something"), "another format"),
        (edit(version=99), "format version 99"),
        (edit(readers={"signals": {}}), "does not describe its content"),
        (edit(tables={"gates": [[1.0]]}), "does not describe its content"),
        (edit(geometry=None, readers=None), "does not describe its content"),
        (edit(geometry=None, readers={}), "does not describe its content"),
        (edit(window(5, 4, 3, 2, 1, 0)), "the reader signals reads other recurrent layers|has other layers"),
        (edit(window(0, 1, 2, 3, 4, 99)), "does not describe its content"),
        (edit(lambda about: about["readers"]["signals"]["layers"].pop()), "the reader signals has other layers"),
        (edit(lambda about: about["tables"]["gate"].pop()), "the table gate has other layers or KV heads"),
        (loud, "its content is not what was written"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(tmp_path, damage, message):
    artifact().save(tmp_path / "one")
    damage(tmp_path / "one")

    with pytest.raises(RequestError, match=message):
        Artifact.load(tmp_path / "one")


def test_a_missing_folder_names_the_commands(tmp_path):
    with pytest.raises(RequestError, match="there is no such folder; make one with wakesight label"):
        Artifact.load(tmp_path / "none")


def test_an_artifact_without_a_checksum_of_its_json_is_still_read(tmp_path):
    artifact().save(tmp_path / "one")
    edit()(tmp_path / "one")

    assert Artifact.load(tmp_path / "one").fingerprint == artifact().fingerprint

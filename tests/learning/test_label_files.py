"""What a label folder may hold: damaged and foreign files are named, and a fit goes on from its own labels only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import planted
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from wakesight.errors import RequestError
from wakesight.learning.analysis import analyze
from wakesight.learning.dataset import open_labels
from wakesight.learning.fit import fit
from wakesight.learning.labelled import load_labels, write_labelled

QUICK = {"epochs": 1, "batch": 512, "rows": 30, "leave_one_out": False}
DIM, HEADS = planted.DIM, planted.HEADS


def folder_of(path: Path, documents: int = 3, seed: int = 0) -> Path:
    """Labels of the planted geometry, as wakesight label writes them."""
    (path / "labels").mkdir(parents=True)
    about = {"asked": {"seed": seed}, "fingerprint": "f" * 64, "geometry": dataclasses.asdict(planted.geometry())}
    (path / "labels.json").write_text(json.dumps(about))
    for number in range(documents):
        found = planted.signals(60, seed=10 * seed + number)
        tensors = {f"u.{layer}": planted.from_signals(found, layer).float() for layer in range(2)}
        tensors |= {f"native.{m}": one for m, one in enumerate(found["native"])}
        tensors |= {f"key.{layer}": one for layer, one in enumerate(found["keys"])}
        tensors |= {f"value_norm.{layer}": one for layer, one in enumerate(found["value_norms"])}
        header = {"id": str(number), "corpus": "c", "tokens": 60, "prefix": 3, "scaling": list(found.scaling)}
        header |= {"record": ["native", "keys"], "fingerprint": "f" * 64}
        write_labelled(path / "labels" / f"{number}.safetensors", tensors, header)
    return path


def rewritten(path: Path, change, signed: bool = False) -> None:
    """A label file after change(tensors, header); without a checksum, as an older version wrote it, unless signed."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if not signed:
        header.pop("sha256")
    change(tensors, header)
    save_file(tensors, path, {"about": json.dumps(header)})


def nan_in(name):
    return lambda tensors, header: tensors[name].view(-1)[7:8].fill_(float("nan"))


def flip(tensors, header):
    tensors["u.1"][0, 9] *= 1.5


@pytest.mark.parametrize(
    ("change", "signed", "message"),
    [
        (nan_in("u.1"), False, "holds numbers in u.1 that are not finite"),
        (nan_in("native.1"), False, "holds numbers in native.1 that are not finite"),
        (flip, True, "its numbers are not those that were written"),
        (lambda tensors, header: header.pop("tokens"), False, "its header lacks or garbles 'tokens'"),
        (lambda tensors, header: header.update(tokens=50), False, "its utility are not those of 50 tokens"),
        (lambda tensors, header: header.update(fingerprint="e" * 64), False, "belongs to another model than"),
        (lambda tensors, header: tensors.pop("u.1"), False, "its utility are not those of 60 tokens"),
        (lambda tensors, header: tensors.pop("native.5"), False, "its native are not those"),
        (lambda tensors, header: tensors.pop("native.0"), False, "its native are not those"),
        (lambda tensors, header: tensors.update({"u.0": torch.ones(2, 9)}), False, "its utility are not those"),
    ],
)  # fmt: skip
def test_a_damaged_label_file_is_named(tmp_path, change, signed, message):
    labels = folder_of(tmp_path / "labels")
    rewritten(labels / "labels" / "1.safetensors", change, signed)

    with pytest.raises(RequestError, match=message) as found:
        list(load_labels(labels))
    assert "1.safetensors" in str(found.value)


def test_numbers_that_are_not_finite_reach_no_report_and_no_estimator(tmp_path):
    labels = folder_of(tmp_path / "labels")
    rewritten(labels / "labels" / "2.safetensors", nan_in("u.0"))

    for work in (lambda: analyze(open_labels(labels)), lambda: fit(labels, tmp_path / "a", **QUICK)):
        with pytest.raises(RequestError, match=r"2\.safetensors holds numbers in u\.0 that are not finite"):
            work()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels"]


def test_files_without_a_checksum_are_still_read(tmp_path):
    labels = folder_of(tmp_path / "labels")
    rewritten(labels / "labels" / "1.safetensors", lambda tensors, header: header.pop("record"))

    assert [document.id for document in load_labels(labels)] == ["0", "1", "2"]


@pytest.mark.parametrize("about", ["{", "[]", '{"geometry": null, "fingerprint": "f"}'])
def test_a_damaged_labels_json_is_named(tmp_path, about):
    labels = folder_of(tmp_path / "labels", documents=1)
    (labels / "labels.json").write_text(about)

    with pytest.raises(RequestError, match=r"labels\.json is damaged"):
        open_labels(labels)


def test_relative_utility_can_take_the_place_of_the_raw_one(tmp_path):
    labels = folder_of(tmp_path / "labels")
    with pytest.raises(RequestError, match="hold no relative utility; label again"):
        list(open_labels(labels, "relative").documents())
    for path in (labels / "labels").iterdir():
        rewritten(
            path, lambda tensors, header: tensors.update({f"relative.{n}": tensors[f"u.{n}"] / 7 for n in (0, 1)})
        )
    raw, relative = open_labels(labels), open_labels(labels, "relative")

    for a, b in zip(raw.documents(), relative.documents(), strict=True):
        torch.testing.assert_close(a.utility[1], 7 * b.utility[1])
    assert raw.digest != relative.digest
    made = fit(relative, tmp_path / "a", **QUICK)
    assert made.training["utility"] == "relative"
    assert made.tables.utility_peak[0][0] == pytest.approx(
        fit(raw, tmp_path / "b", **QUICK).tables.utility_peak[0][0] / 7
    )
    with pytest.raises(RequestError, match="there is no utility 'rel'; give --utility raw"):
        open_labels(labels, "rel")


class Killed(Exception):
    pass


def test_a_stopped_fit_goes_on_from_its_own_labels_only(tmp_path):
    mine, other = folder_of(tmp_path / "mine"), folder_of(tmp_path / "other", seed=1)

    def die(done, total, what):
        if done == 1:
            raise Killed

    with pytest.raises(Killed):
        fit(mine, tmp_path / "a", on_progress=die, **QUICK)
    with pytest.raises(
        RequestError, match=r"begun from other labels; give those, or start anew after: rm -r .*partial"
    ):
        fit(other, tmp_path / "a", resume=True, **QUICK)
    assert fit(mine, tmp_path / "a", resume=True, **QUICK).training["documents"] == 3


@pytest.mark.parametrize(
    ("labels", "change", "message"),
    [
        (planted.labels(2, corpora=("code",)), {"leave_one_out": True}, "two corpora or more"),
        (planted.labels(1, corpora=("code", "math")), {"leave_one_out": True},
         "1 labelled document without the corpus 'code' is too few.* or fit with --no-loco"),
        (planted.labels(1, corpora=("code",)), {}, "1 labelled document is too few to train on"),
        (planted.labels(2), {"seed": -1}, "seed=-1 must be at least 0"),
    ],
)  # fmt: skip
def test_a_refused_fit_trains_nothing_and_leaves_nothing_behind(tmp_path, labels, change, message):
    told = []
    with pytest.raises(RequestError, match=message):
        fit(labels, tmp_path / "a", on_progress=lambda *step: told.append(step[2]), **{**QUICK, **change})
    assert list(tmp_path.iterdir()) == []
    assert set(told) <= {"reading labels"}


def test_three_corpora_of_one_document_are_enough(tmp_path):
    artifact = fit(planted.labels(1), tmp_path / "a", **{**QUICK, "leave_one_out": True})

    assert artifact.metrics["predictors"]["ridge on signals"]["mean"] is not None


def test_a_large_seed_is_a_seed(tmp_path):
    assert fit(planted.labels(2, corpora=("code",)), tmp_path / "a", seed=10**15, **QUICK).training["documents"] == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"cannot be made \(Not a directory\); give another one with --out"):
        fit(planted.labels(2), tmp_path / "file" / "a", **QUICK)

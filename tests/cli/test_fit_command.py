"""wakesight fit and wakesight analyze, from a label folder to their files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from wakesight.cli.main import run
from wakesight.core import ModelGeometry
from wakesight.learning.labelled import write_labelled

GEOMETRY = ModelGeometry(
    family="drawn", n_layers=3, attention_layers=(1, 2), recurrent_layers=(0,), query_heads=2, kv_heads=(1, 1),
    key_dims=(4, 4), value_dims=(4, 4), itemsize=4, max_positions=512, native_heads=(3,),
)  # fmt: skip


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    """Six documents of two corpora; utility follows one gate."""
    folder = tmp_path_factory.mktemp("labels")
    (folder / "labels").mkdir()
    about = {"asked": {"seed": 0}, "fingerprint": "f" * 64, "geometry": dataclasses.asdict(GEOMETRY)}
    (folder / "labels.json").write_text(json.dumps(about))
    noise = torch.Generator().manual_seed(0)
    for number in range(6):
        native = torch.rand(80, 3, 3, generator=noise)
        native[..., 1] *= -1
        tensors = {"native.0": native}
        for layer in range(2):
            tensors[f"u.{layer}"] = native[:, 1, 0].exp().square()[None]
            tensors[f"key.{layer}"] = torch.randn(1, 80, 4, generator=noise)
            tensors[f"value_norm.{layer}"] = torch.rand(1, 80, generator=noise)
        corpus = ("code", "news")[number % 2]
        plain = {"id": str(number), "corpus": corpus, "tokens": 80, "prefix": 2, "scaling": [0.5, 0.5]}
        write_labelled(folder / "labels" / f"{number}.safetensors", tensors, plain)
    return folder


def test_fit_writes_an_artifact_and_a_table(labels, tmp_path, capsys):
    out = tmp_path / "artifact"
    code = run(["fit", str(labels), "--out", str(out), "--readers", "signals,signals+keys", "--epochs", "2"])
    shown = capsys.readouterr()

    assert code == 0
    assert "Ov@10%" in shown.out
    assert "ridge on signals" in shown.out
    assert "readers signals, signals+keys" in shown.err
    assert sorted(file.name for file in out.iterdir()) == [
        "artifact.json", "artifact.safetensors", "report.json", "report.md",
    ]  # fmt: skip
    assert run(["analyze", str(labels), "--out", str(tmp_path / "seen"), "--artifact", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"analysis.json", "analysis.md", "cells.png"} <= set(found["files"])
    assert set(found["analysis"]["transfer"]["predictors"]) >= {"signals", "signals+keys"}
    assert run(["analyze", str(labels), "--out", str(tmp_path / "seen")]) == 0  # replaces its own files


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["fit", "{none}", "--out", "{out}"],
            "is no label folder: it has no labels.json; make one with",
        ),
        (["fit", "{labels}", "--out", "{out}", "--readers", "hidden"], "hold no hidden"),
        (["fit", "{labels}", "--out", "{out}", "--readers", "sig"], "there is no reader 'sig'"),
        (["fit", "{labels}", "--out", "{labels}"], "holds no artifact; give a new folder with --out"),
        (["fit", "{labels}", "--out", "{out}", "--epochs", "0"], "epochs=0"),
        (["analyze", "{labels}", "--out", "{labels}"], "holds other files"),
        (["analyze", "{labels}", "--out", "{out}", "--slow", "nan"], "--slow nan"),
        (["analyze", "{labels}", "--out", "{out}", "--every", "0"], "must be at least 1"),
        (["analyze", "{labels}", "--out", "{out}", "--artifact", "{none}"], "is no estimator"),
    ],
)
def test_a_wrong_request_is_one_sentence(labels, tmp_path, capsys, words, sentence):
    places = {"labels": labels, "out": tmp_path / "out", "none": tmp_path / "none"}
    code = run([word.format(**places) for word in words])
    shown = capsys.readouterr()

    assert code == 2
    assert sentence in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()

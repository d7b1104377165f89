"""report.json and report.md beside an artifact: our numbers, and the paper's in a column of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wakesight.estimator.artifact import Artifact

PAPER_NAME = "paper (its 27B model)"
# rho, overlap@10 %, coverage@10 %, as the paper gives them for its 27B model; None where it gives no number
PAPER: Mapping[str, tuple[float | None, float | None, float | None]] = {
    "signals": (0.543, 0.410, 0.584),
    "ridge on signals": (0.548, 0.386, 0.558),
    "age": (None, 0.179, None),
    "older first": (None, 0.192, None),
    "slow write": (0.23, 0.182, None),
    "mean write": (0.10, None, None),
    "best single cell (oracle)": (None, 0.226, None),
}
# overlap@10 % and rho against the window of six layers
PAPER_WINDOWS = {3: (-0.008, -0.009), 6: (0.0, 0.0), 9: (0.002, 0.004), 12: (0.003, 0.005)}


def write_report(folder: Path, artifact: Artifact, readers: Sequence[str]) -> None:
    """Both files into the artifact's folder; the same artifact gives the same bytes."""
    plain = {
        "training": artifact.training,
        "metrics": artifact.metrics,
        "readers": {name: reader.parameters for name, reader in artifact.readers.items()},
        PAPER_NAME: {"predictors": PAPER, "windows": PAPER_WINDOWS},
    }
    text = json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    (folder / "report.json").write_text(text, encoding="utf-8")
    (folder / "report.md").write_text(markdown(artifact, readers), encoding="utf-8")


def markdown(artifact: Artifact, readers: Sequence[str]) -> str:
    """The report for people."""
    metrics, training = artifact.metrics, artifact.training
    k = f"{metrics['k_frac']:.0%}"
    corpora = ", ".join(f"{name} {count}" for name, count in training["corpora"].items())
    blocks = [
        "# Estimator\n",
        f"{training['documents']} documents ({corpora}), {training['rows']} training rows. Judged on "
        f"{metrics['documents']} documents, {metrics['judged']}, against raw utility; means over KV heads, then "
        "documents, then layers, +- one standard error over documents. The last columns are the paper's numbers for "
        "its 27B model on its own corpus: another model, no target of this one.\n",
        _main_table(metrics, k),
        f"## Overlap@{k} by attention layer\n\n" + _layers(metrics),
        f"## Overlap@{k} by corpus\n\n" + _corpora(metrics),
    ]
    if any(name.startswith("signals, window ") for name in metrics["predictors"]):
        blocks.append("## Window width, against six layers\n\n" + _study(metrics))
    blocks.append("## Readers\n\n" + _readers(artifact, readers))
    return "\n".join(blocks)


def _main_table(metrics: Mapping[str, Any], k: str) -> str:
    rows = []
    for name, about in metrics["predictors"].items():
        mean, error = about["mean"], about["standard_error"]
        cells = [_with_error(mean, error, one) for one in ("rho", "overlap", "coverage")]
        rows.append([name, *cells, *_paper(name)])
    if metrics["oracle"] is not None:
        name = metrics["oracle"]["name"]
        rows.append([name, "", f"{metrics['oracle']['overlap']:.1%}", "", *_paper(name)])
    columns = ["predictor", "rho", f"Ov@{k}", f"Cov@{k}", f"rho, {PAPER_NAME}", "Ov@10%, paper", "Cov@10%, paper"]
    return _pipes(columns, rows)


def _with_error(mean: Mapping[str, float] | None, error: Mapping[str, float] | None, name: str) -> str:
    if mean is None:
        return "-"
    if name == "rho":
        return f"{mean[name]:+.3f}" + (f" +- {error[name]:.3f}" if error else "")
    return f"{mean[name]:.1%}" + (f" +- {error[name]:.1%}" if error else "")


def _paper(name: str) -> list[str]:
    rho, overlap, coverage = PAPER.get(name, (None, None, None))
    return [
        "" if rho is None else f"{rho:+.3f}",
        "" if overlap is None else f"{overlap:.1%}",
        "" if coverage is None else f"{coverage:.1%}",
    ]


def _layers(metrics: Mapping[str, Any]) -> str:
    predictors = metrics["predictors"]
    count = len(next(iter(predictors.values()))["layers"])
    rows = [[name, *(_cell(layer) for layer in about["layers"])] for name, about in predictors.items()]
    return _pipes(["predictor", *(str(layer) for layer in range(count))], rows)


def _corpora(metrics: Mapping[str, Any]) -> str:
    predictors = metrics["predictors"]
    corpora = sorted(next(iter(predictors.values()))["corpora"])
    rows = [[name, *(_cell(about["corpora"][one]) for one in corpora)] for name, about in predictors.items()]
    return _pipes(["predictor", *corpora], rows)


def _cell(mean: Mapping[str, float] | None) -> str:
    return "-" if mean is None else f"{mean['overlap']:.1%}"


def _study(metrics: Mapping[str, Any]) -> str:
    means = {
        int(name.rsplit(" ", 1)[1]): about["mean"]
        for name, about in metrics["predictors"].items()
        if name.startswith("signals, window ")
    }
    base, rows = means[6], []
    for window, mean in means.items():
        overlap, rho = PAPER_WINDOWS[window]
        rows.append(
            [
                str(window), f"{mean['overlap'] - base['overlap']:+.2%}", f"{mean['rho'] - base['rho']:+.4f}",
                f"{overlap:+.1%}", f"{rho:+.3f}",
            ]
        )  # fmt: skip
    return _pipes(["layers", "overlap", "rho", f"overlap, {PAPER_NAME}", "rho, paper"], rows)


def _readers(artifact: Artifact, readers: Sequence[str]) -> str:
    rows = [
        [
            name, ", ".join(artifact.readers[name].features.parts), str(artifact.readers[name].features.window),
            f"{artifact.readers[name].parameters:,}",
        ]
        for name in readers
    ]  # fmt: skip
    return _pipes(["reader", "sees", "window", "parameters"], rows)


def _pipes(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"

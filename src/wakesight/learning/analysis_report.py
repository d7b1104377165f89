"""The analysis as text: our numbers beside the paper's, which belong to its 27B model and its corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PAPER_NAME = "paper (its 27B model)"


def markdown(found: Mapping[str, Any]) -> str:
    """analysis.md; the paper's values stand in a column of their own."""
    blocks = [
        "# Native signals and utility\n",
        f"{found['documents']} documents. Correlations are rank correlations over the entries beyond the protected "
        "prefix, averaged over KV heads, documents and layers. The paper's numbers are those of its 27B model.\n",
        _pipes(["", "here", PAPER_NAME], _numbers(found)),
        "## Summary signals against utility\n",
        _summaries(found),
        "## By attention layer\n",
        _layers(found),
        "## Single cells of the window\n",
        _cells(found),
    ]
    if "transfer" in found:
        blocks += ["## The artifact's readers on these documents\n", _transfer(found["transfer"])]
    return "\n".join(blocks)


def _numbers(found: Mapping[str, Any]) -> list[list[str]]:
    life, slow, split, lifts = found["half_life"], found["slow_set"], found["variance"], found["decile_lifts"]
    order, writes = life["order_between_documents"], life["write_order_between_documents"]
    heads = slow["heads"]
    return [
        ["median half-life, tokens", f"{life['median']:.1f}", "about 24"],
        ["half-life order between documents, lowest .. highest", _range(order), "0.990 .. 0.997"],
        ["mean-write order between documents", _range(writes), "0.96 .. 0.99"],
        ["static against measured half-life", _signed(life["static_against_measured"]), "0.942"],
        ["half-life against mean write within a layer", _signed(life["against_mean_write_within_layers"]), "-0.66"],
        [f"slow heads (median of {slow['tokens']:g} tokens or more)", f"{slow['slow']} of {heads}", "293 of 2304"],
        ["a document's slow set against it, Jaccard", f"{slow['jaccard']:.2f}", "0.80"],
        [
            "heads slow in >= 95 %, in <= 5 %, between", f"{slow['always']}, {slow['never']}, {slow['between']}",
            "173, 1878, 253",
        ],
        ["variance of log write: head", f"{split['head']:.1%}", "71.7%"],
        ["variance of log write: token", f"{split['token']:.1%}", "10.2%"],
        ["best tenth by slow write in best tenth by utility", _times(lifts["top"]), "1.82x"],
        ["worst tenth by slow write in worst tenth by utility", _times(lifts["bottom"]), "1.92x"],
    ]  # fmt: skip


PAPER_SUMMARIES = {"write": "+0.10", "slow write": "+0.23", "forgetting": "+0.06 to +0.19", "retention": "-0.12"}


def _summaries(found: Mapping[str, Any]) -> str:
    corpora = sorted({corpus for one in found["summaries"].values() for corpus in one["corpora"]})
    rows = [
        [
            name, _signed(one["mean"]), PAPER_SUMMARIES.get(name, ""),
            *(_signed(one["corpora"].get(corpus)) for corpus in corpora),
        ]
        for name, one in found["summaries"].items()
    ]  # fmt: skip
    return _pipes(["signal", "mean", PAPER_NAME, *corpora], rows)


def _layers(found: Mapping[str, Any]) -> str:
    rows = [[name, *(_signed(x) for x in one["layers"])] for name, one in found["summaries"].items()]
    lifts = found["decile_lifts"]["layers"]
    rows += [[f"lift, {end}", *(_times(layer[end]) for layer in lifts)] for end in ("top", "bottom")]
    return _pipes(["signal", *(str(layer) for layer in found["attention_layers"])], rows)


def _cells(found: Mapping[str, Any]) -> str:
    rows = [
        [
            str(layer), str(one["cells"]), "-" if one["clear"] is None else f"{one['clear']:.0%}",
            _signed(one["largest"]), str(one["best_layer"]), "yes" if one["best_is_inside"] else "no",
        ]
        for layer, one in zip(found["attention_layers"], found["cells"]["layers"], strict=True)
    ]  # fmt: skip
    rows.append([PAPER_NAME, "288 x 3", "40% to 70%", "below +0.390", "", ""])
    columns = ["attention layer", "cells", "|rho| > 0.1", "largest |rho|", "best recurrent layer", "in the window"]
    return _pipes(columns, rows)


def _transfer(table: Mapping[str, Any]) -> str:
    rows = []
    for name, about in table["predictors"].items():
        if (mean := about["mean"]) is not None:
            rows.append([name, f"{mean['rho']:+.3f}", f"{mean['overlap']:.1%}", f"{mean['coverage']:.1%}"])
    k = f"{table['k_frac']:.0%}"
    return _pipes(["predictor", "rho", f"Ov@{k}", f"Cov@{k}"], rows)


def _range(order: Mapping[str, float]) -> str:
    return f"{order['min']:.3f} .. {order['max']:.3f}" if order else "-"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _pipes(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"

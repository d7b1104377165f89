"""Results of benchmarks/traces.py as Markdown: one row per regime and figure, models side by side, the paper's last.

The paper's figures are of its own models (3B, 1.5B and 8B) on its own texts, so they have a column of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wakesight.traces.study_report import NAMES, PAPER

Found = Mapping[str, Any]

REGIMES = ("niah", "recall", "reasoning")
# Source: WakeKV, results. Policies -> (its name for the comparison, wins of points, coverage)
COMPARED = (
    (("frozen",), "frozen, equal memory", "17 of 17", "5 combos"),
    (("evict",), "evict, equal budget", "19 of 20", "5 combos"),
    (("snapkv", "rkv", "reasonalloc"), "SnapKV, R-KV and ReasonAlloc, equal memory", "32 of 32", "4 combos"),
)  # fmt: skip
BOUNDS = ("belady",)  # knows the future, so that losing to it is no loss
CHURN = (
    ("adjacent Jaccard of active heads, binary", ("active", "binary", "jaccard"), ("binary", "either")),
    ("adjacent Jaccard, continuous", ("active", "continuous", "jaccard"), ("continuous",)),
    ("RCO of adjacent page sets", ("rco",), ()),
    ("heads with stability below 0.5", ("unstable",), ("unstable",)),
    ("heads with a drift event", ("drifting",), ("drifting",)),
)
BURSTS = {"z": "+9.7", 0.02: "0.54", 0.05: "0.86"}  # of the paper's reasoning runs


def markdown(found: Found) -> str:
    """All tables: what was recorded, churn, prediction, comparisons with every loss, miss rates."""
    return "\n\n".join([
        "# Traces of the bundled models", "## Recorded", recorded(found["churn"]), "## Churn", churn(found["churn"]),
        "## Prediction", prediction(found["predict"]), "## Reactive against the others", wins(found["simulate"]),
        losses(found["simulate"]["comparisons"]), "### With reactive's curve on more budgets",
        against(found["simulate"]["with_curve"]), losses(found["simulate"]["with_curve"]),
        "### Pruned every 8 steps, runs of at most 128 steps", against(found["simulate"]["short"]),
        losses(found["simulate"]["short"]), "## Miss rates", misses(found["simulate"]),
    ]) + "\n"  # fmt: skip


def evidence(found: Found) -> str:
    """What docs/evidence.md shows of them: all but the finer curve and the miss rates."""
    return "\n\n".join([
        recorded(found["churn"]), churn(found["churn"]), prediction(found["predict"]), wins(found["simulate"]),
        losses(found["simulate"]["comparisons"]), "Pruned every 8 steps, in regimes of at most 128 steps:",
        against(found["simulate"]["short"]), losses(found["simulate"]["short"]),
    ]) + "\n"  # fmt: skip


def recorded(found: Found) -> str:
    lines = []
    for combo, one in found["combos"].items():
        heads = f"{one['layers']} x {one['heads'] // one['layers']}"
        lines.append([combo, f"{one['runs']}", f"{one['steps']:,}", heads])
    return table(["model / regime", "traces", "decode steps", "layers x query heads"], lines)


def churn(found: Found) -> str:
    lines = []
    for regime, models in by_regime(found).items():
        for what, path, keys in CHURN:
            values = [value(picked(one, path)) if one else "-" for one in models.values()]
            lines.append([f"{regime}: {what}", *values, paper(regime, *keys)])
    return table(["", *names(found), "paper, its models"], lines)


def prediction(found: Found) -> str:
    lines = []
    for regime, models in by_regime(found).items():
        rows = [prediction_rows(one) for one in models.values()]
        theirs = [
            paper(regime, "events"), paper(regime, "best"), paper(regime, "best_f1"), paper(regime, "ensemble"), "",
            paper(regime, "markers"), paper(regime, "marker_f1"),
            *(BURSTS.values() if regime == "reasoning" else [""] * len(BURSTS)), *[""] * 2,
        ]  # fmt: skip
        for place, what in enumerate(PREDICTION):
            lines.append([f"{regime}: {what}", *(one[place] for one in rows), theirs[place]])
    return table(["", *names(found), "paper, its models"], lines)


PREDICTION = (
    "wake events", "best signal", "its F1 (precision, recall)", "ensemble, F1", "alarm at every step, F1",
    "token markers found of those tested", "markers on held-out halves, F1 (chance: precision)", "burstiness z",
    "coarse trigger at 2% of steps, recall", "at 5%, recall", "steps its windows cover at 2%", "at 5%",
)  # fmt: skip


def prediction_rows(one: Found | None) -> list[str]:
    """A cell for each of PREDICTION; the last two have no figure in the paper."""
    if one is None:
        return ["-"] * len(PREDICTION)
    best = one["best_signal"]
    marks, held, bursts = one["detectors"], one["markers"], one["bursts"]
    of_best = marks[best] if best else None
    reached = (
        f"{value(of_best['f1'], '.3f')} ({plain(of_best, 'precision')}, {plain(of_best, 'recall')})" if of_best else "-"
    )
    marker = f"{number(held['held_out']['f1'])} ({number(held['base_precision'])})" if held["found"] else "-"
    return [
        f"{one['events']:,}", NAMES[best] if best else "-", reached, value(marks["ensemble"]["f1"], ".3f"),
        value(marks["chance"]["f1"], ".3f"), f"{len(held['found'])} of {held['tested']}", marker,
        value(bursts["z"], "+.1f"), *(value(each["recall"]) for each in bursts["triggers"]),
        *(value(each["steps_covered"]) for each in bursts["triggers"]),
    ]  # fmt: skip


def wins(found: Found) -> str:
    """The paper's three comparisons, then every single one."""
    by_name = {one["other"]: one for one in found["comparisons"]}
    lines = []
    for others, what, theirs, coverage in COMPARED:
        ones = [by_name[other] for other in others if other in by_name]
        won, matched, points = (sum(one[key] for one in ones) for key in ("wins", "matched", "points"))
        count = len({point["combo"] for one in ones for point in one["matches"]})
        here = f"{matched} of {points}, {count} combo" + "s" * (count != 1)
        lines.append([what, f"{won} of {matched}", here, theirs, coverage])
    heads = ["reactive against", "points won", "points matched", "paper: won", "paper: coverage"]
    return table(heads, lines) + "\n\n" + against(found["comparisons"])


def against(comparisons: Sequence[Found]) -> str:
    if not comparisons:
        return "None."
    lines = []
    for one in comparisons:
        gap = {"value": one["difference"], "low": one["low"], "high": one["high"]}
        matched = f"{one['matched']} of {one['points']}"
        name = one["other"] + ", a bound" * (one["other"] in BOUNDS)
        lines.append([name, one["match"], f"{one['wins']} of {one['matched']}", matched, value(gap, "+.3f")])
    return table(["against", "equal", "won", "matched", "miss rate, reactive - other, mean over points"], lines)


def losses(comparisons: Sequence[Found]) -> str:
    """Every lost point, and every point that could not be matched, by policy. A bound is not lost against."""
    comparisons = [one for one in comparisons if one["other"] not in BOUNDS]
    lines = [
        [
            one["other"], point["combo"], str(point["budget"]), f"{point['memory']:,.0f}",
            f"{point['reactive']:.4f}", f"{point['other']:.4f}",
            value({"value": point["reactive"] - point["other"], "low": point["low"], "high": point["high"]}, "+.4f"),
        ]
        for one in comparisons
        for point in one["matches"]
        if not point["won"]
    ]  # fmt: skip
    text = "Lost: none."
    if lines:
        heads = ["lost against", "model / regime", "B", "resident pages", "reactive", "the other", "difference"]
        text = f"Every loss, {len(lines)} in all:\n\n" + table(heads, lines)
    left = [f"{one['other']}: {_listed(one['dropped'])}" for one in comparisons if one["dropped"]]
    return text + (
        "\n\nLeft out, since no budget of reactive reaches their memory: " + "; ".join(left) + "." if left else ""
    )


def _listed(dropped: Sequence[Sequence[Any]]) -> str:
    """[[combo, B], ...] -> "combo B=8,16; ..."."""
    budgets: dict[str, list[str]] = {}
    for combo, budget in dropped:
        budgets.setdefault(combo, []).append(str(budget))
    return ", ".join(f"{combo} at {'/'.join(sizes)}" for combo, sizes in budgets.items())


def misses(found: Found) -> str:
    """Miss rates at the budgets, one row per policy and combo; memory as a share of what full holds."""
    full = {row["combo"]: row["mean_resident_pages"] for row in found["rows"] if row["policy"] == "full"}
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in found["rows"]:
        if row["budget"] is not None:
            share = row["mean_resident_pages"] / full[row["combo"]]
            cells.setdefault((row["combo"], row["policy"]), {})[row["budget"]] = f"{row['miss_rate']:.3f} ({share:.0%})"
    lines = [[*key, *(row.get(size, "-") for size in found["budgets"])] for key, row in cells.items()]
    return table(["model / regime", "policy", *(f"B = {size}" for size in found["budgets"])], lines)


def names(found: Found) -> list[str]:
    return list(dict.fromkeys(combo.partition(" / ")[0] for combo in found["combos"]))


def by_regime(found: Found) -> dict[str, dict[str, Found | None]]:
    """Regime -> model -> its combo, None where it was not recorded."""
    regimes = dict.fromkeys([*REGIMES, *(combo.partition(" / ")[2] for combo in found["combos"])])
    table = {
        regime: {model: found["combos"].get(f"{model} / {regime}") for model in names(found)} for regime in regimes
    }
    return {regime: models for regime, models in table.items() if any(models.values())}


def paper(regime: str, *keys: str) -> str:
    """The paper's values of a regime, each with the combo it belongs to."""
    values = [
        f"{cells[key]} ({combo.partition(' / ')[0]})"
        for combo, cells in PAPER.get(regime, {}).items()
        for key in keys
        if key in cells
    ]  # fmt: skip
    return ", ".join(values)


def picked(one: Found, path: Sequence[str]) -> Found:
    for name in path:
        one = one[name]
    return one


def value(estimate: Found, how: str = ".2f") -> str:
    """ "0.71 [0.65, 0.79]"."""
    if estimate["value"] is None:
        return "-"
    low, high = estimate["low"], estimate["high"]
    return f"{estimate['value']:{how}}" + ("" if low is None else f" [{low:{how}}, {high:{how}}]")


def plain(marks: Found, name: str) -> str:
    return number(marks[name]["value"])


def number(given: float | None) -> str:
    return "-" if given is None else f"{given:.2f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

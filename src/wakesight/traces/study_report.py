"""Both studies as text: our numbers, and the paper's in columns of their own, which belong to its models and texts."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

Study = Mapping[str, Any]

# Source: WakeKV, its results and the notes behind them. Regime -> the paper's combos -> what it has.
PAPER: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "niah": {
        "3B / NIAH": {
            "binary": "0.71", "continuous": "0.45 to 0.57", "unstable": "0.064", "drifting": "0.63", "events": "236",
            "best": "entropy trend", "best_f1": "0.26", "ensemble": "0.18", "markers": "0",
        },
    },
    "recall": {
        "3B / multi-turn": {
            "either": "0.79", "unstable": "0.085", "drifting": "0.76", "events": "73", "best": "drift",
            "best_f1": "0.31", "best_precision": "0.20", "best_recall": "0.70", "ensemble": "0.17", "markers": "0",
        },
    },
    "reasoning": {
        "8B / CoT": {
            "either": "0.93", "unstable": "0.042", "drifting": "0.79", "events": "1,137",
            "best": "drift or page change", "best_f1": "0.10", "ensemble": "0.09", "markers": "4",
            "marker_precision": "0.48", "marker_recall": "0.89", "marker_f1": "0.62",
        },
        "1.5B / CoT": {
            "either": "0.82", "unstable": "0.023", "drifting": "0.85", "events": "407", "best": "drift",
            "best_f1": "0.14", "best_precision": "0.08", "best_recall": "0.41", "ensemble": "0.13", "markers": "1",
            "marker_precision": "0.43", "marker_recall": "0.68", "marker_f1": "0.53",
        },
    },
}  # fmt: skip
NAMES = {
    "page_change": "page-overlap change", "drift": "windowed-median drift", "entropy_trend": "entropy trend",
    "needle_delta": "needle-mass delta", "ensemble": "ensemble", "chance": "alarm at every step",
}  # fmt: skip
HEAD_COLUMNS = (
    "combo", "layer", "head", "stability", "rco", "drift_events", "active_binary", "active_continuous",
)  # fmt: skip


def churn_markdown(found: Study) -> str:
    """churn.md from `churn.study`."""
    rule = found["rule"]
    blocks = [
        "# How much heads change their minds\n",
        "Heads are (layer, query head). Active: copied at this step (binary), or a needle share above "
        f"{rule['active']:g} (continuous). Unstable: mean stability over chunks of {rule['chunk']} steps below "
        f"{rule['unstable']:g}. Drift: the median overlap with the baseline over {rule['drift']['window']} steps falls "
        f"below {rule['drift']['least']:g}. {_INTERVALS} Published adjacent Jaccard of other models: 0.28 to 0.51.\n",
    ]
    for name, one in found["combos"].items():
        blocks += [f"## {name}\n", _size(one), _table(name, _churn_rows(one))]
    return "\n".join(blocks)


def predict_markdown(found: Study) -> str:
    """predict.md from `predict.study`."""
    wake, alarm = found["rule"]["wake"], found["rule"]["alarm"]
    blocks = [
        "# Can a wake-up be seen coming?\n",
        f"A head wakes when its needle share exceeds {wake['high']:g} after at least {wake['quiet']} steps below "
        f"{wake['low']:g}. An alarm is a z-score above {alarm['z']:g} over the {alarm['past']} steps before; it is "
        f"true if the head wakes within {alarm['lead']} steps. {_INTERVALS} Raw global and oracle thresholds, and the "
        "coarse trigger, are chosen in hindsight: references, not predictors.\n",
    ]
    for name, one in found["combos"].items():
        blocks += [f"## {name}\n", _size(one), _table(name, _predict_rows(one)), "### Alarms\n", _detectors(one)]
        if one["markers"]["found"]:
            blocks += ["### Markers\n", _markers(one["markers"])]
    return "\n".join(blocks)


def heads_csv(found: Study) -> str:
    """heads.csv: one row per combo, layer and head."""
    file = io.StringIO()
    writer = csv.DictWriter(file, HEAD_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for combo, one in found["combos"].items():
        writer.writerows({"combo": combo, **row} for row in one["by_head"])
    return file.getvalue()


_INTERVALS = "Intervals are 95%, drawn over runs (none for a single run)."


def _size(one: Study) -> str:
    text = f"{one['runs']} runs, {one['steps']} steps, {one['layers']} layers, {one['heads']} heads"
    if one["steps_left_out"]:
        text += f"; {one['steps_left_out']} steps behind a gap in a trace are left out"
    return text + ".\n"


def _churn_rows(one: Study) -> list[tuple[str, str, str]]:
    """(what, here, the paper's key)."""
    active = one["active"]
    return [
        ("adjacent Jaccard of active heads, binary", _value(active["binary"]["jaccard"]), "binary"),
        ("adjacent Jaccard of active heads, continuous", _value(active["continuous"]["jaccard"]), "continuous"),
        ("adjacent Jaccard of active heads, kind not stated", "", "either"),
        ("active heads per step, binary", _value(active["binary"]["heads_per_step"]), ""),
        ("active heads per step, continuous", _value(active["continuous"]["heads_per_step"]), ""),
        ("steps skipped, both sets empty, binary", str(active["binary"]["steps_both_empty"]), ""),
        ("steps skipped, both sets empty, continuous", str(active["continuous"]["steps_both_empty"]), ""),
        ("RCO of adjacent page sets", _value(one["rco"]), ""),
        ("heads that are unstable", _value(one["unstable"]), "unstable"),
        ("heads with a drift event, mean over runs", _value(one["drifting"]), "drifting"),
        ("heads with a drift event in any run", f"{one['drifting_in_any_run']:.3f}", ""),
    ]


def _predict_rows(one: Study) -> list[tuple[str, str, str]]:
    best = one["best_signal"]
    reached = one["detectors"].get(best)
    held, bursts = one["markers"]["held_out"], one["bursts"]
    rows = [
        ("wake events", str(one["events"]), "events"),
        ("heads with one", str(one["heads_with_events"]), ""),
        ("steps too early for an alarm", f"{one['silent_steps']:.1%}", ""),
        ("best signal", NAMES[best] if best else "-", "best"),
        *((f"its {_mark(mark)}", _value(reached[mark]) if reached else "-", f"best_{mark}") for mark in _MARKS),
        ("ensemble, F1", _value(one["detectors"]["ensemble"]["f1"]), "ensemble"),
        ("token markers found", f"{len(one['markers']['found'])} of {one['markers']['tested']}", "markers"),
        *((f"markers on held-out halves, {_mark(mark)}", _plain(held[mark]), f"marker_{mark}") for mark in _MARKS),
        ("an alarm at every held-out step, precision", _plain(one["markers"]["base_precision"]), ""),
        ("burstiness z, mean over runs", _value(bursts["z"], "+.1f"), "bursts"),
        ("Fano factor, mean over runs", _value(bursts["fano"], ".2f"), ""),
    ]
    for trigger in bursts["triggers"]:
        fraction = f"{trigger['fraction']:.0%}"
        rows.append(
            (f"coarse trigger at {fraction} of steps, recall", _value(trigger["recall"]), f"trigger_{fraction}")
        )
        rows.append((f"steps that its windows cover, at {fraction}", _value(trigger["steps_covered"]), ""))
    return rows


_MARKS = ("precision", "recall", "f1")
# what the paper gives once, for its reasoning runs or without saying for which
_ANY = {"bursts": "+9.7", "trigger_2%": "0.54", "trigger_5%": "0.86"}


def _table(name: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """A column for every combo of the paper with the same regime; all of them where none has it."""
    regime = name.rpartition(" / ")[2]
    papers = PAPER.get(regime) or {combo: cells for group in PAPER.values() for combo, cells in group.items()}
    lines = []
    for what, here, key in rows:
        theirs = [cells.get(key, _ANY.get(key, "") if "CoT" in combo else "") for combo, cells in papers.items()]
        if here or any(theirs):
            lines.append([what, here, *theirs])
    return _pipes(["", "here", *(f"paper, {combo}" for combo in papers)], lines)


def _detectors(one: Study) -> str:
    rows = []
    for name, found in one["detectors"].items():
        after = [
            _plain(one["hindsight"][name][kind]["f1"]["value"]) if name in one["hindsight"] else "" for kind in _HIND
        ]
        rows.append([NAMES[name], f"{found['alarms']}", *(_value(found[mark]) for mark in _MARKS), *after])
    return _pipes(["signal", "alarms", "precision", "recall", "F1", "F1, raw global", "F1, oracle per head"], rows)


_HIND = ("raw_global", "oracle")


def _markers(found: Study) -> str:
    rows = [
        [
            str(one["token"]), str(one["count"]), f"{one['followed'] / one['count']:.2f}", f"{one['z']:+.1f}",
            f"{one['p']:.1e}",
        ]
        for one in found["found"]
    ]  # fmt: skip
    return _pipes(["token id", "count", f"followed by a wake-up (all: {found['base_rate']:.2f})", "z", "p"], rows)


def _mark(name: str) -> str:
    return "F1" if name == "f1" else name


def _value(estimate: Mapping[str, float | None], how: str = ".3f") -> str:
    """ "0.712 (0.650 to 0.790)"."""
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    if value is None:
        return "-"
    return f"{value:{how}}" + ("" if low is None else f" ({low:{how}} to {high:{how}})")


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _pipes(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"

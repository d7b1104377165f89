"""Attention logs of the bundled models in three regimes, and what they show beside the paper's figures.

    .venv/bin/python -m benchmarks.traces --out out/traces                       record what is missing, then measure
    .venv/bin/python -m benchmarks.traces record --out out/traces --model tiny-hybrid
    .venv/bin/python -m benchmarks.traces measure --out out/traces               of what is finished so far
    .venv/bin/python -m benchmarks.traces measure --out out/traces --docs docs   and put it into the documentation

record plays `wakesight trace record --resume` into OUT/MODEL-REGIME, the cheap recordings first; a stopped one goes on
where its last whole trace ended. measure writes OUT/results: traces-churn.json, traces-predict.json,
traces-simulate.json and traces.md, whose tables have the paper's figures in columns of their own. --docs DIR copies
these into DIR/results and puts the tables between the two marks of DIR/evidence.md. --quick makes one short trace of
each, into folders of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.traces_tables import evidence, markdown

from wakesight.cli.main import run
from wakesight.simulate.compare import Comparison, compare
from wakesight.simulate.costs import CostModel
from wakesight.simulate.sweep import Cell, Run, rows, sweep
from wakesight.traces import churn, page_sets, predict
from wakesight.traces.pages import wants_of
from wakesight.traces.schema import Trace
from wakesight.traces.store import load_traces

MODELS = ("tiny-hybrid", "smollm2")
BUDGETS = (8, 16, 32, 64)  # pages per query head. Source: WakeKV, comparisons (8 and 64 are named)
CURVE = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of reactive alone, to interpolate on
POLICIES = (
    "full", "reactive", "evict", "frozen", "frozen_tail", "snapkv", "rkv", "reasonalloc", "belady", "arc",
    "reactive:keydiff", "reactive:snapkv",
)  # fmt: skip
# 128 steps end before the first pruning of these two; the paper changes them for its short answers and leaves them out
SHORT = ("rkv:buffer=8", "reasonalloc:interval=8")
PRUNED_AFTER = 128
DIGITS = 5
MARKS = ("<!-- traces: begin -->", "<!-- traces: end -->")  # what stands between them in evidence.md is made


@dataclass(frozen=True)
class Recording:
    """One `trace record`. arguments: as typed; quick: in their place with --quick. cost: CPU minutes, about."""

    model: str
    regime: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...]
    cost: float

    def folder(self, quick: bool) -> str:
        return f"{self.model}-{self.regime}" + ("-quick" if quick else "")

    def words(self, out: Path, quick: bool) -> list[str]:
        asked = self.quick if quick else self.arguments
        return [
            "trace", "record", "--model", self.model, "--regime", self.regime, *asked, "--resume", "--out",
            str(out / self.folder(quick)),
        ]  # fmt: skip


def _short(length: int, *more: str) -> tuple[str, ...]:
    """128 tokens whatever the answer: shorter ones hold no chunk of 16 steps, and no 32 steps before an alarm."""
    return ("--length", str(length), "--new-tokens", "128", "--past-end", *more)


def _quick(length: int = 0) -> tuple[str, ...]:
    shorter = ("--length", str(length)) if length else ()
    return (*shorter, "--seeds", "1", "--new-tokens", "48", "--past-end")


RECORDINGS = (
    Recording("tiny-hybrid", "niah", _short(2048, "--seeds", "3"), (*_quick(320), "--depths", "0.5"), 1),
    Recording("tiny-hybrid", "recall", _short(2048, "--seeds", "8"), _quick(320), 1),
    Recording(
        "tiny-hybrid", "reasoning", ("--seeds", "12", "--new-tokens", "512", "--past-end"), _quick(), 4
    ),
    Recording("smollm2", "niah", _short(5000, "--seeds", "3"), (*_quick(640), "--depths", "0.5"), 6),
    Recording("smollm2", "recall", _short(2048, "--seeds", "8"), _quick(640), 4),
    Recording("smollm2", "reasoning", ("--seeds", "12", "--new-tokens", "2048"), _quick(), 60),
)  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=("all", "record", "measure"), default="all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=("all", *MODELS), default="all")
    parser.add_argument("--regime", choices=("all", *dict.fromkeys(each.regime for each in RECORDINGS)), default="all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--docs", type=Path, default=None)
    given = parser.parse_args(words)
    chosen = [
        each for each in RECORDINGS if given.model in ("all", each.model) and given.regime in ("all", each.regime)
    ]  # fmt: skip
    failed = 0 if given.step == "measure" else record(chosen, given.out, given.quick)
    if given.step != "record":
        found = measure([given.out / each.folder(given.quick) for each in chosen], given.out / "results")
        if given.docs is not None:
            document(found, given.out / "results", given.docs)
    return 1 if failed else 0


def record(recordings: Sequence[Recording], out: Path, quick: bool) -> int:
    """Every recording, one after the other; how many failed. What failed was said on stderr."""
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for each in recordings:
        words, start, cpu = each.words(out, quick), time.perf_counter(), time.process_time()
        print(f"wakesight {' '.join(words)}", flush=True)
        failed += run(words) != 0
        print(f"{time.perf_counter() - start:.0f} s, of a core {time.process_time() - cpu:.0f} s", flush=True)
    return failed


def measure(folders: Sequence[Path], results: Path) -> dict[str, Any]:
    """Churn, prediction and simulated policies of the finished traces, as files in `results`. Prints the tables."""
    sources = [folder for folder in folders if any(True for _ in finished([folder]))]
    if not sources:
        raise SystemExit("no trace is finished yet; record some with: python -m benchmarks.traces record --out DIR")
    combos = page_sets.by_combo(finished(sources))
    found = {"churn": without(churn.study(combos), "by_head", "by_run"), "predict": without(predict.study(combos))}
    del combos
    found["simulate"] = simulated(sources)
    texts = {f"traces-{name}.json": _json(one) for name, one in found.items()}
    texts["traces.md"] = markdown(found)
    results.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write(results / name, text)
    print(texts["traces.md"])
    return found


def document(found: Mapping[str, Any], results: Path, docs: Path) -> None:
    """Results into the documentation: whole files into docs/results, tables between the marks of docs/evidence.md."""
    page = docs / "evidence.md"
    before, begin, rest = page.read_text().partition(MARKS[0])
    _, end, behind = rest.partition(MARKS[1])
    if not (begin and end):
        raise SystemExit(f"{page} has no place for the tables; put the lines {MARKS[0]} and {MARKS[1]} into it")
    (docs / "results").mkdir(exist_ok=True)
    for file in sorted(results.glob("traces*")):
        write(docs / "results" / file.name, file.read_text())
    write(page, f"{before}{begin}\n\n{evidence(rounded(found))}\n{end}{behind}")


def finished(folders: Sequence[Path]) -> Iterator[Trace]:
    """The whole traces of recordings; what is still being written is passed over."""
    for folder in folders:
        if not (folder / "zarr.json").is_file():
            continue
        traces = load_traces(folder)
        yield from (traces[name] for name in traces.names if traces.finished(name))


def without(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A study without tables of single heads, and without the place of every event."""
    combos = {
        combo: {
            key: [{name: part for name, part in run.items() if name != "events_at"} for run in value]
            if key == "by_run"
            else value
            for key, value in one.items()
            if key not in names
        }
        for combo, one in found["combos"].items()
    }
    return {**found, "combos": combos}


def simulated(folders: Sequence[Path]) -> dict[str, Any]:
    """Every policy and budget on every combo, and reactive against the others.

    comparisons: reactive's curve has the budgets of the sweep only, as in the paper; with_curve: all of CURVE.
    """
    cells: list[Cell] = []
    further: list[Cell] = []
    about = []
    for folder in folders:
        runs = [wanted(trace) for trace in finished([folder])]
        short = all(one.wants.steps <= PRUNED_AFTER for one in runs)
        cells += sweep(runs, (*POLICIES, *(SHORT if short else ())), BUDGETS)
        further += sweep(runs, ["reactive"], CURVE)
        about += [
            {"combo": one.combo, "run": one.name, "steps": one.wants.steps, "prompt_pages": one.wants.prompt_pages}
            for one in runs
        ]
    others = [cell for cell in cells if cell.policy not in SHORT]
    short_cells = [cell for cell in cells if cell.policy in ("reactive", *SHORT)]
    short_combos = {cell.combo for cell in cells if cell.policy in SHORT}
    return {
        "unit": "query_head",
        "page_size": 16,
        "budgets": list(BUDGETS),
        "curve": list(CURVE),
        "runs": about,
        "rows": [{"combo": cells[0].combo, **row} for row in rows(cells, CostModel())],
        "comparisons": [described(one) for one in compare(others)],
        "with_curve": [described(one) for one in compare(others, further)],
        "short": [described(one) for one in compare([cell for cell in short_cells if cell.combo in short_combos])]
        if short_combos
        else [],
    }


def wanted(trace: Trace) -> Run:
    combo = f"{trace.meta['model']} / {trace.meta['regime']}"
    return Run(trace.name, combo, wants_of(trace), trace.prompt_mass is not None)


def described(one: Comparison) -> dict[str, Any]:
    """A comparison as plain values; points by combo and budget, the lost ones marked."""
    points = [{**vars(point), "won": point.won} for point in one.points]
    return {
        "other": one.other, "match": one.match, "wins": one.wins, "matched": len(points),
        "points": len(points) + len(one.dropped), "combos": one.combos, "difference": one.difference, "low": one.low,
        "high": one.high, "dropped": [list(each) for each in one.dropped], "matches": points,
    }  # fmt: skip


def _json(found: Mapping[str, Any]) -> str:
    return json.dumps(rounded(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def rounded(value: Any) -> Any:
    """Floats to DIGITS digits behind the point, at any depth."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def write(path: Path, text: str) -> None:
    """Under a temporary name, then renamed: a reader never sees half a file."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(text)
    os.replace(scratch, path)


if __name__ == "__main__":
    sys.exit(main())

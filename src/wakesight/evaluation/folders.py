"""Finish a run folder, and join the folders of a run that was split into shards."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.records import Records, canonical, locked, read_json, unit, write_json
from wakesight.evaluation.summary import summarise

PER_SHARD = ("shard",)  # arguments in which the shards of one run differ


def finish(folder: Path) -> dict[str, Any]:
    """Write summary.json from the folder's rows; returns it."""
    config = read_json(folder / "config.json")
    summary = summarise(Records(folder).read(), seed=config["arguments"].get("seed", 0))
    write_json(folder / "summary.json", summary)
    return summary


def merge(shards: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Join the shards of one run into a new folder; returns its summary, the same as an unsplit run's.

    Raises RequestError if the folders are not shards of one run, overlap, or if `folder` holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(f"{folder} is not empty; give a new folder with --out")
    configs = [read_json(shard / "config.json") for shard in shards]
    plans = [{k: v for k, v in config["arguments"].items() if k not in PER_SHARD} for config in configs]
    for shard, plan in zip(shards, plans, strict=True):
        if plan != plans[0]:
            name = next(key for key in sorted({*plan, *plans[0]}) if plan.get(key) != plans[0].get(key))
            raise RequestError(
                f"{shards[0]} and {shard} are no shards of one run: {name} is {plans[0].get(name)!r} in the one and "
                f"{plan.get(name)!r} in the other"
            )
    rows = [row for shard in shards for row in Records(shard).read()]
    arms_of: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        seen = arms_of.setdefault(unit(row), set())
        if row["arm"] in seen:
            raise RequestError(f"the shards overlap: {row['context']} occurs twice; give each shard once")
        seen.add(row["arm"])
    with locked(folder):
        write_json(folder / "config.json", {**configs[0], "arguments": {**plans[0], "shard": None}})
        Records(folder).append(canonical(rows))
        (folder / "contexts").mkdir(exist_ok=True)
        for shard in shards:
            for file in sorted((shard / "contexts").glob("*.json")):
                shutil.copyfile(file, folder / "contexts" / file.name)
        return finish(folder)

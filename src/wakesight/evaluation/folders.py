"""Finish a run folder, and join the folders of a run that was split into shards."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.config import FREE, arguments_of, first_difference, unsharded
from wakesight.evaluation.records import Records, Row, canonical, complete, locked, read_json, unit, write_json
from wakesight.evaluation.summary import summarise


def finish(folder: Path) -> dict[str, Any]:
    """Write summary.json from the folder's rows; returns it."""
    summary = summarise(Records(folder).read(), arguments_of(read_json(folder / "config.json")))
    write_json(folder / "summary.json", summary)
    return summary


def merge(shards: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Join the shards of one run into a new folder; returns its summary, the same as an unsplit run's.

    Raises RequestError if the folders are not shards of one run, overlap, or are not all there, if one of them is
    still to be resumed in the middle of a question, or if `folder` holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(f"{folder} is not empty; give a new folder with --out")
    configs = [read_json(shard / "config.json") for shard in shards]
    for shard, config in zip(shards, configs, strict=True):
        if changed := first_difference(configs[0], config, (*FREE, "shard")):
            name, first, other = changed
            raise RequestError(
                f"{shards[0]} and {shard} are no shards of one run: {name} is {first!r} in the one and {other!r} in "
                "the other"
            )
    rows = [row for shard in shards for row in _whole_rows(shard)]
    arms_of: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        seen = arms_of.setdefault(unit(row), set())
        if row["arm"] in seen:
            raise RequestError(f"the shards overlap: {row['context']} occurs twice; give each shard once")
        seen.add(row["arm"])
    _check_all_there([str(arguments_of(config).get("shard") or "") for config in configs])
    with locked(folder):
        write_json(folder / "config.json", unsharded(configs[0]))
        Records(folder).append(canonical(rows))
        (folder / "contexts").mkdir(exist_ok=True)
        for shard in shards:
            for file in sorted((shard / "contexts").glob("*.json")):
                shutil.copyfile(file, folder / "contexts" / file.name)
        return finish(folder)


def _whole_rows(shard: Path) -> list[Row]:
    rows = Records(shard).read()
    if len(complete(rows)) < len(rows):
        raise RequestError(f"{shard} stopped in the middle of a question; finish it with wakesight eval --resume")
    return rows


def _check_all_there(names: Sequence[str]) -> None:
    """names: "i/n" each, as the shards were told."""
    parts = [re.fullmatch(r"(\d+)/(\d+)", name) for name in names]
    given = {(int(part[1]), int(part[2])) for part in parts if part}
    for count in {count for _, count in given}:
        if gone := [index for index in range(count) if (index, count) not in given]:
            raise RequestError(f"shard {gone[0]}/{count} is not among the folders; give all {count} of them")

"""Finish a run folder, and join the folders of a run that was split into shards."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.config import (
    FREE,
    NAME,
    arguments_of,
    changed_input,
    first_difference,
    planned_questions,
    read_config,
    unsharded,
)
from wakesight.evaluation.records import (
    LOCK,
    Records,
    Row,
    at_rest,
    canonical,
    check_folder,
    complete,
    locked,
    read_json,
    unit,
    write_json,
    writing,
)
from wakesight.evaluation.summary import summarise

SUMMARY = "summary.json"


def finish(folder: Path) -> dict[str, Any]:
    """Write summary.json from the folder's rows; returns it."""
    summary = summarise(Records(folder).read(), arguments_of(read_config(folder)))
    write_json(folder / SUMMARY, summary)
    return summary


def merge(shards: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Join the shards of one run into a new folder; returns its summary, the same as an unsplit run's.

    Raises RequestError if the folders are not shards of one run, overlap, or are not all there, if one of them is
    not finished or still being written, or if `folder` holds something; WorkError if the disk is full.
    """
    check_folder(folder)
    if folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
        raise RequestError(f"{folder} is not empty; give a new folder with --out")
    with contextlib.ExitStack() as resting:
        for shard in shards:
            resting.enter_context(at_rest(shard))
        return _merged(shards, folder)


def _merged(shards: Sequence[Path], folder: Path) -> dict[str, Any]:
    configs = [read_config(shard) for shard in shards]
    for shard, config in zip(shards, configs, strict=True):
        if changed := first_difference(configs[0], config, (*FREE, "shard")):
            name, first, other = changed
            raise RequestError(
                f"{shards[0]} and {shard} are no shards of one run: {name} is {first!r} in the one and {other!r} in "
                "the other"
            )
        if between := changed_input(configs[0], config):
            raise RequestError(
                f"{shards[0]} and {shard} are no shards of one run: {between}; run one of them again with what the "
                "other was run with"
            )
    rows = [row for shard, config in zip(shards, configs, strict=True) for row in _whole_rows(shard, config)]
    arms_of: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        seen = arms_of.setdefault(unit(row), set())
        if row["arm"] in seen:
            raise RequestError(f"the shards overlap: {row['context']} occurs twice; give each shard once")
        seen.add(row["arm"])
    _check_all_there([str(arguments_of(config).get("shard") or "") for config in configs])
    with locked(folder):
        write_json(folder / NAME, unsharded(configs[0], len({unit(row) for row in rows})))
        Records(folder).append(canonical(rows))
        with writing(folder):
            (folder / "contexts").mkdir(exist_ok=True)
            for shard in shards:
                for file in sorted((shard / "contexts").glob("*.json")):
                    shutil.copyfile(file, folder / "contexts" / file.name)
        return finish(folder)


def _whole_rows(shard: Path, config: dict[str, Any]) -> list[Row]:
    rows = Records(shard).read()
    if len(complete(rows)) < len(rows):
        raise RequestError(f"{shard} stopped in the middle of a question; finish it with wakesight eval --resume")
    asked, planned = len({unit(row) for row in rows}), planned_questions(config)
    if planned is None and _summarised(shard) != asked:  # of an older version: its end wrote a summary of these rows
        raise RequestError(f"{shard} was not finished; finish it with wakesight eval --resume")
    if planned is not None and asked != planned:
        raise RequestError(f"{shard} has {asked} of {planned} questions; finish it with wakesight eval --resume")
    return rows


def _summarised(shard: Path) -> int | None:
    """Questions that the summary in a folder is of; None without one."""
    if not (shard / SUMMARY).exists():
        return None
    found = read_json(shard / SUMMARY)
    return found.get("questions") if isinstance(found, dict) else None


def _check_all_there(names: Sequence[str]) -> None:
    """names: "i/n" each, as the shards were told."""
    parts = [re.fullmatch(r"(\d+)/(\d+)", name) for name in names]
    given = {(int(part[1]), int(part[2])) for part in parts if part}
    for count in {count for _, count in given}:
        if gone := [index for index in range(count) if (index, count) not in given]:
            raise RequestError(f"shard {gone[0]}/{count} is not among the folders; give all {count} of them")

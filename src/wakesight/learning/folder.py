"""A label folder on disk: who may write it, what it was asked for, and which documents could not be run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError

OURS = ("labels.json", "labels", "skipped.jsonl")


def make_folder(folder: Path) -> None:
    """With its parents. Raises RequestError where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"the folder {folder} cannot be made ({error.strerror or error}); give another one with --out"
        ) from None


def check_target(folder: Path) -> None:
    """RequestError if labels written into `folder` would mix with something else."""
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; labels are a folder, give another name with --out")
    if not folder.is_dir() or (folder / "labels.json").exists():
        return
    foreign = sorted(one.name for one in folder.iterdir() if one.name not in OURS and not one.name.startswith(".lock"))
    if foreign:
        raise RequestError(f"{folder} holds other files ({foreign[0]}) and no labels; give a new folder with --out")


@contextlib.contextmanager
def locked(folder: Path, shard: tuple[int, int]) -> Iterator[None]:
    """One writer per document: a whole run alone, or shards side by side, each of them once.

    Raises RequestError while another process writes the same documents.
    """
    index, count = shard
    with contextlib.ExitStack() as stack:
        whole = _lock(folder / ".lock", fcntl.LOCK_EX if count == 1 else fcntl.LOCK_SH, stack)
        if not (whole and (count == 1 or _lock(folder / f".lock-{index}-of-{count}", fcntl.LOCK_EX, stack))):
            raise RequestError(
                f"another process is labelling into {folder}; wait for it, or give another folder with --out"
            )
        if count == 1:  # nobody else is here: what a killed run was writing can go
            for scratch in (folder / "labels").glob(".*.tmp"):
                scratch.unlink()
        yield


def _lock(path: Path, kind: int, stack: contextlib.ExitStack) -> bool:
    file = stack.enter_context(path.open("w"))
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def open_folder(folder: Path, asked: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write labels.json, or check that the one there was asked for the same. about: written, not compared.

    What an older version did not write down cannot be compared. Raises RequestError naming what differs.
    """
    path = folder / "labels.json"
    if not path.exists():
        write_json(path, {"asked": dict(asked), **about})
        return
    try:
        before = dict(json.loads(path.read_text("utf-8"))["asked"])
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{path} is damaged and cannot be read; give another folder with --out") from None
    now = json.loads(json.dumps(dict(asked)))
    for name in sorted(before):
        if before.get(name) != now.get(name):
            raise RequestError(
                f"{folder} holds labels with {name}={before.get(name)!r}, and now {name}={now.get(name)!r} was asked "
                "for; resume with the same arguments, or give another folder"
            )


def write_json(path: Path, value: Any) -> None:
    """Plain JSON with sorted keys, under a temporary name and renamed."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def record_skipped(folder: Path, document: str, corpus: str, reason: str) -> None:
    """One line of skipped.jsonl, unless the very line is there already; shards may write at the same time."""
    line = json.dumps({"id": document, "corpus": corpus, "reason": reason}, sort_keys=True, ensure_ascii=False) + "\n"
    with open(folder / "skipped.jsonl", "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if line not in file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

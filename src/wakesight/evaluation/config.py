"""What a run was asked for, as its config.json holds it: {"given", "defaults", versions, commit, machine, "inputs",
"planned_questions"}.

`given` are the arguments that somebody typed or wrote into a recipe, `defaults` the others. Folders of older
versions hold all of them under "arguments". `inputs` are digests of what the arguments only name: {"model",
"artifact", "data": {file: sha256}, "items"}. `planned_questions` is how many questions the run, or this shard of it,
has when it is finished. Folders of older versions have neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.records import read_json

NAME = "config.json"
PLANNED = "planned_questions"
FREE = ("rows", "chunk", "device")  # how the work is cut up: a resumed run or another shard may choose otherwise


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a run folder. Raises RequestError for a missing or damaged one."""
    found = read_json(folder / NAME)
    if isinstance(found, dict):
        parts = [found.get(name) for name in (("arguments",) if "arguments" in found else ("given", "defaults"))]
        if all(isinstance(part, dict) for part in parts):
            return found
    raise RequestError(
        f"{folder / NAME} is damaged: it does not say what the run was asked for; run the evaluation again"
    )


def planned_questions(config: Mapping[str, Any]) -> int | None:
    """Questions of the finished run, or of this shard; None in a folder of an older version."""
    found = config.get(PLANNED)
    return found if isinstance(found, int) else None


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of a run. Raises KeyError or TypeError for what is no config.json."""
    if "arguments" in config:
        return dict(config["arguments"])
    return {**config["defaults"], **config["given"]}


def first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], ignoring: Collection[str] = FREE
) -> tuple[str, Any, Any] | None:
    """(name, before, now) of an argument in which two configs differ; None if there is none.

    An argument that one of them does not know has the other's default: it was not there to be chosen.
    """
    old, new = arguments_of(before), arguments_of(now)
    for name in sorted({*old, *new}):
        if name in ignoring:
            continue
        a = old[name] if name in old else now.get("defaults", {}).get(name)
        b = new[name] if name in new else before.get("defaults", {}).get(name)
        if a != b:
            return name, a, b
    return None


def changed_input(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What two runs of the same arguments did not have in common, in words; None if there is nothing.

    What one of them does not tell, a run of an older version, is not compared.
    """
    versions = [config.get("versions", {}).get("wakesight") for config in (before, now)]
    if None not in versions and versions[0] != versions[1]:
        return f"wakesight was {versions[0]} and is {versions[1]}"
    old, new = (config.get("inputs", {}) for config in (before, now))
    for name, what in (("model", "the model's weights"), ("artifact", "the model's artifact")):
        if name in old and name in new and old[name] != new[name]:
            return f"{what} changed ({_short(old[name])}, then {_short(new[name])})"
    if "data" in old and "data" in new:
        for name in sorted({*old["data"], *new["data"]}):
            a, b = old["data"].get(name), new["data"].get(name)
            if a != b:
                return f"the data file {name} changed (sha256 {_short(a)}, then {_short(b)})"
    if "items" in old and "items" in new and old["items"] != new["items"]:
        return "the items made for the same arguments changed, as another version of a package or of Python makes them"
    return None


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def unsharded(config: Mapping[str, Any], questions: int | None = None) -> dict[str, Any]:
    """The config of the whole run that a shard is a part of. questions: of all shards together."""
    whole = dict(config)
    if questions is not None:
        whole[PLANNED] = questions
    if "arguments" in config:
        whole["arguments"] = {**config["arguments"], "shard": None}
        return whole
    whole["given"] = {name: value for name, value in config["given"].items() if name != "shard"}
    whole["defaults"] = {**config["defaults"], "shard": None}
    return whole

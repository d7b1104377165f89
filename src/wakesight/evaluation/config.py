"""What a run was asked for, as its config.json holds it: {"given", "defaults", versions, commit, machine}.

`given` are the arguments that somebody typed or wrote into a recipe, `defaults` the others. Folders of older
versions hold all of them under "arguments".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

FREE = ("rows", "chunk", "device")  # how the work is cut up: a resumed run or another shard may choose otherwise


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


def unsharded(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the whole run that a shard is a part of."""
    whole = dict(config)
    if "arguments" in config:
        whole["arguments"] = {**config["arguments"], "shard": None}
        return whole
    whole["given"] = {name: value for name, value in config["given"].items() if name != "shard"}
    whole["defaults"] = {**config["defaults"], "shard": None}
    return whole

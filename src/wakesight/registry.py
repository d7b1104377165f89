"""Method tables: a name leads to a frozen dataclass, imported only when asked for.

`"snapkv"` gives the defaults; `"snapkv:window=16,pooling=avg"` sets fields. The same text is what
`spec_of` writes into run records, so a recipe round-trips through plain strings.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import typing
from collections.abc import Mapping
from typing import Any

from wakesight.errors import RequestError


def resolve(spec: str, table: Mapping[str, str], kind: str, entry_points: str | None = None) -> Any:
    """Build the method that `spec` names.

    table: name -> "module:Class". entry_points: a group in which plug-ins may add names.
    Raises RequestError for an unknown name ("did you mean"), an unknown field or a value of the wrong type.
    """
    name, _, settings = spec.partition(":")
    targets = dict(_plugins(entry_points)) if entry_points else {}
    targets.update(table)  # a plug-in cannot replace a built-in name
    if name not in targets:
        raise RequestError(f"unknown {kind} {name!r}{did_you_mean(name, targets)}; known: {', '.join(sorted(targets))}")
    module, _, attribute = targets[name].partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    return cls(**_fields(cls, settings, f"{kind} {name!r}"))


def spec_of(method: object, name: str) -> str:
    """The text that `resolve` turns back into `method`: its name and every field that is not the default."""
    changed = [
        f"{f.name}={getattr(method, f.name)}"
        for f in dataclasses.fields(typing.cast(Any, method))
        if getattr(method, f.name) != f.default
    ]
    return name + (":" + ",".join(changed) if changed else "")


def name_of(method: object, table: Mapping[str, str], entry_points: str | None = None) -> str | None:
    """The table's name for the class of `method`, or None for a class no table knows."""
    target = f"{type(method).__module__}:{type(method).__qualname__}"
    names = {**(dict(_plugins(entry_points)) if entry_points else {}), **table}
    return next((name for name, known in names.items() if known == target), None)


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the closest known word, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def _plugins(group: str) -> list[tuple[str, str]]:
    return [(point.name, point.value) for point in importlib.metadata.entry_points(group=group)]


def _fields(cls: Any, settings: str, what: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or key not in known:
            options = ", ".join(known) or "none"
            raise RequestError(f"{what} has no setting {setting!r}{did_you_mean(key, known)}; settings: {options}")
        values[key] = _parse(text.strip(), known[key], f"{what} setting {key!r}")
    return values


def _parse(text: str, hint: Any, what: str) -> Any:
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if text in choices:
            return text
        raise RequestError(f"{what} is {text!r}; it takes one of {', '.join(choices)}")
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise RequestError(f"{what} is {text!r}; it takes true or false")
    try:
        return hint(text)
    except (TypeError, ValueError):
        raise RequestError(f"{what} is {text!r}; it takes a value of type {hint.__name__}") from None

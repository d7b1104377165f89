"""Method tables: a name leads to a frozen dataclass, imported only when asked for.

`"snapkv"` gives the defaults; `"snapkv:window=16,pooling=avg"` sets fields. The same text is what
`spec_of` writes into run records, so a recipe round-trips through plain strings.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import typing
from collections.abc import Callable, Mapping
from typing import Any

from wakesight.errors import RequestError


def resolve(spec: str, table: Mapping[str, str], kind: str, entry_points: str | None = None) -> Any:
    """Build the method that `spec` names.

    table: name -> "module:Class". entry_points: a group in which plug-ins may add names.
    Raises RequestError for an unknown name ("did you mean"), an unknown field, one that is given twice, a missing
    value or one of the wrong type, or a plug-in that cannot be loaded.
    """
    name, _, settings = spec.partition(":")
    plugins = _plugins(entry_points)
    known = {*plugins, *table}
    if name not in known:
        raise RequestError(f"unknown {kind} {name!r}{did_you_mean(name, known)}; known: {', '.join(sorted(known))}")
    # a plug-in cannot replace a built-in name
    cls = _built_in(table[name]) if name in table else _plugged_in(plugins[name], kind)
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
    """The table's name for the class of `method`, or None for a class no table knows.

    A plug-in may name its class by any module that exports it; it is imported to compare only if both
    share their top-level package.
    """
    cls = type(method)
    target = f"{cls.__module__}:{cls.__qualname__}"
    if name := next((name for name, known in table.items() if known == target), None):
        return name
    points = [point for name, point in _plugins(entry_points).items() if name not in table]
    return next((point.name for point in points if _leads_to(point, cls, target)), None)


def read_names(text: str) -> list[str]:
    """Comma-separated names; settings of a method keep their commas ("snapkv:window=16,kernel=5")."""
    names: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if names and "=" in part and ":" not in part:
            names[-1] += "," + part
        else:
            names.append(part)
    return names


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the closest known word, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def _built_in(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _plugged_in(point: importlib.metadata.EntryPoint, kind: str) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"the {kind} {point.name!r} comes from a plug-in that cannot be loaded from {point.value!r} ({error}); "
            f"reinstall that plug-in, or name another {kind}"
        ) from error


def _leads_to(point: importlib.metadata.EntryPoint, cls: type, target: str) -> bool:
    if point.value == target:
        return True
    if point.module.partition(".")[0] != cls.__module__.partition(".")[0]:
        return False
    try:
        return point.load() is cls
    except (ImportError, AttributeError):
        return False  # a broken neighbour is reported when somebody asks for it


def _plugins(group: str | None) -> dict[str, importlib.metadata.EntryPoint]:
    return _scan(group, importlib.metadata.entry_points) if group else {}


@functools.cache
def _scan(group: str, entry_points: Callable[..., Any]) -> dict[str, importlib.metadata.EntryPoint]:
    """Plug-ins by name. Reading every installed package's metadata takes milliseconds, so it is done once.

    entry_points: where to look, part of the key: a test that replaces it sees its own plug-ins.
    """
    return {point.name: point for point in entry_points(group=group)}


def _fields(cls: Any, settings: str, what: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, equals, text = setting.partition("=")
        key = key.strip()
        if key not in known:
            options = ", ".join(known) or "none"
            raise RequestError(f"{what} has no setting {key!r}{did_you_mean(key, known)}; settings: {options}")
        if not equals:
            raise RequestError(f"{what} setting {key!r} has no value; write {key}={getattr(cls, key, '...')}")
        if key in values:
            raise RequestError(f"{what} setting {key!r} is given twice; give it once")
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

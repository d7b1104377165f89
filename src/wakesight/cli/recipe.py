"""A file in place of flags: YAML or JSON, and the config.json of any run."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from wakesight.cli.common import read_text
from wakesight.errors import RequestError
from wakesight.registry import did_you_mean

GIVEN = "wakesight.recipe.given"  # in a click context: names that the recipe says were given


@dataclass(frozen=True)
class Recipe:
    """values: by name. given: those that somebody chose; a run's config.json holds its defaults besides."""

    values: dict[str, Any]
    given: frozenset[str]


def recipe_option(command: Any) -> Any:
    """--recipe: what stands in the file takes the place of flags; flags on the command line win."""
    return click.option(
        "--recipe", is_eager=True, expose_value=False, callback=_take,
        help="YAML or JSON file with any of these options by name (and suite); or the config.json of a run.",
    )(command)  # fmt: skip


def given(context: click.Context) -> set[str]:
    """Names of the arguments that were typed or that the recipe gave."""
    typed = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    named: frozenset[str] = context.meta.get(GIVEN, frozenset())
    return typed | set(named)


def read_recipe(path: str) -> Recipe:
    """Raises RequestError for a missing or damaged file, or one that is no mapping of names."""
    found = _parsed(path, read_text(path, "recipe"))
    if not isinstance(found, dict):
        raise RequestError(f"the recipe {path} is no mapping; write lines like 'model: smollm2'")
    chosen, usual = found.get("given"), found.get("defaults")
    if isinstance(chosen, dict) and isinstance(usual, dict):
        return Recipe({**usual, **chosen}, frozenset(chosen))
    if isinstance(found.get("arguments"), dict):  # the config.json of an older run
        return Recipe(found["arguments"], frozenset(found["arguments"]))
    return Recipe(found, frozenset(map(str, found)))


def _parsed(path: str, text: str) -> Any:
    if Path(path).suffix == ".json" or text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=functools.partial(_once, path))
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(f"the recipe {path} is no JSON: {error}") from None
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise RequestError(
            f"the recipe {path} is YAML, which needs pyyaml; type: pip install pyyaml, or write the recipe as JSON"
        ) from None
    try:
        return yaml.load(text, _loader(yaml, path))
    except yaml.YAMLError as error:
        raise RequestError(f"the recipe {path} is no YAML: {' '.join(str(error).split())}") from None


def _once(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Pairs as a mapping. Raises RequestError for a name that is there twice: the last one must not win in silence."""
    names = [name for name, _ in pairs]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise _twice(path, repeated)
    return dict(pairs)


def _twice(path: str, name: str) -> RequestError:
    return RequestError(f"the recipe {path} has {name} twice; give it once")


def _loader(yaml: Any, path: str) -> Any:
    """A loader of plain values that looks at names as `_once` does."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _once(path, [(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    return Loader


def _take(context: click.Context, _: click.Parameter, path: str | None) -> None:
    """Make the recipe's values the defaults of this call. Raises RequestError for a name that is no option."""
    if path is None:
        return
    recipe = read_recipe(path)
    known = {
        name.lstrip("-").replace("-", "_"): option
        for option in context.command.params
        if option.name != "recipe" and option.expose_value
        for name in ((option.name or ""), *option.opts)
    }
    values: dict[str, Any] = {}
    named: set[str] = set()
    for name, value in recipe.values.items():
        key = str(name).replace("-", "_")
        if key not in known:
            hint = did_you_mean(key, known)
            raise RequestError(
                f"the recipe {path} has {str(name)!r}, which is no option{hint}; see --help for the names"
            )
        option = known[key]
        assert option.name is not None
        if option.name in values:
            raise _twice(path, option.name)
        if value is not None:
            values[option.name] = _as_typed(path, key, value, option)
            _check_value(context, path, key, values[option.name], option)
            named |= {option.name} if str(name) in recipe.given else set()
    context.default_map = {**(context.default_map or {}), **values}
    context.meta[GIVEN] = frozenset(named)


def _check_value(context: click.Context, path: str, name: str, value: Any, option: click.Parameter) -> None:
    """click would speak of the flag, which nobody typed."""
    try:
        option.type_cast_value(context, value)
    except click.BadParameter as error:
        raise RequestError(f"the recipe {path} has {name}: {error.message.rstrip('.')}; correct it there") from None


def _as_typed(path: str, name: str, value: Any, option: click.Parameter) -> Any:
    """A value as the flag would have been typed: lists with commas; NAME=VALUE for options that take that."""
    if getattr(option, "multiple", False):
        if isinstance(value, Mapping):
            return [f"{key}={_text(path, name, one)}" for key, one in value.items()]
        return [_text(path, name, one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, bool) != bool(getattr(option, "is_flag", False)):
        wanted = "text or a number" if isinstance(value, bool) else "true or false"
        raise RequestError(f"the recipe {path} has {name}: {value!r}, which takes {wanted}")
    return value if isinstance(value, bool) else _text(path, name, value)


def _text(path: str, name: str, value: Any) -> str:
    if isinstance(value, Mapping) or (
        isinstance(value, list) and any(isinstance(one, (Mapping, list)) or one is None for one in value)
    ):
        raise RequestError(f"the recipe {path} has a nested {name}; write one value, or a list of them")
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)

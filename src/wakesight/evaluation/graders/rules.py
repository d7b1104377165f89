"""What every grader shares: the shape of a table row, how references are read, how an optional package is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import numbers
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from wakesight.errors import RequestError

RuleName = Literal["official", "strict"]
References = tuple[Any, ...]
Grader = Callable[[str, References, RuleName, Mapping[str, Any]], float]


@dataclass(frozen=True)
class Rule:
    """How one task is graded.

    metric: the official metric in a few words. strict: what the strict rule does otherwise, "" where the two
    are the same. revised: GateSight's paper revises this task's scorer, and `strict` is that revision.
    source: the official code. needs: names in `extra` without which the grader refuses.
    """

    task: str
    family: Literal["ruler", "scbench", "longbench", "reasoning", "wakekv"]
    metric: str
    source: str
    grader: Grader = field(repr=False, compare=False)
    strict: str = ""
    revised: bool = False
    needs: tuple[str, ...] = ()

    @property
    def strict_differs(self) -> bool:
        return bool(self.strict)


def table(*rules: Rule) -> dict[str, Rule]:
    return {rule.task: rule for rule in rules}


def as_references(reference: Any, task: str) -> References:
    """A lone label becomes a tuple of one; a list stays what it is.

    Raises RequestError for no label at all, for what is neither text nor a number, and for an empty text: the rules
    that look for a label in the reply would find that one in every reply.
    """
    references = tuple(reference) if isinstance(reference, list | tuple) else (reference,)
    if not references:
        raise RequestError(f"the item of {task} has no reference answer; give at least one")
    for one in references:
        if isinstance(one, bool) or not isinstance(one, str | numbers.Real):
            raise RequestError(
                f"the reference {reprlib.repr(one)} of {task} is neither text nor a number; give one, or a list"
            )
        if not str(one).strip():
            raise RequestError(f"the item of {task} has an empty reference answer, which any reply contains; give one")
    return references


def as_reply(prediction: Any, task: str) -> str:
    """Raises RequestError for what is no text."""
    if not isinstance(prediction, str):
        raise RequestError(
            f"the reply {reprlib.repr(prediction)} to an item of {task} is no text; give a str, which may be empty"
        )
    return prediction


def optional(module: str, package: str) -> Any:
    """Import what only the `eval` extra installs, when a grader first needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(package) from error


def require(module: str, package: str) -> None:
    """Refuse as `optional` does, without importing: the module is for another process."""
    if importlib.util.find_spec(module) is None:
        raise _missing(package)


def _missing(package: str) -> RequestError:
    return RequestError(f"this grader needs the package {package}; type: pip install 'wakesight[eval]'")

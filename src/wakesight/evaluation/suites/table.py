"""Suite names -> modules, imported lazily."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import cast

from wakesight.errors import RequestError
from wakesight.evaluation.items import Suite, SuiteOptions
from wakesight.registry import did_you_mean

SUITES = {
    "ruler": "wakesight.evaluation.suites.ruler",
    "niah": "wakesight.evaluation.suites.niah",
    "recall": "wakesight.evaluation.suites.recall",
    "fidelity": "wakesight.evaluation.suites.fidelity",
    "scbench": "wakesight.evaluation.suites.scbench",
    "longbench": "wakesight.evaluation.suites.longbench",
    "reasoning": "wakesight.evaluation.suites.reasoning",
}


def suite(name: str) -> Suite:
    """The module that is the suite `name`. Raises RequestError for an unknown name."""
    if name not in SUITES:
        raise RequestError(f"unknown suite {name!r}{did_you_mean(name, SUITES)}; known: {', '.join(sorted(SUITES))}")
    return cast(Suite, importlib.import_module(SUITES[name]))


def chosen(module: Suite, options: SuiteOptions) -> tuple[str, ...]:
    """The tasks that `options` asks of a suite, each once, in the suite's order; all of TASKS when it names none.

    A suite may have further names that are only given when asked for (ALSO).
    Raises RequestError for an unknown task.
    """
    return pick(module.TASKS, options, also=getattr(module, "ALSO", ()))


def pick(tasks: Sequence[str], options: SuiteOptions, also: Sequence[str] = ()) -> tuple[str, ...]:
    """`chosen` for a suite whose task names depend on the options."""
    known = (*tasks, *also)
    for task in options.tasks:
        if task not in known:
            raise RequestError(f"unknown task {task!r}{did_you_mean(task, known)}; known: {', '.join(known)}")
    return tuple(task for task in known if task in options.tasks) if options.tasks else tuple(tasks)

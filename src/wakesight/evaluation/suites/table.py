"""Suite names -> modules, imported lazily."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from wakesight.errors import RequestError
from wakesight.evaluation.items import Suite, SuiteOptions
from wakesight.registry import did_you_mean

SUITES = {
    "ruler": "wakesight.evaluation.suites.ruler",
    "niah": "wakesight.evaluation.suites.niah",
    "recall": "wakesight.evaluation.suites.recall",
    "closed": "wakesight.evaluation.suites.closed",
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


def options_of(name: str) -> Mapping[str, str]:
    """What may be set of a suite: name -> what it is (its module's OPTIONS)."""
    return getattr(suite(name), "OPTIONS", {})


def check_options(name: str, extra: Mapping[str, object]) -> None:
    """Raises RequestError if `extra` sets something that the suite does not have."""
    known = options_of(name)
    for option in extra:
        if option not in known:
            listed = f"it has: {', '.join(known)}" if known else "it has none"
            raise RequestError(f"the suite {name} has no option {option!r}{did_you_mean(option, known)}; {listed}")


def task_id(suite_name: str, task: str) -> str:
    """A task's name among all suites: a name that several of them have carries its suite ("ruler:vt").

    A run's rows belong to one suite and hold the bare name.
    """
    return f"{suite_name}:{task}" if task in _shared_names() else task


@functools.cache
def _shared_names() -> frozenset[str]:
    found = Counter(name for one in map(suite, SUITES) for name in {*one.TASKS, *getattr(one, "ALSO", ())})
    return frozenset(name for name, suites in found.items() if suites > 1)


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

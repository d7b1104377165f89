"""What may go wrong with one item and leaves the rest of a run alone: a reason for its row, or the error itself."""

from __future__ import annotations

import traceback

import torch

from wakesight.errors import WakesightError, is_out_of_memory
from wakesight.policy import Policy


def reason_to_skip(error: Exception, work: str, policy: Policy | None = None) -> str:
    """Why an item has no grade.

    policy: whose methods were at work. Raises `error` again unless it is one of ours, a lack of memory, or comes out
    of a plug-in among these methods: that is a bug.
    """
    if isinstance(error, WakesightError):
        return str(error)
    if is_out_of_memory(error):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the failed attempt held must not fail the next item too
        return f"out of memory in {work}"
    methods = () if policy is None else (policy.scorer_method, policy.allocation_rule)
    if guilty := next((method for method in methods if _comes_from(error, type(method))), None):
        name = f"{type(guilty).__module__}.{type(guilty).__qualname__}"
        what = " ".join(str(error).split())[:200]
        return f"the plug-in {name} failed in {work} ({type(error).__name__}: {what}); ask whoever wrote it"
    raise error


def _comes_from(error: Exception, method: type) -> bool:
    """Whether a package other than this one, that of `method`, was running when `error` was raised."""
    package = method.__module__.partition(".")[0]
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return package not in ("wakesight", "builtins") and any(name.partition(".")[0] == package for name in frames)

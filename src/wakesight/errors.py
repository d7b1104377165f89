"""Every failure a user can meet, with the exit code the command line gives it.

A message is one sentence: what is wrong, why, and what to type instead.
"""


class WakesightError(Exception):
    """Base of all our errors; `exit_code` is what the command line returns."""

    exit_code = 1


class RequestError(WakesightError, ValueError):
    """The request was wrong: nothing was computed and nothing was changed."""

    exit_code = 2


class WorkError(WakesightError, RuntimeError):
    """The request was fine and the work failed (memory, disk, a broken model)."""

    exit_code = 1

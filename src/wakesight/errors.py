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


def is_out_of_memory(error: BaseException) -> bool:
    """Python's and torch's lack of memory. torch's error for a device is a RuntimeError too, a CPU's has no class."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )

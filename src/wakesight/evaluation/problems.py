"""What may go wrong with one item and leaves the rest of a run alone: a reason for its row, or the error itself."""

from __future__ import annotations

import torch

from wakesight.errors import WakesightError, is_out_of_memory


def reason_to_skip(error: Exception, work: str) -> str:
    """Why an item has no grade. Raises `error` again unless it is one of ours or a lack of memory: that is a bug."""
    if isinstance(error, WakesightError):
        return str(error)
    if is_out_of_memory(error):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the failed attempt held must not fail the next item too
        return f"out of memory in {work}"
    raise error

"""The process in which math-verify runs: one JSON line in, one JSON line out. Imports nothing of ours.

A run of its own because sympy can take forever or all memory, and math-verify's own timeout is a signal, which
Python allows in a main thread only. The parent (`symbolic.py`) kills this process when an answer is late.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys

MEMORY = 6 * 2**30  # bytes of address space


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # what a library prints must not be read as a reply
    with contextlib.suppress(ImportError, ValueError, OSError):  # a system without such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable()
    math_verify = importlib.import_module("math_verify")

    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        gold, reply = json.loads(line)
        try:
            parsed = [math_verify.parse(_as_latex(text), parsing_timeout=None) for text in (gold, reply)]
            outcome: bool | str = bool(math_verify.verify(*parsed, timeout_seconds=None))
        except BaseException as error:  # RecursionError and MemoryError among them: the parent reports it
            outcome = type(error).__name__
        print(json.dumps(outcome), file=replies, flush=True)


def _as_latex(text: str) -> str:
    return text if "$" in text else f"${text}$"


if __name__ == "__main__":
    main()

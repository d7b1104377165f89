"""The process in which math-verify and reasoning-gym run: one JSON line in, one out. Imports nothing of ours.

A process because sympy can take forever or all memory, and math-verify's own timeout is a signal, which Python
allows in a main thread only. The parent (`killable.py`) ends this process when a reply is late.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
from typing import Any

MEMORY = 6 * 2**30  # bytes of address space


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # what a library prints must not be read as a reply
    with contextlib.suppress(ImportError, ValueError, OSError):  # a system without such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable()
    for line in sys.stdin:
        request, *arguments = json.loads(line)
        try:
            outcome = {"value": REQUESTS[request](*arguments)}
        except BaseException as error:  # RecursionError and MemoryError among them: the parent reports it
            outcome = {"error": type(error).__name__}
        print(json.dumps(outcome), file=replies, flush=True)


def load(module: str) -> None:
    """Apart from the request that needs it: importing is not what a timeout is for."""
    importlib.import_module(module)


def equal(gold: str, reply: str) -> bool:
    math_verify = importlib.import_module("math_verify")
    parsed = [math_verify.parse(_as_latex(text), parsing_timeout=None) for text in (gold, reply)]
    return bool(math_verify.verify(*parsed, timeout_seconds=None))


def _as_latex(text: str) -> str:
    return text if "$" in text else f"${text}$"


def gym_score(dataset: str, answer: str, entry: Any) -> float:
    factory = importlib.import_module("reasoning_gym.factory")
    return float(factory.get_score_answer_fn(dataset)(answer=answer, entry=entry))


REQUESTS: dict[str, Any] = {"load": load, "equal": equal, "gym_score": gym_score}

if __name__ == "__main__":
    main()

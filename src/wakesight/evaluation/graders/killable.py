"""Comparisons that may never end, in a process that can be ended: from any thread, and from any process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wakesight.errors import WorkError
from wakesight.evaluation.graders.rules import require

LOAD = 180.0  # seconds an import may take, on a busy machine
_PROGRAM = Path(__file__).with_name("killable_worker.py")


def equal(gold: str, reply: str, timeout: float = 10.0) -> bool:
    """Whether math-verify takes two answers for the same; False for what it cannot read. Raises as `_ask` does."""
    require("math_verify", "math-verify[antlr4_13_2]")
    return bool(_ask("math_verify", f"comparing {_short(reply)} with {_short(gold)}", timeout, "equal", gold, reply))


def gym_score(dataset: str, answer: str, entry: Mapping[str, Any], timeout: float = 10.0) -> float:
    """What reasoning-gym's `score_answer` of a data set says, at its default settings. Raises as `_ask` does."""
    require("reasoning_gym", "reasoning-gym")
    return float(
        _ask("reasoning_gym", f"scoring {_short(answer)} for {dataset}", timeout, "gym_score", dataset, answer, entry)
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


class _Worker:
    """One process and the thread that reads its lines; None in the queue is the end of them."""

    def __init__(self) -> None:
        # -P: this folder holds a code.py and must not be in front of the standard library
        command = [sys.executable, "-P", "-W", "ignore", str(_PROGRAM)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.loaded: set[str] = set()
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, timeout: float, *request: Any) -> dict[str, Any]:
        """The reply to a request. Raises queue.Empty when it is late, EOFError or OSError when there will be none."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.lines.get(timeout=timeout)
        if line is None:
            raise EOFError
        reply: dict[str, Any] = json.loads(line)
        return reply

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # something was still unsent
                    pipe.close()


_lock = threading.Lock()
_worker: _Worker | None = None
_parents: list[_Worker] = []  # of a fork: not ours to stop, and not to be collected


def _ask(module: str, doing: str, timeout: float, *request: Any) -> Any:
    """One request at a time per process; the first one for a module waits for its import besides.

    Raises WorkError when the work is not done in `timeout` seconds, fails or takes the process with it. The next
    request finds a fresh process.
    """
    with _lock:
        try:
            worker = _running()
            if module not in worker.loaded:
                reply = worker.ask(LOAD, "load", module)
                if "error" in reply:
                    raise WorkError(f"{module} cannot be imported in a process of its own ({reply['error']})")
                worker.loaded.add(module)
            reply = worker.ask(timeout, *request)
        except queue.Empty:
            _stop()
            raise WorkError(f"{module} did not finish in {timeout:g} s {doing}; this answer has no grade") from None
        except (EOFError, OSError):
            _stop()
            raise WorkError(f"{module} stopped working {doing}; this answer has no grade") from None
        except BaseException:  # an interrupt between request and reply: the next reply would be the wrong one
            _stop()
            raise
    if "error" in reply:
        raise WorkError(f"{module} failed with {reply['error']} {doing}; this answer has no grade")
    return reply["value"]


def _running() -> _Worker:
    global _worker
    if _worker is None or _worker.process.poll() is not None:
        _stop()
        _worker = _Worker()
    return _worker


def _stop() -> None:
    global _worker
    if _worker is not None:
        _worker.stop()
        _worker = None


def _forget() -> None:
    """In a forked child: the parent's process and lock are the parent's."""
    global _worker, _lock
    if _worker is not None:
        _parents.append(_worker)
    _worker, _lock = None, threading.Lock()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

"""`equal(gold, reply)` by math-verify in a process that can be killed, from any thread and any process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from wakesight.errors import WorkError
from wakesight.evaluation.graders.rules import optional

START = 120.0  # seconds sympy may take to be imported, on a busy machine
_PROGRAM = Path(__file__).with_name("symbolic_worker.py")


class _Worker:
    """One process and the thread that reads its lines; None in the queue is the end of them."""

    def __init__(self) -> None:
        # -P: this folder holds a code.py and must not be in front of the standard library
        command = [sys.executable, "-P", "-W", "ignore", str(_PROGRAM)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def answer(self, timeout: float) -> Any:
        """The next reply. Raises queue.Empty when it is late, EOFError when there will be none."""
        line = self.lines.get(timeout=timeout)
        if line is None:
            raise EOFError
        return json.loads(line)

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

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


def equal(gold: str, reply: str, timeout: float = 10.0) -> bool:
    """Whether math-verify takes two answers for the same; False for what it cannot read.

    Raises WorkError when it does not finish in `timeout` seconds, runs out of memory or dies; the next call
    starts afresh. One comparison at a time per process; the first one pays for importing sympy.
    """
    with _lock:
        worker = _running()
        try:
            worker.send([gold, reply])
            outcome = worker.answer(timeout)
        except queue.Empty:
            _stop()
            raise WorkError(_sentence(gold, reply, f"did not finish in {timeout:g} s")) from None
        except (EOFError, OSError):
            _stop()
            raise WorkError(_sentence(gold, reply, "stopped working")) from None
        except BaseException:  # an interrupt between question and answer: the next answer would be the wrong one
            _stop()
            raise
    if isinstance(outcome, str):
        raise WorkError(_sentence(gold, reply, f"failed with {outcome}"))
    return bool(outcome)


def _sentence(gold: str, reply: str, what: str) -> str:
    shown = [text if len(text) <= 60 else text[:57] + "..." for text in (gold, reply)]
    return f"math-verify {what} while comparing {shown[1]!r} with {shown[0]!r}; this answer has no grade"


def _running() -> _Worker:
    global _worker
    if _worker is None or _worker.process.poll() is not None:
        optional("math_verify", "math-verify[antlr4_13_2]")
        _stop()
        _worker = _Worker()
        try:
            _worker.answer(START)
        except (queue.Empty, EOFError):
            _stop()
            raise WorkError(
                f"the process for math-verify did not start ({sys.executable} {_PROGRAM}); "
                "run that line by hand to see why"
            ) from None
        except BaseException:
            _stop()
            raise
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

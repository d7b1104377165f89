"""How fast a saved child opens in a new process, and whether it answers as the one that was saved.

.venv/bin/python benchmarks/saved_session.py [--tokens 8000] [--keep 0.2]

Reads running English, keeps a part of it, asks two questions and saves the child. A second process then loads
the model (not timed), opens the file `ROUNDS` times (timed: mapping, checksum, every check, and in the first round
the model's fingerprint) and asks the same. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import wakesight as ws
from haystack import prose

QUESTIONS = ("What is a statement?", "Which objects are mutable?")
ROUNDS = 5


def save(path: Path, model: str, tokens: int, keep: float) -> dict[str, object]:
    """Prefill, compact, answer and save."""
    engine = ws.load(model)
    ids = engine.encode(" ".join(prose(0)))[:tokens]
    with engine.prefill(ids) as whole, whole.compact(ws.Policy(scorer="keydiff", keep=keep)) as child:
        answers = [child.ask(engine.encode(question), max_new_tokens=24).tokens for question in QUESTIONS]
        start = time.perf_counter()
        child.save(path)
        saved_s = time.perf_counter() - start
        return {"answers": answers, "save_s": saved_s, "prefill_s": child.prefill_s, "stats": child.stats}


def load(path: Path, model: str) -> dict[str, object]:
    """Open the file several times, the first as a user would, and answer."""
    engine = ws.load(model)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        session = ws.Session.load(path, engine)
        seconds.append(time.perf_counter() - start)
    answers = [session.ask(engine.encode(question), max_new_tokens=24).tokens for question in QUESTIONS]
    return {"seconds": seconds, "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--keep", type=float, default=0.2)
    parser.add_argument("--load", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load is not None:
        print(json.dumps(load(given.load, given.model)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "child.ws"
        before = save(path, given.model, given.tokens, given.keep)
        again = [sys.executable, __file__, "--model", given.model, "--load", str(path)]
        done = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True)
        after = json.loads(done.stdout)
        size = path.stat().st_size
    first, *later = after["seconds"]
    print(
        json.dumps(
            {
                "tokens": given.tokens,
                "keep": given.keep,
                "file_bytes": size,
                "load_s_first": round(first, 4),
                "load_s_later": round(statistics.median(later), 4),
                "save_s": round(before["save_s"], 3),
                "prefill_s": round(before["prefill_s"], 1),
                "kv_bytes_kept": before["stats"].kv_bytes_kept,
                "answers_identical": after["answers"] == [list(answer) for answer in before["answers"]],
                "threads": torch.get_num_threads(),
                "cpus": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()

"""From raw text to an estimator, for both bundled models: python -m training.artifact tiny-hybrid --out out/estimator

Documents, labels, readers, tables and analysis, in that order, each by the command that is printed before it runs. The
same call goes on where it stopped, another one into the same OUT is refused. OUT/artifact is what
`load(model, artifact=...)` and `--artifact` take; its report holds the leave-one-corpus-out table. For another model
these commands are the recipe: see --dry-run.

    tiny-hybrid  450 documents of nine closed task kinds; about 15 minutes of one CPU core
    smollm2      450 documents of nine kinds of open text, taken from Debian packages; some hours
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from wakesight.errors import RequestError

ASKED = "artifact-steps.json"  # in OUT: the arguments its content was made by
PYTHON = sys.executable
WAKESIGHT = (PYTHON, "-m", "wakesight")


def steps(model: str, source: str, out: Path, seed: int) -> list[tuple[Path, tuple[str, ...]]]:
    """The commands in their order, each with what exists once it has ended well.

    model: "tiny-hybrid" or "smollm2", the recipe. source: its weights, a name or a folder.
    """
    documents, labels, artifact, analysis = (out / name for name in ("documents", "labels", "artifact", "analysis"))
    chosen = ("--seed", str(seed))
    if model == "tiny-hybrid":
        texts: tuple[str, ...] = (PYTHON, "-m", "training.documents", str(documents), "--each", "50", *chosen)
        # its contexts end in no turn of their own, and what it says about them are questions and answers
        how: tuple[str, ...] = ("--tokens", "128", "--past-end", "--min-tokens", "300", "--max-tokens", "1200")
        readers = "signals,signals+keys,age"
    else:
        texts = (PYTHON, "-m", "training.open_text", str(documents), "--each", "50", *chosen)
        how = ()
        readers = "hidden,hidden+keys,age"
    return [
        (out / ".documents", texts),  # its files come one by one, so that the folder says nothing
        (
            labels / ".done",
            (*WAKESIGHT, "label", str(documents), "--model", source, "--out", str(labels), "--resume", *how, *chosen),
        ),
        (
            out / ".fitted",
            (*WAKESIGHT, "fit", str(labels), "--out", str(artifact), "--readers", readers, "--resume", *chosen),
        ),
        (
            artifact / "calibrate.json",
            (*WAKESIGHT, "calibrate", str(documents), "--model", source, "--out", str(artifact), *chosen),
        ),
        (analysis / "analysis.md", (*WAKESIGHT, "analyze", str(labels), "--out", str(analysis), "--model", source)),
    ]


def begin(out: Path, asked: dict[str, object]) -> None:
    """Write down what was asked. Raises RequestError where `out` was begun by something else."""
    path = out / ASKED
    try:
        before = json.loads(path.read_bytes()) if path.exists() else asked
    except ValueError:
        raise RequestError(f"{path} is damaged, so nobody knows what {out} holds; give another --out") from None
    if before != asked:
        changed = ", ".join(name for name in asked if not isinstance(before, dict) or before.get(name) != asked[name])
        raise RequestError(f"{out} was begun with another {changed}; give what {path} says, or another --out")
    if not path.exists():
        if out.exists() and any(out.iterdir()):
            raise RequestError(
                f"{out} is not empty and has no {ASKED}, so nobody knows what its content was made by; give another "
                f"--out, or write {json.dumps(asked)} into that file if an older version made it so"
            )
        out.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{ASKED}")
        scratch.write_text(json.dumps(asked))
        scratch.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("tiny-hybrid", "smollm2"))
    parser.add_argument("--source", help="weights: a folder of training.export; default: the bundled model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    given = parser.parse_args(arguments)
    source = given.source or given.model
    if not given.dry_run:
        begin(given.out, {"model": given.model, "source": source, "seed": given.seed})
    for result, command in steps(given.model, source, given.out, given.seed):
        print(" ".join(command), flush=True)
        if given.dry_run or result.exists():
            continue
        if ended := subprocess.run(command).returncode:
            raise SystemExit(ended)
        if result.name.startswith("."):  # a command that has no last file of its own
            result.touch()


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(str(error)) from None

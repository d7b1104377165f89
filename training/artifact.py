"""From raw text to an estimator, for both bundled models: python -m training.artifact tiny-hybrid --out out/estimator

Documents, labels, readers, tables and analysis, in that order, each by the command that is printed before it runs. The
same call goes on where it stopped, another one into the same OUT is refused. OUT/artifact is what
`load(model, artifact=...)` and `--artifact` take; its report holds the leave-one-corpus-out table. For another model
these commands are the recipe: see --dry-run.

    tiny-hybrid  450 documents of nine closed task kinds; about 15 minutes of one CPU core. Labels come from the
                 documents' own questions and answers; with --sampled from the model's continuations, as the paper's do
    smollm2      450 documents of nine kinds of open text, taken from Debian packages; some hours. It has no recurrent
                 layers, so readers look at hidden states; 16 units in each of its 90 networks keep both readers below
                 10 MB. Labels take 22 GB of disk, sampled rows 9 GB until the fit has ended.
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


def steps(
    model: str, source: str, out: Path, seed: int, given: Path | None = None, sampled: bool = False
) -> list[tuple[Path, tuple[str, ...]]]:
    """The commands in their order, each with what exists once it has ended well.

    model: "tiny-hybrid" or "smollm2", the recipe. source: its weights, a name or a folder. given: documents that are
    there already, so that none are made. sampled: label by the model's own continuations where documents bring some.
    """
    documents, labels, artifact, analysis = (out / name for name in ("documents", "labels", "artifact", "analysis"))
    documents = given or documents
    chosen = ("--seed", str(seed))
    if model == "tiny-hybrid":
        texts: tuple[str, ...] = (PYTHON, "-m", "training.documents", str(documents), "--each", "50", *chosen)
        # sampled, it asks mostly about what is not there; and its contexts end in no turn of their own
        source_of = "--past-end" if sampled else "--given"
        how: tuple[str, ...] = ("--tokens", "128", source_of, "--min-tokens", "300", "--max-tokens", "1200")
        fit: tuple[str, ...] = ("--readers", "signals,signals+keys,age")
    else:
        texts = (PYTHON, "-m", "training.open_text", str(documents), "--each", "50", *chosen)
        how = ()
        fit = ("--readers", "hidden,hidden+keys,age", "--hidden", "16")
    analyze = (*WAKESIGHT, "analyze", str(labels), "--out", str(analysis), "--model", source)
    analyzed = [(analysis / "analysis.md", analyze)] if model == "tiny-hybrid" else []  # of native signals only
    # its files come one by one, so that the folder says nothing
    made = [] if given else [(out / ".documents", texts)]
    return [
        *made,
        (
            labels / ".done",
            (*WAKESIGHT, "label", str(documents), "--model", source, "--out", str(labels), "--resume", *how, *chosen),
        ),
        (
            out / ".fitted",
            (*WAKESIGHT, "fit", str(labels), "--out", str(artifact), *fit, "--resume", *chosen),
        ),
        (
            artifact / "calibrate.json",
            (*WAKESIGHT, "calibrate", str(documents), "--model", source, "--out", str(artifact), *chosen),
        ),
        *analyzed,
    ]


def begin(out: Path, asked: dict[str, object]) -> None:
    """Write down what was asked. Raises RequestError where `out` was begun by something else."""
    path = out / ASKED
    try:
        before = json.loads(path.read_bytes()) if path.exists() else asked
    except ValueError:
        raise RequestError(f"{path} is damaged, so nobody knows what {out} holds; give another --out") from None
    if before != asked:
        names = dict.fromkeys((*asked, *before)) if isinstance(before, dict) else asked
        changed = ", ".join(one for one in names if not isinstance(before, dict) or before.get(one) != asked.get(one))
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
    parser.add_argument("--documents", type=Path, help="a folder of documents that are there; default: made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampled", action="store_true", help="tiny-hybrid: label by the model's own continuations")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    given = parser.parse_args(arguments)
    source = given.source or given.model
    if not given.dry_run:
        asked: dict[str, object] = {"model": given.model, "source": source, "seed": given.seed}
        more = {name: str(value) for name in ("documents", "sampled") if (value := getattr(given, name))}
        begin(given.out, asked | more)
    for result, command in steps(given.model, source, given.out, given.seed, given.documents, given.sampled):
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

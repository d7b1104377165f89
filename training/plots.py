"""Curves of trainings: python -m training.plots out/tiny-hybrid-s0 --png curves.png"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a training's log; of steps done twice (after a kill) the later one."""
    path = folder / "log.jsonl"
    if not path.exists():
        raise RequestError(f"{path} does not exist; give the folder that was --out of python -m training.train")
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if "loss" in line]
    kept: list[dict[str, Any]] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def curves(folders: Sequence[Path], png: Path) -> None:
    """Accuracy per task over tokens, a panel per training, with the starts of longer sequences; and the loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(folders), 2, figsize=(14, 4.5 * len(folders)), squeeze=False)
    for (left, right), folder in zip(panels, folders, strict=True):
        lines = read(folder)
        tokens = [line["tokens"] / 1e6 for line in lines]
        tasks = list(dict.fromkeys(task for line in lines for task in line["accuracy"]))
        colours = plt.get_cmap("tab20")
        for number, task in enumerate(tasks):
            values = [line["accuracy"].get(task) for line in lines]
            left.plot(tokens, values, color=colours(number % 20), label=task.removeprefix("closed_"), linewidth=1.2)
        right.plot(tokens, [line["loss"] for line in lines], color="black", linewidth=1.0)
        for before, line in pairwise(lines):
            if line["length"] != before["length"]:
                for panel in (left, right):
                    panel.axvline(line["tokens"] / 1e6, color="grey", linewidth=0.6, linestyle=":")
                left.text(line["tokens"] / 1e6, 1.02, str(line["length"]), fontsize=8, ha="center")
        left.set(title=folder.name, xlabel="million tokens", ylabel="answers right (running)", ylim=(0, 1.08))
        right.set(xlabel="million tokens", ylabel="weighted loss", yscale="log")
        left.legend(fontsize=7, ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(png, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw log.jsonl of one or more trainings.")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, required=True)
    given = parser.parse_args()
    curves(given.folders, given.png)


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(str(error)) from None

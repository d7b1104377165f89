"""Accuracy of a training, per task and length: python -m training.evaluate out/tiny-hybrid

The folder is a training's, or one that `training.export` wrote.
An answer counts if every token of it is right: given the true tokens before it (`forced`), or in what the model writes
itself (`greedy`, with the answers' parts in any order, as the suite grades). Closing an attention layer multiplies its
output by 0; each is closed alone, then all together.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from training import initial
from training.fast import hidden_states
from training.mixture import Batch, batch_of, sequence
from training.train import Settings, load_weights
from wakesight.errors import RequestError
from wakesight.evaluation.graders import grade
from wakesight.evaluation.suites.closed import tasks as t
from wakesight.evaluation.suites.closed import vocabulary as v

TOKENS = 8192  # in one batch
SEED = 20_000  # of the questions here, which no training sees


def load(folder: Path) -> Any:
    """The model of a training folder or of an exported one, float32. Raises RequestError if the folder holds none."""
    if (folder / "config.json").exists():
        return Qwen3_5ForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    shape = Settings.read(folder / "settings.json").shape
    model = initial.model(shape, 0)
    load_weights(model, folder / "state" / "model.safetensors")
    return model.eval()


def held_out(task: str, length: int, items: int, seed: int = SEED) -> list[Batch]:
    """Sequences of a long context and up to four questions, in batches."""
    rng = random.Random(f"evaluate/{seed}/{task}/{length}")
    share = max(0.5, 1 - 90 / length)
    rows = [sequence(task, rng, length, share=share, most=4) for _ in range(items)]
    size = max(1, TOKENS // length)
    return [batch_of(rows[i : i + size]) for i in range(0, items, size)]


@torch.no_grad()
def forced(model: Any, batches: Sequence[Batch], closed: Sequence[int] = ()) -> tuple[float, int]:
    """Share of answers whose every token is the most probable one, and their number. closed: attention layers."""
    hits = []
    layers = sum(1 for _ in initial.attention_layers(model))
    for batch in batches:
        scale = torch.ones(layers, len(batch.sequences))
        scale[list(closed)] = 0.0
        best = _best(model, batch.ids, scale)
        for row, each in enumerate(batch.sequences):
            hits += [bool((best[row, a - 1 : b - 1] == batch.ids[row, a:b]).all()) for a, b in each.answers]
    return sum(hits) / max(1, len(hits)), len(hits)


def _best(model: Any, ids: Tensor, scale: Tensor | None = None) -> Tensor:
    logits: Tensor = hidden_states(model, ids, scale) @ model.lm_head.weight.T
    return logits.argmax(-1)


@torch.no_grad()
def greedy(model: Any, task: str, length: int, items: int, seed: int = SEED) -> tuple[float, int]:
    """Mean grade of the first question of each context, answered by the model, as the suite asks it."""
    grades = []
    for index in range(items):
        item = t.make(task, random.Random(f"greedy/{seed}/{task}/{length}/{index}"), length - 60)
        asked = item.asked[0]
        prompt = [v.BOS, v.USER, *item.instruction, *item.words, *asked.question, v.ASSISTANT, *asked.prefix]
        said = _continue(model, [v.IDS[word] for word in prompt], len(asked.answer) + 1)
        grades.append(grade("niah", " ".join(v.WORDS[i] for i in said), asked.parts))
    return sum(grades) / len(grades), len(grades)


def _continue(model: Any, ids: list[int], most: int) -> list[int]:
    """Greedy tokens through transformers' own forward and cache, up to <eos> or `most`."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False, use_cache=True)[0, len(ids) :]
    said: list[int] = out.tolist()
    end = v.IDS[v.EOS]
    return said[: said.index(end)] if end in said else said


def table(model: Any, lengths: Sequence[int], items: int, greedy_items: int) -> list[dict[str, Any]]:
    """A row per task and length: forced, open and with closed layers; greedy where `greedy_items` is above 0."""
    layers = sum(1 for _ in initial.attention_layers(model))
    rows = []
    for length in lengths:
        for task in t.TASKS:
            batches = held_out(task, length, items)
            value, answers = forced(model, batches)
            row: dict[str, Any] = {"task": task, "length": length, "answers": answers, "forced": value}
            row["closed"] = [forced(model, batches, [layer])[0] for layer in range(layers)]
            row["all_closed"] = forced(model, batches, range(layers))[0]
            if greedy_items:
                row["greedy"], row["greedy_items"] = greedy(model, task, length, greedy_items)
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    closed = " ".join(f"{value:.2f}" for value in row["closed"])
    said = f"  greedy {row['greedy']:.2f}" if "greedy" in row else ""
    return (
        f"{row['length']:5d} {row['task']:18s} {row['forced']:.3f} ({row['answers']}){said}  one closed {closed}  "
        f"all closed {row['all_closed']:.2f}"
    )


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The rows as JSON, the whole file at once: an older evaluation is replaced or stays as it is."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(json.dumps(list(rows), indent=1))
    scratch.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy per task and length; writes eval.json into the folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--items", type=int, default=24, help="contexts per task and length")
    parser.add_argument("--greedy", type=int, default=8, help="contexts answered by the model itself")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = table(load(given.folder), given.lengths, given.items, given.greedy)
    write(given.folder / "eval.json", rows)


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(str(error)) from None

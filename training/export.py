"""A training as a model folder: python -m training.export out/tiny-hybrid-s0 out/tiny-hybrid

Writes bfloat16 safetensors, config, tokenizer with chat template, and a model card with the accuracies of `eval.json`
(python -m training.evaluate on the training's folder, or on the exported one with --eval).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from training import evaluate, tokenizer
from training.train import Counters, Settings
from wakesight.errors import RequestError
from wakesight.evaluation.suites.closed import tasks
from wakesight.models import requests
from wakesight.models.load import ARTIFACT

CARD = """# tiny-hybrid

A small hybrid language model for trying out KV-cache selection offline: {recurrent} gated-delta-net layers and
{attention} attention layers, {parameters:.2f} M parameters, a closed vocabulary of 512 words. It reads the tasks of the
`closed` suite (needles, key-value pairs, variables, strings, labels, counts, reading the context back) and nothing
else. Text with another word in it cannot be encoded.

- Architecture: transformers' `Qwen3_5ForCausalLM`, {layers} layers (every fourth attention), hidden {hidden},
  {query_heads} query and {kv_heads} KV heads of 64, recurrent heads {key_heads} / {value_heads} of 64, tied embedding.
- Made to have attention layers that all matter: each writes to its own channels of the residual stream, nothing but
  the head reads these channels behind it, and in them a word's embedding is only the code of a group of words. One
  layer alone names no word; classes of words are spread over the layers unevenly (`SPREAD` in `training/initial.py`).
- Trained from random data by `python -m training.train` (seed {seed}): {tokens:.2f} M tokens in sequences of up to
  {length}, {minutes:.0f} minutes of one CPU core shared with other work. Recipe and code: `training/`.
- License: Apache-2.0, as the rest of this project. All word lists and texts are ours; no outside data.

## Format

`<bos> <user> instruction context question <assistant> answer <eos>`, words separated by white space or punctuation;
the chat template writes it. A question begins with "ask".

## Accuracy

Share of answers with every token right, given the true tokens before (forced); mean grade of the model's own greedy
answers (greedy), whose parts may come in any order. "Without layer 3": the output of that attention layer times 0.
{questions} questions are from a seed that training does not use.

{table}

Beyond {length} tokens the model was not trained. It is a test bed: its figures say nothing about large models.
"""


def export(folder: Path, out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the model folder, first beside `out`, then in its place. An estimator in it is kept.

    Raises RequestError if `out` is anything but a folder that this wrote, or an empty one; then nothing is changed.
    """
    _check_target(out)
    model = evaluate.load(folder)
    settings = Settings.read(folder / "settings.json")
    counters = Counters(**_json(folder / "state" / "state.json")["counters"])
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        new, old = scratch / "new", scratch / "old"
        _write(new, model, settings, counters, rows)
        if (out / ARTIFACT).is_dir():  # fitted on these weights or refused; not for us to throw away
            shutil.copytree(out / ARTIFACT, new / ARTIFACT)
        if out.exists():
            out.rename(old)  # whole until the new one stands in its place
        try:
            new.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_target(out: Path) -> None:
    """RequestError for what is not ours to replace: other programs write a config.json too."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        about = json.loads((out / "config.json").read_bytes())
    except (OSError, ValueError):
        about = None
    ours = isinstance(about, dict) and str(about.get("model_type")).startswith("qwen3_5")
    if not ours or not (out / "model.safetensors").is_file():
        raise RequestError(f"{out} exists and is no model folder of this command; give another one")


def _write(new: Path, model: Any, settings: Settings, counters: Counters, rows: Sequence[dict[str, Any]]) -> None:
    model.to(torch.bfloat16).save_pretrained(str(new))
    tokenizer.save(new, model.config.max_position_embeddings)
    (new / "README.md").write_text(card(model, settings, counters, rows))
    (new / "eval.json").write_text(json.dumps(list(rows), indent=1))
    words = {"repeat_all": tasks.WHOLE, "repeat_from": tasks.PART, "repeat_end": (".",)}
    (new / requests.FILE).write_text(json.dumps({name: " ".join(said) for name, said in words.items()}, indent=1))
    for file in new.iterdir():
        file.chmod(0o644)  # transformers writes weights for their owner only


def _json(path: Path) -> Any:
    if not path.exists():
        raise RequestError(f"{path} is missing; give the folder that was --out of python -m training.train")
    return json.loads(path.read_text())


def card(model: Any, settings: Settings, counters: Counters, rows: Sequence[dict[str, Any]]) -> str:
    config = model.config
    attention = config.layer_types.count("full_attention")
    return CARD.format(
        recurrent=len(config.layer_types) - attention, attention=attention, layers=len(config.layer_types),
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6, hidden=config.hidden_size,
        query_heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        key_heads=config.linear_num_key_heads, value_heads=config.linear_num_value_heads, seed=settings.seed,
        tokens=counters.tokens / 1e6, length=settings.lengths[counters.stage], minutes=counters.seconds / 60,
        questions="The" if rows else "No evaluation was made yet: the", table=_table(rows, config.layer_types),
    )  # fmt: skip


def _table(rows: Sequence[dict[str, Any]], layer_types: Sequence[str]) -> str:
    if not rows:
        return "(no eval.json)"
    without = [f"without layer {index}" for index, kind in enumerate(layer_types) if kind == "full_attention"]
    head = ["task", "tokens", "answers", "forced", "greedy", *without, "without all"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        said = f"{row['greedy']:.2f}" if "greedy" in row else "-"
        values = [f"{value:.2f}" for value in (*row["closed"], row["all_closed"])]
        cells = [row["task"], str(row["length"]), str(row["answers"]), f"{row['forced']:.3f}", said, *values]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a training's model as a folder that transformers loads.")
    parser.add_argument("folder", type=Path, help="folder of the training")
    parser.add_argument("out", type=Path, help="model folder to write")
    parser.add_argument("--eval", type=Path, help="eval.json for the model card; default: the training folder's")
    given = parser.parse_args()
    path = given.eval or given.folder / "eval.json"
    if given.eval and not path.exists():
        raise RequestError(f"{path} does not exist; make it with: python -m training.evaluate {given.folder}")
    export(given.folder, given.out, json.loads(path.read_text()) if path.exists() else [])
    size = sum(file.stat().st_size for file in given.out.iterdir()) / 1e6
    print(f"{given.out}: {size:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(str(error)) from None

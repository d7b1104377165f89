"""wakesight demo: the main job on a bundled model and document."""

from __future__ import annotations

import importlib.resources
import itertools
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from wakesight.cli.common import checked_text, model_options, print_json, progress, shared_options, show_bytes
from wakesight.cli.policy import default_scorer
from wakesight.policy import Policy

FRACTIONS = (1.0, 0.5, 0.3, 0.1)


@dataclass(frozen=True)
class Demo:
    """What is read and asked. clues: where the document answers; only used to show those passages."""

    text: str
    questions: tuple[str, ...]
    clues: tuple[str, ...]
    instruction: str | None = None


def lighthouse() -> Demo:
    """A document in English. One answer stands late in it and survives eviction longer, one early is lost sooner."""
    return Demo(
        (importlib.resources.files("wakesight") / "data" / "lighthouse.txt").read_text(encoding="utf-8"),
        ("What is the telephone number of the museum?", "What is the archive number of the keeper's diary?"),
        ("telephone number", "archive number"),
    )


def closed() -> Demo:
    """The same in the 512 words of tiny-hybrid: four needles in 900 words that look like them."""
    from wakesight.evaluation.suites.closed import tasks

    item = tasks.make("closed_multikey", random.Random("demo"), 900)
    asked = item.asked[:4]
    return Demo(
        " ".join(item.words),
        tuple(" ".join(each.question) for each in asked),
        tuple(" ".join((*each.prefix, *each.answer)) for each in asked),
        " ".join(item.instruction),
    )


@click.command("demo")
@click.option("--model", default="smollm2", show_default=True, help="As for ask.")
@click.option("--scorer", default=None, help="See wakesight methods. Default: as for ask.")
@click.option(
    "--question", "given", multiple=True, callback=checked_text, help="Instead of those that suit the document."
)
@click.option("--png", default=None, help="Also draw which tokens were kept into this PNG file.")
@model_options
@shared_options
def command(
    model: str,
    scorer: str | None,
    given: tuple[str, ...],
    png: str | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Read a bundled document once, then ask the same questions with all, half, 30% and 10% of its KV cache."""
    plain = Policy(scorer=scorer or default_scorer(model))
    policies = [plain.at(allocation=plain.natural_allocation, keep=keep) for keep in FRACTIONS]
    demo = closed() if model == "tiny-hybrid" else lighthouse()
    questions = given or demo.questions
    from wakesight.engines.hf.engine import load
    from wakesight.engines.recording import needs
    from wakesight.report import kept_map

    engine = load(model, device=device, dtype=dtype)
    wanted = needs(plain.scorer_method, engine)
    with progress("reading") as on_chunk:
        whole = engine.prefill(demo.text, instruction=demo.instruction, on_chunk=on_chunk, **wanted)
    tokens = whole.stats.logical_length
    rows: list[dict[str, Any]] = []
    arms = {}
    for policy in policies:
        with whole.compact(policy) as child:
            answers, stats = [child.ask(q, max_new_tokens=32).text.strip() for q in questions], child.stats
            assert child.kept is not None
            arms[f"p = {policy.keep:g}: {' | '.join(answer[:60] for answer in answers)}"] = child.kept
            rows.append(
                {
                    "keep": policy.keep,
                    "answers": answers,
                    "kept_entries": stats.kept_entries,
                    "kv_bytes_full": stats.kv_bytes_full,
                    "kv_bytes_kept": stats.kv_bytes_kept,
                    "kv_bytes_slack": stats.kv_bytes_slack,
                    "strip": kept_map.strip(child.kept, tokens),
                }
            )
    if png:
        kept_map.picture(arms, tokens, Path(png), f"{engine.name}, {tokens:,} tokens, scorer {plain.scorer}")
    if as_json:
        print_json({"model": engine.name, "tokens": tokens, "questions": questions, "arms": rows, "png": png})
        return
    click.echo(
        f"{engine.name} read {tokens:,} tokens in {whole.prefill_s:.1f} s; scorer {plain.scorer}, one scoring for all"
    )
    click.echo("".join(f"question {i + 1}: {q}\n" for i, q in enumerate(questions)))
    for row in rows:
        heads = [count for layer in row["kept_entries"] for count in layer]
        click.echo(
            f"p = {row['keep']:<4g} "
            + "\n         ".join(f"{i + 1}: {' '.join(a.split())}" for i, a in enumerate(row["answers"]))
            + f"\n         kept {sum(heads):,} of {tokens * len(heads):,} entries, "
            f"KV {show_bytes(row['kv_bytes_full'])} -> {show_bytes(row['kv_bytes_kept'])} "
            f"(+ {show_bytes(row['kv_bytes_slack'])} growth slack)\n"
            f"         |{row['strip']}|"
        )
    _show_passages(engine, whole.tokens, arms, demo)
    if png:
        click.echo(f"picture: {png}")


def _show_passages(engine: Any, ids: tuple[int, ...], arms: dict[str, Any], demo: Demo) -> None:
    """The sentences that hold the answers, every token shaded by how many entries kept it."""
    from rich.console import Console

    from wakesight.report import kept_map

    pieces = _pieces(engine, ids)
    console = Console(file=sys.stdout, highlight=False)
    console.print("\nthe passages with the answers, brighter green = kept by more (layer, head) pairs:")
    text = demo.text
    for clue in demo.clues:
        at = len(ids) - len(engine.encode(text)) + len(engine.encode(text[: text.index(clue)]))
        start, stop = max(at - 4, 0), min(at + 16, len(ids))
        for name, kept in arms.items():
            console.print(name.split(":")[0].ljust(8), kept_map.words(pieces, kept, start, stop, len(ids)))


def _pieces(engine: Any, ids: tuple[int, ...]) -> list[str]:
    """The text of each token as it stands behind the one before it: a tokenizer of whole words puts the space there."""
    alone = [engine.decode([i]) for i in ids]
    pairs = [engine.decode(list(pair)) for pair in itertools.pairwise(ids)]
    behind = [
        both[len(first) :] if both.startswith(first) and both.endswith(second) else second
        for both, first, second in zip(pairs, alone, alone[1:], strict=False)
    ]
    return [*alone[:1], *behind]

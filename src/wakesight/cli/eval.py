"""wakesight eval: run a suite under several arms; wakesight merge: join shards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wakesight.cli.common import model_options, print_json, read_names, shared_options
from wakesight.errors import RequestError

if TYPE_CHECKING:
    from wakesight.evaluation.items import Context
    from wakesight.evaluation.runner import Progress


@click.command("eval", short_help="Compare methods on a suite of tasks.")
@click.argument("suite")
@click.option("--model", required=True, help="Bundled name (smollm2), model folder, .gguf file or hub id.")
@click.option("--engine", default="hf", show_default=True, help="What runs the model: hf (transformers).")
@click.option(
    "--methods", default="keydiff", show_default=True, help="Scorers, comma-separated; see wakesight methods."
)
@click.option("--allocations", default="flat", show_default=True, help="Allocations, comma-separated.")
@click.option("--evicted", default="drop", show_default=True, help="What becomes of the rest: drop.")
@click.option("--keep", default="0.1,0.3,0.5", show_default=True, help="Kept fractions, comma-separated.")
@click.option("--unit", default="entry", show_default=True, help="Evict by entry or by page.")
@click.option("--page-size", type=int, default=16, show_default=True, help="Positions per page, with --unit page.")
@click.option("--tasks", default="", help="Tasks of the suite, comma-separated. Default: all.")
@click.option("--length", type=int, default=2048, show_default=True, help="Tokens of context, question and answer.")
@click.option("--items", type=int, default=10, show_default=True, help="Contexts per task.")
@click.option("--seed", type=int, default=42, show_default=True, help="The same seed gives the same items.")
@click.option("--data", default=None, help="Folder of official files; without it tasks are generated offline.")
@click.option("--out", required=True, help="Run folder: config.json, records.jsonl, summary.json, contexts/.")
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped.")
@click.option("--limit", type=int, default=None, help="Stop after so many contexts.")
@click.option("--shard", default=None, help="i/n: run every n-th context from the i-th on (0-based); join by merge.")
@click.option("--rows", type=int, default=16, show_default=True, help="Most arms decoded in one batch.")
@click.option("--thinking", type=int, default=None, help="Tokens a thinking model may think; they are no answer.")
@click.option("--chunk", type=int, default=512, show_default=True, help="Prefill tokens per step.")
@model_options
@shared_options
def command(
    suite: str, model: str, engine: str, out: str, resume: bool, limit: int | None, shard: str | None, rows: int,
    thinking: int | None, chunk: int, device: str | None, dtype: str | None, as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Run SUITE (ruler, scbench, longbench, niah, recall, reasoning, fidelity) under every arm and the whole cache.

    One prefill and one scoring per context serve all arms; no scorer sees a question. A stopped run goes on with
    --resume.

    \b
    wakesight eval niah --model smollm2 --methods keydiff,snapkv --keep 0.1,0.3,0.5 --items 5 --out runs/niah
    wakesight report runs/niah
    """
    if engine != "hf":
        raise RequestError(f"--engine {engine} is not built yet; use --engine hf")
    plan_arguments = {
        "suite": suite,
        "model": model,
        "dtype": dtype,
        "limit": limit,
        "shard": shard,
        "thinking": thinking,
        **arguments,
    }

    from wakesight.engines.hf.engine import load
    from wakesight.evaluation.arms import make_arms
    from wakesight.evaluation.folders import finish
    from wakesight.evaluation.graders import grade
    from wakesight.evaluation.items import SuiteOptions
    from wakesight.evaluation.runner import Plan, run
    from wakesight.evaluation.suites.table import suite as find_suite

    module = find_suite(suite)
    arms = make_arms(
        read_names(arguments["methods"]), read_names(arguments["allocations"]), _fractions(arguments["keep"]),
        evicted=read_names(arguments["evicted"]), unit=arguments["unit"], page_size=arguments["page_size"],
    )  # fmt: skip
    part = _shard(shard)
    for name in ("length", "items"):
        if arguments[name] < 1:
            raise RequestError(f"--{name} {arguments[name]} must be at least 1")
    loaded = load(model, device=device, dtype=dtype)
    data = arguments["data"]
    options = SuiteOptions(
        length=arguments["length"], items=arguments["items"], seed=arguments["seed"],
        count=lambda text: len(loaded.encode(text)), tasks=tuple(read_names(arguments["tasks"])),
        data=None if data is None else Path(data),
    )  # fmt: skip
    plan = Plan(
        engine=loaded, arms=tuple(arms), contexts=lambda: module.contexts(options), grade=grade,
        config={"arguments": plan_arguments, **_about()}, rows=rows, shard=part, limit=limit, chunk=chunk,
        thinking=thinking,
    )  # fmt: skip
    folder = Path(out)
    with _progress() as on_question:
        progress = run(plan, folder, resume=resume, on_question=on_question)
    summary = finish(folder)
    if as_json:
        print_json({"folder": out, "progress": vars(progress), "summary": summary})
    else:
        click.echo(show(summary))
        click.echo(
            f"{out}: {progress.questions} questions run, {progress.resumed} done before, {progress.skipped} rows "
            f"skipped, {progress.wall:.0f} s, of which the harness itself {progress.overhead:.1%}",
            err=True,
        )


def show(summary: dict[str, Any]) -> str:
    """The mean of every arm per task, as a text table; the first rule of the run."""
    rule = "official" if "official" in summary["rules"] else next(iter(summary["rules"]), None)
    if rule is None:
        return "no question was scored"
    means = summary["rules"][rule]["means"]
    width = max(len(arm) for arm in summary["arms"])
    lines = [f"{'':<{width}}  " + "  ".join(f"{task:>12}" for task in means)]
    for arm in summary["arms"]:
        cells = (
            f"{means[task][arm]['mean']:>{max(12, len(task))}.3f}" if arm in means[task] else "-" for task in means
        )
        lines.append(f"{arm:<{width}}  " + "  ".join(cells))
    return "\n".join(lines)


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in read_names(text)]
    except ValueError:
        raise RequestError(f"--keep {text} is no list of fractions; write for example --keep 0.1,0.3,0.5") from None


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise RequestError(f"--shard {text} is no shard; write 0/2 and 1/2 for the halves of a run")
    return int(index), int(count)


def _about() -> dict[str, Any]:
    from wakesight.bench.machine import versions

    return {"versions": versions()}


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress, Context], None] | None]:
    """A line on the terminal per question: how many, how fast. None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("reading") as status:
        yield lambda progress, context: status.update(
            f"{context.task}: {progress.questions} questions, {progress.wall / progress.questions:.1f} s each"
        )

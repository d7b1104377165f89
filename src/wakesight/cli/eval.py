"""wakesight eval: run a suite under several arms."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from wakesight.cli.common import (
    Once,
    artifact_option,
    model_options,
    print_json,
    read_names,
    read_shard,
    shared_options,
)
from wakesight.cli.policy import PAGING, default_scorer, paging_options, residency_of
from wakesight.cli.recipe import given, recipe_option
from wakesight.errors import RequestError, WorkError
from wakesight.evaluation.records import Records, check_folder, complete, unit
from wakesight.registry import did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from wakesight.evaluation.arms import Arm, Match
    from wakesight.evaluation.items import Context
    from wakesight.evaluation.runner import Progress
    from wakesight.residency import Residency


ENGINES = ("hf", "vllm")


class _WithSuiteOptions(Once):
    """Its help ends with what every suite can be set."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from wakesight.evaluation.suites.table import SUITES, options_of

        with formatter.section("Options of the suites, --option NAME=VALUE"):
            rows = [(f"{suite} {name}", what) for suite in SUITES for name, what in options_of(suite).items()]
            formatter.write_dl(rows, col_max=24)


@click.command("eval", cls=_WithSuiteOptions, short_help="Compare methods on a suite of tasks.")
@click.argument("suite", required=False)
@recipe_option
@click.option("--model", default=None, help="Bundled name (smollm2), model folder, .gguf file or hub id.")
@click.option("--engine", default="hf", show_default=True, help="What runs the model: hf (transformers) or vllm.")
@click.option(
    "--methods",
    default=None,
    help="Scorers, comma-separated; see wakesight methods. Default: as for ask, the model's own estimator or keydiff.",
)
@click.option(
    "--allocations", default="natural", show_default=True,
    help="Allocations, comma-separated; natural is each scorer's own. --methods a@gate,b gives one method its own.",
)  # fmt: skip
@click.option(
    "--evicted", default="drop", show_default=True, help="What becomes of the rest, comma-separated: drop, demote."
)
@click.option("--keep", default="0.1,0.3,0.5", show_default=True, help="Kept fractions, comma-separated.")
@click.option(
    "--unit",
    default="entry",
    show_default=True,
    help="Drop by entry, by page, or both (entry,page); demotion is always by page.",
)
@click.option("--page-size", type=int, default=16, show_default=True, help="Positions per page.")
@click.option(
    "--match",
    default="bytes",
    show_default=True,
    help="What demote has in common with drop at one kept fraction: bytes of fast memory, or entries in its slots.",
)
@paging_options
@click.option("--tasks", default="", help="Tasks of the suite, comma-separated. Default: all.")
@click.option("--length", type=int, default=2048, show_default=True, help="Tokens of context, question and answer.")
@click.option("--items", type=int, default=10, show_default=True, help="Items made per task, a context each.")
@click.option("--seed", type=int, default=42, show_default=True, help="The same seed gives the same items.")
@click.option("--data", default=None, help="Folder of official files; without it tasks are generated offline.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the suite, see below; may be given several times.",
)
@click.option("--out", default=None, help="Run folder: config.json, records.jsonl, summary.json, contexts/.")
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped.")
@click.option("--limit", type=int, default=None, help="Run so many questions at most, the first ones.")
@click.option("--shard", default=None, help="i/n: run every n-th context from the i-th on (0-based); join by merge.")
@click.option("--rows", type=int, default=16, show_default=True, help="Most arms decoded in one batch.")
@click.option("--thinking", type=int, default=None, help="Tokens a thinking model may think; they are no answer.")
@click.option("--chunk", type=int, default=512, show_default=True, help="Prefill tokens per step.")
@artifact_option
@model_options
@shared_options
@click.pass_context
def command(ctx: click.Context, /, out: str | None, resume: bool, as_json: bool, **arguments: Any) -> None:
    """Run SUITE (ruler, scbench, longbench, niah, recall, reasoning, fidelity, closed) under every arm and uncut.

    One prefill and one scoring per context serve all arms; no scorer sees a question. A stopped run goes on with
    --resume. A recipe does the same as the flags, and flags beside it win.

    \b
    wakesight eval niah --model smollm2 --methods keydiff,snapkv --keep 0.1,0.3,0.5 --items 5 --out runs/niah
    wakesight eval --recipe runs/niah/config.json --seed 43 --out runs/niah-43
    wakesight report runs/niah
    """
    suite, folder = _check(out, arguments)
    arguments["options"] = _settings(arguments["options"])
    arguments["settings"] = list(arguments["settings"])  # as JSON gives it back to a run that is resumed
    if arguments["methods"] is None:  # the run's config says which one it was
        arguments["methods"] = default_scorer(arguments["model"], arguments["artifact"])

    from wakesight.evaluation.arms import make_arms
    from wakesight.evaluation.checks import check_length
    from wakesight.evaluation.folders import finish
    from wakesight.evaluation.graders import grade
    from wakesight.evaluation.items import SuiteOptions
    from wakesight.evaluation.runner import Plan, run
    from wakesight.evaluation.suites.table import check_options
    from wakesight.evaluation.suites.table import suite as find_suite

    module = find_suite(suite)
    check_options(suite, arguments["options"])
    arms = make_arms(
        read_names(arguments["methods"]), read_names(arguments["allocations"]), _fractions(arguments["keep"]),
        evicted=read_names(arguments["evicted"]), unit=read_names(arguments["unit"]),
        page_size=arguments["page_size"], residency=_residency(arguments), match=_match(arguments["match"]),
    )  # fmt: skip
    part = read_shard(arguments["shard"])
    loaded = _load(arguments)
    check_length(loaded, arguments["length"])
    options = SuiteOptions(
        length=arguments["length"], items=arguments["items"], seed=arguments["seed"],
        count=lambda text: len(loaded.encode(text)), tasks=_tasks(suite, arguments["tasks"]),
        data=None if arguments["data"] is None else Path(arguments["data"]), extra=arguments["options"],
    )  # fmt: skip
    plan = Plan(
        engine=loaded, arms=tuple(arms), contexts=lambda: module.contexts(options), grade=grade,
        config={**_config(arguments, given(ctx)), "inputs": _inputs(loaded, arms, arguments)},
        rows=arguments["rows"], shard=part, limit=arguments["limit"], chunk=arguments["chunk"],
        thinking=arguments["thinking"], data=options.data,
    )  # fmt: skip
    with _resumable(folder):
        with showing(_terminal()) as on_question:
            progress = run(plan, folder, resume=resume, on_question=on_question)
        summary = finish(folder)
    if as_json:
        print_json({"folder": str(folder), "progress": vars(progress), "summary": summary})
    else:
        click.echo(show(summary))
        click.echo(
            f"{folder}: {progress.questions} questions run, {progress.resumed} done before, {progress.skipped} rows "
            f"skipped, {progress.wall:.0f} s, of which the harness itself {progress.overhead:.1%}",
            err=True,
        )
    tell_skipped(summary)


def tell_skipped(summary: dict[str, Any]) -> None:
    """Why rows have no grade, on stderr. Raises WorkError, with the first reason, if no question was scored at all."""
    reasons: dict[str, int] = summary["skipped"]
    for reason, count in reasons.items():
        click.echo(f"skipped: {count} row{'s' if count > 1 else ''}, {reason}", err=True)
    if reasons and not summary["scored_questions"]:
        raise WorkError(f"no question was scored; the first reason: {next(iter(reasons))}")


@contextlib.contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Ctrl-C says what is on disk, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if not (folder / "config.json").exists():
            raise
        done = len({unit(row) for row in complete(Records(folder).read())})
        are = "question is" if done == 1 else "questions are"
        raise KeyboardInterrupt(f"interrupted; {done} {are} in {folder}, go on with --resume") from None


def show(summary: dict[str, Any]) -> str:
    """The mean of every arm per task, as a text table."""
    from wakesight.evaluation.scored import ALL
    from wakesight.evaluation.summary import title

    if not summary["arms"]:
        return "no question was scored"
    means = {(row["arm"], row["task"]): row["mean"] for row in summary["arms"]}
    arms, tasks = (list(dict.fromkeys(row[name] for row in summary["arms"])) for name in ("arm", "task"))
    width = max(map(len, arms))
    if len(tasks) == 2:  # a task, and the mean over it alone
        tasks = [task for task in tasks if task != ALL]
    lines = [title(summary), f"{'':<{width}}  " + "  ".join(f"{task:>12}" for task in tasks)]
    for arm in arms:
        cells = (
            f"{means[arm, task]:>{max(12, len(task))}.3f}" if (arm, task) in means else f"{'-':>{max(12, len(task))}}"
            for task in tasks
        )
        lines.append(f"{arm:<{width}}  " + "  ".join(cells))
    return "\n".join(lines)


def _check(out: str | None, arguments: dict[str, Any]) -> tuple[str, Path]:
    """The suite and the run folder; refuses what is missing or makes no sense."""
    suite = arguments["suite"]
    if not suite:
        raise RequestError(
            "say which suite to run; type for example: wakesight eval niah --model smollm2 --out runs/niah"
        )
    if not arguments["model"]:
        raise RequestError("say which model to run with --model; wakesight models lists the bundled ones")
    if not out:
        raise RequestError("say where the run goes with --out, for example --out runs/niah")
    if arguments["engine"] not in ENGINES:
        close = did_you_mean(arguments["engine"], ENGINES)
        raise RequestError(f"--engine {arguments['engine']} is unknown{close}; use --engine {' or '.join(ENGINES)}")
    for name, least in (("length", 1), ("items", 1), ("limit", 1), ("rows", 1), ("thinking", 1), ("seed", 0)):
        if arguments[name] is not None and arguments[name] < least:
            raise RequestError(f"--{name} {arguments[name]} must be at least {least}")
    check_folder(Path(out))
    return suite, Path(out)


def _residency(arguments: dict[str, Any]) -> Residency | None:
    """How arms demote; None where none does. Every part of it may stand in a recipe."""
    mode = "demote" if "demote" in read_names(arguments["evicted"]) else "drop"
    return residency_of(mode, pages=None, **{name: arguments[name] for name in PAGING})


def _match(word: str) -> Match:
    if word not in ("bytes", "entries"):
        raise RequestError(f"--match {word} is unknown; use bytes or entries")
    return cast("Match", word)


def _load(arguments: dict[str, Any]) -> Any:
    """The model on the engine that was asked for."""
    options = {name: arguments[name] for name in ("device", "dtype", "artifact")}
    if arguments["engine"] == "vllm":
        from wakesight.engines.vllm.engine import load as load_vllm

        return load_vllm(arguments["model"], **options)
    from wakesight.engines.hf.engine import load

    return load(arguments["model"], **options)


def _settings(words: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a mapping."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise RequestError(f"--option {word} sets nothing; write --option NAME=VALUE, for example depths=5")
        if name.strip() in found:
            raise RequestError(f"--option {name.strip()} is given twice; give it once")
        found[name.strip()] = value.strip()
    return found


def _tasks(suite: str, text: str) -> tuple[str, ...]:
    """Names of tasks, with or without their suite ("ruler:vt")."""
    return tuple(name.removeprefix(f"{suite}:") for name in read_names(text))


def _config(arguments: dict[str, Any], typed: set[str]) -> dict[str, Any]:
    from wakesight.bench.machine import commit, machine, versions

    return {
        "given": {name: value for name, value in arguments.items() if name in typed},
        "defaults": {name: value for name, value in arguments.items() if name not in typed},
        "versions": versions(),
        "commit": commit(),
        "machine": machine(),
    }


def _inputs(engine: Any, arms: Sequence[Arm], arguments: dict[str, Any]) -> dict[str, Any]:
    """Digests of what the model's name stands for: its weights, and the artifact if an arm reads it."""
    from wakesight.estimator.digest import digest
    from wakesight.evaluation.checks import reads_artifact
    from wakesight.models.load import own_artifact

    artifact = None
    if any(map(reads_artifact, arms)) and (folder := arguments["artifact"] or own_artifact(arguments["model"])):
        artifact = digest(folder)
    return {"model": engine.weights_fingerprint(), "artifact": artifact}


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in read_names(text)]
    except ValueError:
        raise RequestError(f"--keep {text} is no list of fractions; write for example --keep 0.1,0.3,0.5") from None


def _terminal() -> Console | None:
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(stderr=True)


@contextlib.contextmanager
def showing(console: Console | None) -> Iterator[Callable[[Progress, Context], None] | None]:
    """A bar with how many questions of how many, and the time left; None without a terminal."""
    if console is None:
        yield None
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = ("{task.description}", BarColumn(), "{task.completed} of {task.total} questions", "{task.fields[left]}")
    texts = [TextColumn(column) if isinstance(column, str) else column for column in columns]
    with Bar(*texts, console=console, transient=True) as bar:
        line = bar.add_task("making the items", total=None, left="")

        def update(progress: Progress, context: Context) -> None:
            left = "" if progress.seconds_left is None else f"{clock(progress.seconds_left)} left"
            bar.update(line, description=context.task, completed=progress.done, total=progress.total, left=left)

        yield update


def clock(seconds: float) -> str:
    """90 -> "1:30", 3700 -> "1:01:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

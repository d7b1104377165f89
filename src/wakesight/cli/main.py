"""Entry point: finds the command, and turns every failure into one sentence and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from wakesight import __version__
from wakesight.cli.lazy import LazyGroup
from wakesight.errors import WakesightError

COMMANDS = {
    "ask": "Answer questions about a long document with a fraction of its KV cache.",
    "prefill": "Read a document once and save the session, whole or compacted.",
    "demo": "The main job on a bundled model and document: answers, bytes, which tokens stay.",
    "models": "List bundled models and supported families.",
    "methods": "List scorers and allocations with their settings.",
    "doctor": "Check versions, devices, bundled models and folders.",
    "serve": "Serve a model with sessions: vLLM with the plugin switched on.",
    "eval": "Compare methods on a suite of tasks: one prefill serves every arm.",
    "merge": "Join the shards of one evaluation.",
    "label": "Measure which entries documents need, for training.",
    "calibrate": "Measure gate table and query statistics of a model.",
    "fit": "Train the estimator of a model from its labels.",
    "analyze": "Describe a model's native signals and their relation to utility.",
    "trace": "Record and study attention logs: which pages each head wants.",
    "simulate": "Replay residency policies over attention logs: misses, memory, stalls.",
    "report": "Tables, figures and a page from evaluation runs.",
    "view": "Show a report in the browser, on this machine only.",
    "bench": "Measure speed: two arms alternated in one run, as a ratio.",
}


@click.command(
    cls=LazyGroup,
    places=(COMMANDS, "wakesight.cli."),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="wakesight")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Keep the KV-cache entries a long document will need; free the rest.

    \b
    wakesight ask --model smollm2 --context report.txt --question "Who signed it?" --keep 0.3
    wakesight demo
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(words))


def run(words: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Failures are one sentence on stderr."""
    debug = "--debug" in words
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        outcome = cli.main(args=list(words), prog_name="wakesight", standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, click.Abort) as stop:
        return _say(_stopped(stop), 130)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the reader of our stdout has gone)
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _say(*_sentence(error))


def _stopped(stop: BaseException) -> str:
    """What the command that was interrupted says of it; click passes the interruption on as the cause of its own."""
    told = stop if isinstance(stop, KeyboardInterrupt) else stop.__cause__
    return str(told or "") or "interrupted; nothing was written"


def _sentence(error: Exception) -> tuple[str, int]:
    if isinstance(error, click.UsageError):
        command = f"; type {error.ctx.command_path} --help" if error.ctx else ""
        return error.format_message().rstrip(".") + command, 2
    if isinstance(error, click.ClickException):
        return error.format_message(), 2
    if isinstance(error, WakesightError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "out of memory; use a shorter context or a smaller model", 1
    text = " ".join(str(error).split())[:300]
    return f"internal error, please report it ({type(error).__name__}: {text}); --debug shows where", 1


def _say(sentence: str, code: int) -> int:
    print(f"wakesight: {sentence}", file=sys.stderr)
    return code

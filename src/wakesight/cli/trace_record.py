"""wakesight trace record: play a regime on a model and log its attention."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wakesight.cli.common import model_options, print_json, progress, read_names, shared_options
from wakesight.errors import RequestError

if TYPE_CHECKING:
    from wakesight.traces.recorder import Recorded


@click.command("record")
@click.option("--model", required=True, help="Bundled name (smollm2, tiny-hybrid), model folder, .gguf file or hub id.")
@click.option("--regime", default="niah", show_default=True, help="niah, recall or reasoning.")
@click.option("--out", required=True, help="Run folder; needs the extra wakesight[traces].")
@click.option("--length", type=int, default=None, help="niah, recall: tokens of a prompt, about. [1024]")
@click.option("--depths", default=None, help="niah: where the needle stands, from 0 to 1. [0.25,0.5,0.75]")
@click.option("--seeds", type=int, default=3, show_default=True, help="Different texts, of niah one at every depth.")
@click.option("--seed", type=int, default=0, show_default=True, help="The first of them.")
@click.option("--new-tokens", type=int, default=None, help="Longest answer. [128; reasoning: 2048]")
@click.option("--past-end", is_flag=True, help="Go on where the model ends its answer.")
@click.option("--no-chat", is_flag=True, help="Plain text, without the chat template.")
@click.option("--scorers", default="keydiff", show_default=True, help="Whose scores of the prompt are logged.")
@click.option("--half", is_flag=True, help="Store weights as float16: smaller, and some become equal.")
@click.option("--resume", is_flag=True, help="Go on with a recording that was stopped.")
@click.option("--chunk", type=int, default=512, show_default=True, help="Prompt tokens per step.")
@model_options
@shared_options
def command(
    model: str, regime: str, out: str, length: int | None, depths: str | None, seeds: int, seed: int,
    new_tokens: int | None, past_end: bool, no_chat: bool, scorers: str, half: bool, resume: bool, chunk: int,
    device: str | None, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Record one trace per text: the model answers greedily, and every decode step is logged.

    niah hides a key and a value in running text; recall tells facts turn by turn and asks for one later; reasoning
    poses problems (of reasoning-gym, extra wakesight[eval]). A model that knows the closed language only is given
    texts in it.

    \b
    wakesight trace record --model smollm2 --regime niah --length 2048 --out traces/niah
    wakesight trace record --model tiny-hybrid --regime recall --length 512 --out traces/tiny
    """
    from wakesight.bench.machine import commit, versions
    from wakesight.cli.trace_closed import Closed
    from wakesight.engines.hf.engine import load
    from wakesight.traces.english import English
    from wakesight.traces.recorder import Options, record
    from wakesight.traces.regimes import Settings, scripts
    from wakesight.traces.store import needed
    from wakesight.traces.writing import writing

    settings = Settings(chat=not no_chat, **_given(regime, length, depths, seeds, seed))
    options = Options(
        new_tokens, past_end, not no_chat, chunk, "float16" if half else "float32", tuple(read_names(scorers))
    )
    needed("zarr", "writing traces")
    engine = load(model, device=device, dtype=dtype)
    plan = scripts(settings, engine, (English(), Closed()))
    asked = {
        "fingerprint": engine.weights_fingerprint(), "dtype": str(engine.dtype).removeprefix("torch."),
        "regime": regime, "length": settings.length, "depths": list(settings.depths), "seeds": list(settings.seeds),
        "new_tokens": new_tokens, "past_end": past_end, "chat": not no_chat, "half": half,
        "scorers": list(options.scorers),
    }  # fmt: skip
    about = {"fingerprint": asked["fingerprint"], "dtype": asked["dtype"], "versions": versions(), "commit": commit()}
    start, made, before = time.perf_counter(), [], 0
    with progress(f"trace record {regime}") as on_trace, writing(Path(out), asked, resume) as run:
        for number, script in enumerate(plan):
            if run.finished(script.name):
                before += 1
            else:
                made.append(record(engine, run, script, options, about))
            if on_trace is not None:
                on_trace(number + 1, len(plan))
    _report(Path(out), made, before, time.perf_counter() - start, as_json)


def _given(regime: str, length: int | None, depths: str | None, seeds: int, seed: int) -> dict[str, Any]:
    """Settings that were typed. Raises RequestError for one that the regime does not have."""
    given: dict[str, Any] = {"regime": regime, "seeds": tuple(range(seed, seed + seeds))}
    if seeds < 1 or seed < 0:
        raise RequestError(f"--seeds {seeds} --seed {seed}: give at least 1 seed, from 0 on; --seeds 3 is the default")
    if depths is not None:
        if regime != "niah":
            raise RequestError(f"--depths belongs to the regime niah; leave it out for {regime}")
        given["depths"] = _depths(depths)
    if length is not None:
        if regime == "reasoning":
            raise RequestError("--length belongs to the regimes niah and recall; a problem is as long as it is")
        given["length"] = length
    return given


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in read_names(text))
    except ValueError:
        raise RequestError(f"--depths {text} is no list of numbers; write 0.25,0.5,0.75") from None


def _report(out: Path, made: list[Recorded], before: int, seconds: float, as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(out), "resumed": before, "traces": [vars(each) for each in made]})
        return
    for each in made:
        click.echo(f"{each.name}: {each.steps} tokens ({each.finish}): {' '.join(each.text.split())[:80]}")
    click.echo(f"{out}: {len(made)} traces recorded in {seconds:.0f} s, {before} there before")

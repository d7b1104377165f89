"""Scoring beside the prefill it follows: one session, every scorer that runs on it, in alternated rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from wakesight.bench.pairs import alternate, median_ms, ratio
from wakesight.bench.tokens import random_tokens
from wakesight.engines.hf.engine import HFEngine
from wakesight.engines.probe import score_by_probe
from wakesight.engines.recording import needs
from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.scores.base import AnyScorer, Scorer, for_model, has_probe, score
from wakesight.scores.gatesight import GateSight
from wakesight.scores.keydiff import KeyDiff
from wakesight.scores.table import scorer
from wakesight.selection.topk import rank

SCORERS = ("keydiff", "snapkv", "gatesight", "gatesight+", "kvzip")
PREFILL, RANKING = "ours with taps", "ranking"
REQUEST = 16  # tokens that ask for the context again
Arms = dict[str, Callable[[], None]]


def scoring(name: str) -> str:
    """The arm of one scorer."""
    return f"scoring {name}"


@contextlib.contextmanager
def scoring_arms(
    engine: HFEngine, context: Sequence[int], *, chunk: int = 512, names: Sequence[str] = SCORERS
) -> Iterator[tuple[Arms, dict[str, str]]]:
    """Arms that score one whole session with each scorer, one that ranks scores, and one that prefills with what the
    artifact's readers need recorded; and why some scorers have none.

    Scoring is what turns signals into checked scores; ranking, which every scorer needs once more, stands apart.
    """
    left_out: dict[str, str] = {}
    runs, record = {}, set[str]()
    for name in names:
        try:
            method = _ready(engine, name)
            record |= set(needs(method, engine)["record"])
            runs[name] = method
        except RequestError as error:
            left_out[name] = str(error)
    recorded = sorted(record)
    with engine.prefill(context, chunk=chunk, record=recorded) as session, _some_request(engine):
        arms: Arms = {}
        for name, method in runs.items():
            arm = _arm(session, method)
            try:
                arm()
            except RequestError as error:  # a second pass may not fit the model
                left_out[name] = str(error)
            else:
                arms[scoring(name)] = arm
        if engine.only_whole is None:
            scores = score(KeyDiff(), session.signals(), engine.geometry.kv_heads)
            arms[RANKING] = lambda: _wait(engine, rank(scores, session.state.prefix, None))
        if recorded:
            arms[f"ours, recording {', '.join(recorded)}"] = _prefilling(engine, context, chunk, recorded)
        yield arms, left_out


@contextlib.contextmanager
def _some_request(engine: HFEngine) -> Iterator[None]:
    """KVzip asks in random ids: not every tokenizer has the words, and a pass takes as long whatever it reads."""
    before, ids = engine.repeat_instruction, random_tokens(engine, REQUEST, seed=2)
    engine.repeat_instruction = lambda previous: [*ids, *(previous or ())]
    try:
        yield
    finally:
        engine.repeat_instruction = before


def shares(seconds: dict[str, list[float]], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Each arm's time over that of the prefill, round by round."""
    return [
        {"arm": name, "seconds": median_ms(seconds[name]) / 1e3, "share": vars(ratio(seconds[name], seconds[PREFILL]))}
        for name in arms
    ]


def bench_lengths(
    engine: HFEngine, *, lengths: Sequence[int], chunk: int = 512, rounds: int = 9,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Scoring time and its share of prefill at several lengths, all of them in the same rounds, and how it grows.

    exponents: slope of log time over log length by least squares, in each round, and their median; 1 is linear, 2
    quadratic. None for an arm that ran at one length only.
    """
    if len(set(lengths)) < len(lengths):
        raise RequestError("--lengths names a length twice; give each once, for example 2048,4096,8192")
    left_out: dict[str, dict[str, str]] = {}
    every: dict[tuple[int, str], Callable[[], None]] = {}
    with contextlib.ExitStack() as stack:
        for tokens in lengths:
            context = random_tokens(engine, tokens)
            arms, left_out[str(tokens)] = stack.enter_context(scoring_arms(engine, context, chunk=chunk))
            every[tokens, PREFILL] = _prefilling(engine, context, chunk)
            every |= {(tokens, name): arm for name, arm in arms.items()}
        places = {f"{tokens} {name}": (tokens, name) for tokens, name in every}
        seconds = alternate({key: every[place] for key, place in places.items()}, rounds, on_round)
    spent = {place: seconds[key] for key, place in places.items()}
    rows = []
    for tokens in lengths:
        mine = {name: times for (at, name), times in spent.items() if at == tokens}
        for row in shares(mine, list(mine)):
            rows.append({"tokens": tokens, **row, "us_per_token": row["seconds"] * 1e6 / tokens})
    names = dict.fromkeys(name for _, name in spent)
    return {"rows": rows, "left_out": left_out, "exponents": {name: exponent(spent, name) for name in names}}


def exponent(spent: Mapping[tuple[int, str], Sequence[float]], arm: str) -> float | None:
    """spent: seconds by round of every (tokens, arm)."""
    mine = {tokens: times for (tokens, name), times in spent.items() if name == arm}
    if len(mine) < 2:
        return None
    slopes = np.polyfit(np.log(list(mine)), np.log(np.array(list(mine.values()))), 1)[0]  # one per round
    return float(np.median(slopes))


def _prefilling(engine: HFEngine, context: Sequence[int], chunk: int, record: Sequence[str] = ()) -> Callable[[], None]:
    return lambda: engine.prefill(context, chunk=chunk, record=record).close()


def _ready(engine: HFEngine, name: str) -> AnyScorer:
    """The scorer as it runs on this model. Raises RequestError if it cannot, or its reader is missing."""
    if engine.only_whole is not None:
        raise RequestError(f"no scorer runs on {engine.name}: {engine.only_whole}")
    method = for_model(scorer(name), engine)
    if isinstance(method, GateSight) and engine.artifact is not None:
        engine.artifact.reader(method.reader)
    return method


def _arm(session: Session, method: AnyScorer) -> Callable[[], None]:
    engine = cast(HFEngine, session.engine)
    if has_probe(method):
        return lambda: _wait(engine, score_by_probe(method, session))
    plain = cast(Scorer, method)
    return lambda: _wait(engine, score(plain, session.signals(method), engine.geometry.kv_heads))


def _wait(engine: HFEngine, _: object) -> None:
    """A device works on after a call returned."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)

"""The options that spell a policy, shared by every command that compacts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from wakesight.cli.common import read_bytes_size
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.residency import Residency

SIZES = ("keep", "entries", "fit")
PLAIN = "keydiff"  # needs nothing but keys
_OPTIONS = (
    click.option("--keep", type=float, default=None, help="Fraction of the entries to keep, 0 < p <= 1."),
    click.option("--entries", type=int, default=None, help="Entries to keep per (layer, KV head) on average."),
    click.option(
        "--fit", default=None,
        help="Memory for KV, growth slack and states (not for what was recorded for scorers): 500MB, 2GiB.",
    ),
    click.option(
        "--scorer", default=None,
        help="Which entries matter; see wakesight methods. Default: the model's own estimator if it has one "
        "(gatesight+ or gatesight), else keydiff.",
    ),
    click.option(
        "--allocation", default=None,
        help="Share among layers and heads; see wakesight methods; or counts per layer 40,30,20. Default: the scorer's "
        "own (gatesight gate, gatesight+ utility_global, kvzip global, else flat).",
    ),
    click.option(
        "--evicted", default="drop", show_default=True,
        help="What becomes of the rest: drop (gone), or demote (to a reservoir, and fetched back when wanted).",
    ),
    click.option("--unit", default=None, help="Evict by entry (default) or by page (always, with --evicted demote)."),
    click.option("--page-size", type=int, default=None, help="Positions per page, with --unit page. Default 16."),
    click.option("--page-reduce", default=None, help="A page's score: max (default), mean or sum of its entries'."),
    click.option(
        "--protect", type=int, default=None,
        help="Tokens kept at the start. Default: template and instruction, at most 256.",
    ),
    click.option(
        "--pages", type=int, default=None,
        help="With demote: pages in fast memory per (layer, KV head). Default: what the size comes to.",
    ),
)  # fmt: skip


PAGING = ("attend", "rerank", "reservoir", "settings")
_PAGING_OPTIONS = (
    click.option(
        "--attend", default=None, help="With demote: pages a head reads per step, or all (exact). Default: --pages."
    ),
    click.option("--rerank", type=int, default=None, help="With demote: steps between two choices of pages. [1]"),
    click.option("--reservoir", default=None, help="With demote: where pages wait, host or file:FOLDER. [host]"),
    click.option(
        "--residency", "settings", multiple=True,
        help="With demote: another setting of Residency, NAME=VALUE, for example sketch=int8, wants=oracle, recent=1, "
        "dense_layers=2; may be given several times.",
    ),
)  # fmt: skip


def paging_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a demoted session reads its pages."""
    for option in reversed(_PAGING_OPTIONS):
        command = option(command)
    return command


def policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """All options of a policy."""
    command = paging_options(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _allocation(text: str | None) -> str | tuple[int, ...] | None:
    """A name, or counts per layer; None where none was given."""
    parts = [] if text is None else text.split(",")
    return tuple(map(int, parts)) if parts and all(part.strip().isdecimal() for part in parts) else text


def default_scorer(model: str | None, artifact: str | None = None) -> str:
    """What is used where no scorer was asked for: what the model's own artifact, or the given one, allows; or keydiff.

    Raises RequestError for an artifact that is missing or damaged.
    """
    from wakesight.estimator.artifact import best_scorer
    from wakesight.models.load import own_artifact

    folder = artifact or (None if model is None else own_artifact(model))
    return (None if folder is None else best_scorer(folder)) or PLAIN


def _sized(choices: Mapping[str, Any]) -> bool:
    """Whether the choices name a size."""
    given = [*SIZES, "pages"]
    return isinstance(_allocation(choices["allocation"]), tuple) or any(choices[size] is not None for size in given)


def may_read_artifact(*, scorer: str | None, **choices: Any) -> bool:
    """Whether a policy of these choices looks at an estimator; one without a scorer is decided by what there is."""
    if scorer is None or not _sized(choices):
        return _sized(choices)
    policy = make_policy(default_keep=None, scorer=scorer, model=None, artifact=None, **choices)
    return policy is not None and policy.reads_artifact


def make_policy(
    *, default_keep: float | None, scorer: str | None, model: str | None, artifact: str | None, **choices: Any
) -> Policy | None:
    """The policy that the choices spell; `default_keep` where no size was given, None where that is None too.

    scorer: None for `default_scorer` of the model. Raises RequestError for choices that contradict each other, or
    that mean nothing without a size.
    """
    sized = _sized(choices)
    choices["residency"] = residency_of(
        choices["evicted"], pages=choices.pop("pages"), **{name: choices.pop(name) for name in PAGING}
    )
    if choices["unit"] is None:
        choices["unit"] = "page" if choices["evicted"] == "demote" else "entry"
    for flag in ("page_size", "page_reduce"):
        if choices[flag] is None:
            del choices[flag]
        elif choices["unit"] != "page":
            raise RequestError(f"--{flag.replace('_', '-')} belongs to --unit page; add that, or leave it out")
    if not sized:
        choices["keep"] = default_keep
    fit = choices.pop("fit")
    choices["bytes"] = None if fit is None else read_bytes_size(fit)
    allocation = _allocation(choices.pop("allocation"))
    policy = Policy(scorer=scorer or PLAIN, **choices)
    if policy.has_size or isinstance(allocation, tuple):
        if scorer is None:
            policy = policy.at(scorer=default_scorer(model, artifact))
        return policy.at(allocation=allocation or policy.natural_allocation)
    if scorer or allocation or policy != Policy():
        raise RequestError("a scorer, allocation, unit or protection needs a size; add --keep, --entries or --fit")
    return None


def residency_of(
    evicted: str, *, pages: int | None, attend: str | None, rerank: int | None, reservoir: str | None,
    settings: Sequence[str],
) -> Residency | None:  # fmt: skip
    """What the options say about pages; None where nothing is demoted.

    Raises RequestError for options of demotion without it, and for settings that no residency has.
    """
    given: dict[str, Any] = {"pages": pages, "attend": attend, "rerank": rerank, "reservoir": reservoir}
    given = {name: value for name, value in given.items() if value is not None}
    if evicted != "demote":
        if wrong := [*given, *(("residency",) if settings else ())]:
            raise RequestError(f"--{wrong[0]} belongs to --evicted demote; add that, or leave it out")
        return None
    fields = {f.name: f.default for f in dataclasses.fields(Residency) if f.name not in ("page_size", "dense_heads")}
    for word in settings:
        name, equals, value = word.partition("=")
        if not equals or name not in fields:
            known = ", ".join(sorted(fields))
            raise RequestError(f"--residency {word} sets nothing; write NAME=VALUE with one of {known}")
        if name in given:
            raise RequestError(f"--residency {name} is given twice; give it once")
        given[name] = value
    for name, value in given.items():
        if isinstance(value, str) and value.removeprefix("-").isdecimal():
            given[name] = int(value)
        elif value in ("true", "false"):
            given[name] = value == "true"
    return Residency(**given)

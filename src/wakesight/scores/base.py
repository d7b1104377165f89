"""What a scorer is, and the few steps that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from wakesight.arguments import shown
from wakesight.core import ModelGeometry, Scores, Signals
from wakesight.errors import RequestError
from wakesight.signals.chunk import Tap
from wakesight.signals.precision import working_dtype

Group = Literal["mean", "max"]  # how the query heads of a group become one score


class Scorer(Protocol):
    """A frozen dataclass: fields are its settings, `reads` names the signals it needs.

    `score` must not look beyond `signals`, goes through the layers once and in order (they may be computed
    as they are asked for), and returns finite scores for every token: float32, or what float64 keys give in float64.
    What is stored where nothing is held must not matter; the score there is 0.

    A scorer whose scores lie in [0, 1] and mean the same share in every head may say so by a class variable
    `normalised = True`; some allocations compare heads and take no other.
    """

    reads: ClassVar[tuple[str, ...]]

    def score(self, signals: Signals) -> Scores: ...


class Probe(Protocol):
    """What a scorer with an extra pass gets in place of `Signals`; `engines.probe.ProbeContext` says more.

    overhear: reads ids behind the context, shows every chunk to one tap per attention layer, and forgets them.
    repeat_instruction: ids that ask for the context again, from its start or behind the given ids.
    """

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def prefix(self) -> int: ...
    @property
    def geometry(self) -> ModelGeometry: ...
    @property
    def scaling(self) -> tuple[float, ...]: ...
    @property
    def held(self) -> tuple[Tensor, ...] | None: ...
    @property
    def devices(self) -> tuple[torch.device, ...]: ...
    @property
    def tail(self) -> tuple[int, ...]: ...
    @property
    def separator(self) -> str: ...
    @property
    def encode(self) -> Callable[[str], list[int]]: ...
    @property
    def decode(self) -> Callable[[Sequence[int]], str]: ...
    @property
    def overhear(self) -> Callable[[Sequence[int], Sequence[Tap]], None]: ...

    def repeat_instruction(self, previous: Sequence[int] | None) -> Sequence[int]: ...


class ProbeScorer(Protocol):
    """A frozen dataclass like `Scorer`, whose scores come from a pass of its own behind the context.

    No question is within its reach. `probe` returns scores of the same form as `Scorer.score` does.
    """

    def probe(self, context: Probe) -> Scores: ...


def has_probe(scorer: object) -> TypeGuard[ProbeScorer]:
    """Whether a scorer reads behind the context by itself."""
    return hasattr(scorer, "probe")


AnyScorer = Scorer | ProbeScorer


class HasArtifact(Protocol):
    """An engine, as far as scorers know one: what was learned about its model is read when somebody needs it."""

    @property
    def artifact(self) -> Any: ...


def for_model(scorer: AnyScorer, engine: HasArtifact | None) -> AnyScorer:
    """The scorer as it runs on one model: a method whose signals depend on what was fitted for the model has
    `resolved(artifact)`, which says which; RequestError where it cannot run there."""
    resolved: Callable[[Any], AnyScorer] | None = getattr(scorer, "resolved", None)
    return scorer if resolved is None else resolved(engine and engine.artifact)


def reads_of(scorer: AnyScorer) -> tuple[str, ...]:
    """Names of the signals that a scorer needs; a plug-in's may name none, or a single one."""
    reads = getattr(scorer, "reads", ())
    return (reads,) if isinstance(reads, str) else tuple(reads)


def score(scorer: Scorer, signals: Signals, kv_heads: Sequence[int]) -> Scores:
    """What `scorer` gives, once it has the form of this context. kv_heads: per attention layer.

    Raises RequestError, naming the scorer, for a signal that was not recorded or scores of another form; WorkError
    for one that is not finite.
    """
    name = type(scorer).__name__
    for signal in reads_of(scorer):
        _ = signals[signal]
    return checked_form(scorer.score(signals), name, signals.tokens, kv_heads)


def checked_form(found: object, name: str, tokens: int, kv_heads: Sequence[int], method: str = "score") -> Scores:
    """`found`, which the scorer called `name` gave for a context of `tokens` tokens. method: where it came from.

    Raises RequestError, naming the scorer, for scores of another form; WorkError for one that is not finite.
    """
    if not isinstance(found, Scores):
        raise RequestError(f"the scorer {name} gave {shown(found)}; its {method} method must return Scores(layers)")
    wanted = [[heads, tokens] for heads in kv_heads]
    if len(found.layers) != len(wanted):
        raise RequestError(
            f"the scorer {name} gave scores for {len(found.layers)} layers, but this model has {len(wanted)} attention "
            "layers; give one tensor for each"
        )
    for layer, (scores, shape) in enumerate(zip(found.layers, wanted, strict=True)):
        if not isinstance(scores, Tensor) or list(scores.shape) != shape or not scores.is_floating_point():
            raise RequestError(
                f"the scorer {name} gave {shown(scores)} for attention layer {layer}; "
                f"give floating-point scores [kv_head, token] of shape {shape}"
            )
    must = found.must_keep
    if must is not None and not (
        isinstance(must, Tensor) and must.dtype == torch.bool and list(must.shape) == [tokens]
    ):
        raise RequestError(
            f"the scorer {name} gave {shown(must)} as must_keep; give bool [token] of shape {[tokens]}, or None"
        )
    return found.checked(name)


def held_layers(signals: Signals) -> Sequence[Tensor | None]:
    """Per attention layer bool [kv_head, token], or None where every entry is held."""
    return signals.held if signals.held is not None else (None,) * len(signals.scaling)


def widened(keys: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """All of them in the precision that the keys are scored in, on the keys' device."""
    dtype = working_dtype(keys.dtype)
    return tuple(tensor.to(keys.device, dtype) for tensor in (keys, *others))


def only_held(numbers: Tensor, held: Tensor | None) -> Tensor:
    """Scores [kv_head, token], or keys [kv_head, token, dim], with 0 where nothing is held."""
    if held is None:
        return numbers
    return numbers.masked_fill(~held.view(*held.shape, *[1] * (numbers.dim() - 2)), 0.0)


def softmax_over(logits: Tensor, held: Tensor | None) -> Tensor:
    """Softmax of [kv_head, ..., token] among the held entries; 0 elsewhere, also if the head holds none."""
    if held is None:
        return logits.softmax(dim=-1)
    absent = ~held.view(held.shape[0], *[1] * (logits.dim() - 2), held.shape[1])
    return logits.masked_fill(absent, float("-inf")).softmax(dim=-1).masked_fill_(absent, 0.0)


def trailing(tokens: int, count: int, device: torch.device) -> Tensor:
    """bool [token], true for the last `count` tokens."""
    return torch.arange(tokens, device=device) >= tokens - count


def leading(tokens: int, count: int, device: torch.device) -> Tensor:
    """bool [token], true for the first `count` tokens."""
    return torch.arange(tokens, device=device) < count


def last_queries(queries: Tensor, count: int, asker: str) -> Tensor:
    """The last `count` rows of [query_head, window, dim]; RequestError naming `asker` if fewer were recorded."""
    if queries.shape[1] < count:
        raise RequestError(
            f"{asker} needs the last {count} queries, but {queries.shape[1]} were recorded; "
            f"prefill with query_window={count} or use a smaller window"
        )
    return queries[:, queries.shape[1] - count :]


def by_kv_head(per_query_head: Tensor, kv_heads: int) -> Tensor:
    """[query_head, ...] -> [kv_head, group, ...]: the query heads that share a KV head."""
    group = per_query_head.shape[0] // kv_heads
    return per_query_head.reshape(kv_heads, group, *per_query_head.shape[1:])


def over_group(per_head: Tensor, how: Group) -> Tensor:
    """[kv_head, group, ...] -> [kv_head, ...]."""
    return per_head.mean(dim=1) if how == "mean" else per_head.amax(dim=1)


def at_least(setting: str, value: int, least: int, why: str) -> None:
    """RequestError unless value >= least. setting: "snapkv window"; why: what the number is, in a few words."""
    if not value >= least:
        raise RequestError(f"{setting}={value} is too small: {why}; use {setting.split()[-1]}={least} or more")


def one_of(setting: str, value: str, choices: Sequence[str]) -> None:
    """RequestError unless value is among the choices. setting: "snapkv group"."""
    if value not in choices:
        raise RequestError(f"{setting}={value!r} is unknown; use {setting.split()[-1]}={' or '.join(choices)}")

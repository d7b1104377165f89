"""For people with their own loop: inside `with compacting(model, policy)`, `model.generate` runs on a compacted cache.

The first forward pass of a prompt is replaced: each distinct row's context is read and compacted, the rest of
the row is read behind it, and the rows go on together in our cache. Everything the model got is taken back
at the end of the block, also after an exception.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from wakesight.arguments import as_whole, chunk_size, shown, token_ids
from wakesight.cache.state import SessionState
from wakesight.core import KeptSet
from wakesight.engines.hf import attention, compat
from wakesight.engines.hf.attach import forward_keywords, left_pads, override, session_cache, with_logits
from wakesight.engines.hf.cache import SessionCache
from wakesight.engines.hf.engine import HFEngine
from wakesight.engines.recording import needs
from wakesight.engines.session import SessionStats
from wakesight.errors import RequestError
from wakesight.models.families import family_of
from wakesight.models.load import LoadedModel, is_causal_model
from wakesight.policy import Policy, need_policy

_INSTEAD = "leave the cache argument and cache_implementation out, or use engine.prefill and session.cache()"


@dataclass
class Compacting:
    """What happened inside the block, per distinct prompt, in order.

    query_aware: True when no prefix_tokens were given: the scorer saw the question, so the run must not be
    compared with query-agnostic ones.
    """

    query_aware: bool
    kept: list[KeptSet | None] = field(default_factory=list)
    stats: list[SessionStats] = field(default_factory=list)

    @property
    def label(self) -> str:
        return "query-aware" if self.query_aware else "query-agnostic"


@contextlib.contextmanager
def compacting(
    model: Any, policy: Policy, *, prefix_tokens: int | Sequence[int] | None = None, chunk: int = 512
) -> Iterator[Compacting]:
    """Compact the cache of every prompt that `model` reads inside the block, with `generate` or a loop of one's own.

    model: a transformers causal model in eval mode. prefix_tokens: how many tokens of each prompt are the context
    (pads not counted), for all prompts or one number per prompt; only they are scored, the rest is the question.
    None scores the whole prompt: the run is then query-aware, and labelled so. Beams and several return sequences
    share one prefill. The first pass gives logits for the last token only.

    Raises RequestError for a model in training mode or one that an engine holds, a policy without a size, and for
    static, quantized, offloaded or already filled caches.
    """
    if not is_causal_model(model) or not hasattr(model.config, "_attn_implementation"):
        raise RequestError(f"compacting needs a transformers causal model, not {shown(model)}; give the model object")
    need_policy(policy)
    chunk = chunk_size(chunk)
    if prefix_tokens is not None and (single := as_whole(prefix_tokens)) is not None:
        prefix_tokens = single
    elif prefix_tokens is not None:
        prefix_tokens = token_ids(prefix_tokens, "prefix_tokens", "a whole number, or one for each prompt")
    if str(model.config._attn_implementation) in (attention.SDPA, attention.EAGER):
        raise RequestError("this model belongs to an engine already; use engine.prefill, or engine.close() first")
    if model.training:
        raise RequestError("this model is in training mode, where dropout changes every pass; call model.eval() first")
    if not policy.has_size:
        raise RequestError("the policy names no size; give keep=, entries= or bytes=")
    compat.check_version()
    run = Compacting(query_aware=prefix_tokens is None)
    engine = HFEngine(LoadedModel(model.config.model_type, model, None, family_of(model.config)))
    try:
        undo = override(model, "forward", functools.partial(_forward, engine, policy, prefix_tokens, chunk, run))
        try:
            yield run
        finally:
            undo()
    finally:
        engine.close()


def _forward(
    engine: HFEngine, policy: Policy, prefix_tokens: int | Sequence[int] | None, chunk: int, run: Compacting, stock: Any
) -> Any:
    replaced: weakref.WeakSet[Any] = weakref.WeakSet()  # empty caches that we were handed

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("use_cache")
        wanted = getattr(engine.model.config, "use_cache", True) if wanted is None else wanted
        if session_cache(kwargs) is not None or not wanted:
            return stock(*args, **kwargs)
        kwargs = {**inspect.signature(stock).bind_partial(*args).arguments, **kwargs}
        check_cache(kwargs, replaced)
        check_wishes(kwargs)
        if kwargs.get("input_ids") is None:
            raise RequestError("compacting needs token ids; give input_ids, not inputs_embeds")
        rows = _rows(kwargs["input_ids"], kwargs.get("attention_mask"), prefix_tokens)
        with compat.no_grad():
            output = _start(engine, policy, chunk, run, stock, rows)
        if (handed := _cache(kwargs)) is not None:
            replaced.add(handed)
        return output

    return forward


def _cache(kwargs: dict[str, Any]) -> Any:
    return kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")


def check_cache(kwargs: dict[str, Any], replaced: Collection[Any] = ()) -> None:
    """Refuse every cache that cannot be compacted, by name; none or an empty DynamicCache is fine.

    replaced: empty ones that were handed over before, in whose place the output's cache holds what was read.
    """
    cache = _cache(kwargs)
    if cache is None:
        return
    if cache in replaced:
        raise RequestError(
            "this cache was handed over empty and stayed empty: what was read lies in a compacted one; "
            "go on with the cache of the model's output"
        )
    if getattr(cache, "offloading", False):
        raise RequestError(f"an offloaded cache keeps everything, on another device, and is not compacted; {_INSTEAD}")
    if type(cache) is not DynamicCache:
        kind = type(cache).__name__
        raise RequestError(f"a {kind} has storage of its own that entries cannot be dropped from; {_INSTEAD}")
    if cache.get_seq_length():
        raise RequestError(
            f"this cache already holds {cache.get_seq_length()} tokens that were read outside the block and cannot be "
            f"scored any more; {_INSTEAD}"
        )


def check_wishes(kwargs: dict[str, Any]) -> None:
    """Refuse, by name, what a first pass that gives logits for the last token only cannot return."""
    for name in ("labels", "output_attentions", "output_hidden_states"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise RequestError(
                f"inside compacting the first pass gives logits for the last token only, so {name} cannot be met; "
                "leave it out, or call the model with use_cache=False"
            )


def _rows(ids: Tensor, mask: Tensor | None, prefix: int | Sequence[int] | None) -> list[tuple[tuple[int, ...], int]]:
    """Per row its tokens without pads, and how many of them are the context."""
    pads = left_pads(mask, ids.shape[1], len(ids))
    if not (prefix is None or isinstance(prefix, int)) and (not prefix or len(ids) % len(prefix)):
        raise RequestError(
            f"there are {len(prefix)} prefix_tokens for {len(ids)} prompts; give one number for all, or one for each"
        )
    rows = []
    for index, (row, count) in enumerate(zip(ids.tolist(), pads, strict=True)):
        tokens = tuple(row[count:])
        if prefix is None:
            context = len(tokens)
        else:
            context = prefix if isinstance(prefix, int) else prefix[index * len(prefix) // len(ids)]
        if not 1 <= context <= len(tokens):
            raise RequestError(
                f"prefix_tokens={context} does not fit prompt {index}, which has {len(tokens)} tokens; "
                "give the number of context tokens in the prompt, pads not counted"
            )
        rows.append((tokens, context))
    return rows


def _start(
    engine: HFEngine, policy: Policy, chunk: int, run: Compacting, forward: Any,
    rows: list[tuple[tuple[int, ...], int]],
) -> Any:  # fmt: skip
    """Read every distinct row once; all rows continue from one cache."""
    distinct = list(dict.fromkeys(rows))
    started = [_read(engine, policy, chunk, run, forward, tokens, context) for tokens, context in distinct]
    joined = SessionCache.joined([cache for cache, _ in started])
    order = [distinct.index(row) for row in rows]
    if len(rows) > len(distinct):
        joined.repeat(order)
    logits = torch.cat([started[index][1].logits[:, -1:] for index in order])
    return with_logits(started[0][1], logits, joined)


def _read(
    engine: HFEngine, policy: Policy, chunk: int, run: Compacting, forward: Any, tokens: tuple[int, ...], context: int
) -> tuple[SessionCache, Any]:
    """A cache that holds the compacted context and the whole question, and the model's output for the last token."""
    prefill = functools.partial(engine.prefill, chunk=chunk, **needs(policy.scorer_method, engine))
    question = tokens[context:]
    if question or context == 1:
        whole, output = prefill(tokens[:context]), None
    else:  # the last token's own output comes before anything is dropped
        whole = prefill(tokens[:-1])
        held = whole.state.physical_lengths
        _, output = _continue(engine, forward, whole.state, tokens[-1:])
        whole.state.truncate(held)
        whole.append(tokens[-1:])
    with whole:
        child = whole.compact(policy)
    run.kept.append(child.kept)
    run.stats.append(child.stats)
    if question:
        return _continue(engine, forward, child.state, question)
    if output is None:
        _, output = _continue(engine, forward, engine.empty_state(0), tokens)
    return engine.continuing([child.state]), output


def _continue(engine: HFEngine, forward: Any, state: SessionState, tokens: Sequence[int]) -> tuple[SessionCache, Any]:
    cache = engine.continuing([state])
    ids = torch.tensor([list(tokens)], device=engine.device)
    return cache, forward(input_ids=ids, logits_to_keep=1, **forward_keywords(engine.model, cache))

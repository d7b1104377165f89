"""What a model gets so that `model.generate(question_ids, cache)` continues a session correctly.

All on this one instance and all undone by `detach`: our attention function in its config, a `forward` that
sets logical positions and takes padded rows apart, and a `prepare_inputs_for_generation` that does not cut
the question short. With any other cache each of them steps aside. On CPU the linear layers also get
`linear.py`'s one-token product.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wakesight.arguments import mask_of
from wakesight.engines.hf import attention, compat, linear
from wakesight.engines.hf.cache import SessionCache, is_question_only
from wakesight.errors import RequestError, WorkError

_CACHE_NAMES = ("cache", "past_key_values")


def attach(model: Any, implementation: str) -> Callable[[], None]:
    """Prepare `model` (implementation: "sdpa" or "eager"); returns the function that undoes it."""
    attention.register()
    before = model.config._attn_implementation
    if before in (attention.SDPA, attention.EAGER):
        raise RequestError("this model belongs to an engine already; use that engine, or close() it first")
    chosen = {"sdpa": attention.SDPA, "eager": attention.EAGER}.get(implementation)
    if chosen is None:
        raise RequestError(f"attention {implementation!r} is unknown; use sdpa or eager")
    model.set_attn_implementation(chosen)
    restore = [
        linear.split_one_token(model),
        override(model, "forward", functools.partial(_forward, model.config)),
        override(model, "prepare_inputs_for_generation", _prepare),
    ]

    def detach() -> None:
        for undo in reversed(restore):
            undo()
        model.set_attn_implementation(before)

    return detach


def override(model: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Give this one model `wrap(its bound method)` under `name`; returns the function that undoes it."""
    own = vars(model).get(name)
    setattr(model, name, _Override(model, name, wrap(getattr(model, name))))

    def undo() -> None:
        if own is None:
            delattr(model, name)
        else:
            setattr(model, name, own)

    return undo


class _Override:
    """A method of one model object. A deep copy of the model gets its class's own method instead."""

    def __init__(self, model: Any, name: str, call: Any) -> None:
        functools.update_wrapper(self, call)
        self._model, self._name, self._call = model, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(getattr(type(self._model), self._name), memo[id(self._model)])


def session_cache(kwargs: dict[str, Any]) -> SessionCache | None:
    """Our cache among the arguments of a forward pass, under either of its names."""
    return next((kwargs[name] for name in _CACHE_NAMES if isinstance(kwargs.get(name), SessionCache)), None)


def _forward(config: Any, stock: Any) -> Any:
    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = session_cache(kwargs)
        if cache is None:
            return stock(*args, **kwargs)
        if cache.config is not config:
            raise RequestError("this cache was made by another model; its entries mean nothing to this one")
        if args:  # a look at the signature costs as much as a small layer: not in every decode step
            kwargs = {**inspect.signature(stock).bind_partial(*args).arguments, **kwargs}
        return _continued(stock, cache, kwargs)

    return forward


def _continued(run: Any, cache: SessionCache, kwargs: dict[str, Any]) -> Any:
    name = "input_ids" if kwargs.get("input_ids") is not None else "inputs_embeds"
    inputs: Tensor = kwargs[name]
    if inputs.shape[0] != cache.rows:
        _fork(cache, inputs.shape[0])
    pads = left_pads(kwargs.get("attention_mask"), inputs.shape[1], inputs.shape[0])
    cache.fresh = False
    if not any(pads) and cache.stepwise and inputs.shape[1] > 1 and cache.logical_lengths[0]:
        steps = [_continued(run, cache, {**kwargs, name: step}) for step in torch.split(inputs, 1, dim=1)]
        return with_logits(steps[-1], torch.cat([step.logits for step in steps], dim=1), cache)
    if not any(pads):
        positions = _positions(cache, inputs.shape[1], inputs.device)
        with cache.forward_pass():
            output = run(**{**kwargs, "position_ids": positions, "attention_mask": None})
        check_finite(output.logits)
        return output
    # A pad would become an entry, and would change recurrent states: padded rows run one by one without them.
    outputs, rows = [], [cache.row(index) for index in range(cache.rows)]
    for index, row in enumerate(rows):
        own = {**kwargs, name: inputs[index : index + 1, pads[index] :]}
        outputs.append(_continued(run, row, {**_with_cache(own, row), "attention_mask": None}))
    cache.take_rows(rows)
    return _joined(outputs, cache)


def check_finite(logits: Tensor) -> None:
    """Raise WorkError where the model's numbers overflowed: the best of them would be chosen by chance."""
    if not bool(torch.isfinite(logits).all()):
        raise WorkError(
            "the model computed numbers that are not finite: its activations overflow this dtype; "
            "load it with --dtype float32 or bfloat16"
        )


def _fork(cache: SessionCache, rows: int) -> None:
    """Beams and several return sequences: every row of a fresh cache becomes equally many."""
    if not cache.fresh or rows % cache.rows:
        held = "one sequence" if cache.rows == 1 else f"{cache.rows} sequences"
        raise RequestError(
            f"this cache holds {held}, not a batch of {rows}; give generate one question per sequence, "
            "or take one cache() for each call"
        )
    cache.batch_repeat_interleave(rows // cache.rows)


def left_pads(attention_mask: Any, width: int, rows: int | None = None) -> list[int]:
    """Pads at the start of each row, from the mask's last `width` columns; 0s without a mask.

    Earlier columns belong to what a cache holds, which masks itself. rows: of the ids, when known; one row of a mask
    serves all of them. Raises RequestError for a mask that hides anything else than the start of a row, or that has
    another form.
    """
    if attention_mask is None:
        return [0] * (rows or 1)
    mask = mask_of(attention_mask)
    if mask.ndim != 2 or mask.shape[1] < width or (rows is not None and mask.shape[0] not in (1, rows)):
        raise RequestError(
            f"an attention mask of shape {list(mask.shape)} does not fit {width} tokens"
            f"{f' in {rows} rows' if rows else ''}; give one row of 0 and 1 per sequence, as a tokenizer makes it, "
            "or none"
        )
    seen = mask[:, mask.shape[1] - width :]
    if rows is not None:
        seen = seen.expand(rows, -1)
    pads: list[int] = (~seen).sum(dim=1).tolist()
    if any(bool((~row[count:]).any()) or count == len(row) for row, count in zip(seen, pads, strict=True)):
        raise RequestError("pad the rows on the left: an attention mask may hide the start of a row only")
    return pads


def _positions(cache: SessionCache, width: int, device: Any) -> Tensor:
    starts = torch.tensor(cache.logical_lengths, device=device)
    return starts[:, None] + torch.arange(width, device=device)


def _with_cache(kwargs: dict[str, Any], cache: SessionCache) -> dict[str, Any]:
    return {name: cache if name in _CACHE_NAMES and value is not None else value for name, value in kwargs.items()}


def _joined(outputs: list[Any], cache: SessionCache) -> Any:
    """One output for rows that ran apart: logits aligned at the right, zeros where a row had pads."""
    width = max(output.logits.shape[1] for output in outputs)
    logits = [torch.nn.functional.pad(o.logits, (0, 0, width - o.logits.shape[1], 0)) for o in outputs]
    return with_logits(outputs[0], torch.cat(logits), cache)


def with_logits(output: Any, logits: Tensor, cache: SessionCache) -> Any:
    """A model output of the same kind as `output`, with these logits and this cache."""
    held = {name: cache for name in _CACHE_NAMES if name in output.keys()}  # noqa: SIM118 - aliases are no keys
    return type(output)(logits=logits, **held)


def _prepare(stock: Any) -> Any:
    @functools.wraps(stock)
    def prepare_inputs_for_generation(input_ids: Any, next_sequence_length: Any = None, **kwargs: Any) -> Any:
        cache = session_cache(kwargs)
        if cache is not None and kwargs.get("is_first_iteration"):
            for index, row in enumerate(input_ids.tolist()):
                context = cache.tokens[index * cache.rows // len(input_ids)]  # beams repeat every row
                if not is_question_only(context, row):
                    raise RequestError(
                        f"the ids given to generate start with the {len(context)} context tokens that this cache "
                        "already holds; pass the question's ids only"
                    )
            next_sequence_length = None
        return stock(input_ids, next_sequence_length=next_sequence_length, **kwargs)

    return prepare_inputs_for_generation


def forward_keywords(module: Any, cache: SessionCache) -> dict[str, Any]:
    """Arguments of a forward pass that continues `cache`, under the names this transformers knows."""
    return {compat.cache_keyword(module): cache, "use_cache": True}

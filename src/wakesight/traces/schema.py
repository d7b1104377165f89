"""What a trace holds, and what can be wrong with one.

A trace is one run: a prompt, and every decode step behind it. Step t feeds one token, the *query*, at position
ctx_len[t] - 1, which sees the positions 0 .. ctx_len[t] - 1; tokens[t] is what the model then chose, the next step's
query. Step 0's query is the prompt's last token, so ctx_len[0] = prompt_len. Positions are absolute.

Source: WakeKV, section on the attention log; the array names are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wakesight.errors import RequestError

VERSION = 1  # of this schema; a store with another one is refused by name
TOP = 64  # attended positions kept per step, layer and query head
PAGE = 16  # positions of a page
WINDOW = 32  # prompt queries whose attention is summed up in prompt_mass

# name -> (dimensions, kind of dtype); S steps, L attention layers, H query heads, K = TOP kept positions
STEP_ARRAYS: Mapping[str, tuple[str, str]] = {
    "topk_idx": ("SLHK", "iu"),
    "topk_val": ("SLHK", "f"),
    "needle": ("SLH", "f"),
    "copy": ("SLH", "b"),
    "tokens": ("S", "iu"),
    "ctx_len": ("S", "iu"),
}
DTYPES = {"topk_idx": "int32", "needle": "float32", "copy": "bool", "tokens": "int32", "ctx_len": "int32"}


@dataclass(frozen=True, eq=False)
class Trace:
    """One run. S: steps, L: attention layers, H: query heads.

    topk_idx: int32 [S, L, H, 64], the attended positions by falling weight, -1 where there were fewer.
    topk_val: float32 or float16 [S, L, H, 64], their weights, 0 where there is no position.
    needle: float32 [S, L, H], needle share (Eq. 2). copy: bool [S, L, H], copy-paste score (Eq. 1).
    tokens, ctx_len: int32 [S].
    needle_spans: [start, end) positions. prompt_mass: float32 [L, H, prompt_len], attention that each position got
    from the last 32 prompt queries together; None if it was not logged. kv_heads: per attention layer.
    prompt_scores: by scorer, float32 [L, the most KV heads of a layer, P], its scores of the first P prompt positions,
    P <= prompt_len; a layer with fewer KV heads has zeros behind them.
    step: int32 [S], number of each step in the run; not 0, 1, 2, ... where damaged chunks were skipped.
    meta: model, fingerprint, regime, seed, depth, question, answer, versions, commit, as far as known.

    The two large arrays may be views of a store that are read where they are indexed (`store.Rows`);
    `numpy.asarray(trace.topk_idx)` reads all of one.
    """

    name: str
    topk_idx: NDArray[np.int32]
    topk_val: NDArray[np.floating[Any]]
    needle: NDArray[np.float32]
    copy: NDArray[np.bool_]
    tokens: NDArray[np.int32]
    ctx_len: NDArray[np.int32]
    prompt_len: int
    needle_spans: Sequence[tuple[int, int]]
    kv_heads: tuple[int, ...]
    page_size: int = PAGE
    prompt_mass: NDArray[np.float32] | None = None
    prompt_scores: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    step: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if len(self.step) == 0:
            object.__setattr__(self, "step", np.arange(len(self.tokens), dtype=np.int32))

    @property
    def steps(self) -> int:
        return len(self.tokens)

    @property
    def layers(self) -> int:
        return int(self.needle.shape[1])

    @property
    def query_heads(self) -> int:
        return int(self.needle.shape[2])


def check(trace: Trace) -> Trace:
    """The trace, or RequestError that names the first thing wrong with it and where it stands."""
    _check_shapes(trace)
    _check_heads(trace)
    _check_lengths(trace)
    _check_spans(trace)
    _check_scores(trace)
    _check_attention(trace)
    return trace


def _wrong(trace: Trace, what: str, advice: str) -> RequestError:
    return RequestError(f"the trace {trace.name}: {what}; {advice}")


def _check_shapes(trace: Trace) -> None:
    if trace.needle.ndim != 3 or trace.topk_idx.ndim != 4:
        shapes = f"needle has the shape {list(trace.needle.shape)}, topk_idx {list(trace.topk_idx.shape)}"
        raise _wrong(trace, shapes, f"give needle [step, layer, head] and topk_idx [step, layer, head, {TOP}]")
    steps, layers, heads = trace.needle.shape
    sizes = {"S": steps, "L": layers, "H": heads, "K": trace.topk_idx.shape[3]}
    for name, (axes, kinds) in STEP_ARRAYS.items():
        array, wanted = getattr(trace, name), [sizes[axis] for axis in axes]
        if list(array.shape) != wanted:
            raise _wrong(trace, f"{name} has the shape {list(array.shape)}", f"beside needle it must have {wanted}")
        if np.dtype(array.dtype).kind not in kinds:
            kind = {"iu": "whole numbers", "f": "floating-point numbers", "b": "booleans"}[kinds]
            raise _wrong(trace, f"{name} has the dtype {array.dtype}", f"it must hold {kind}")
    if not 1 <= sizes["K"] <= TOP or 0 in (steps, layers, heads):
        raise _wrong(
            trace,
            f"topk_idx has the shape {list(trace.topk_idx.shape)}",
            f"no axis may be empty, the last at most {TOP}",
        )
    mass = trace.prompt_mass
    if mass is not None and list(mass.shape) != [layers, heads, trace.prompt_len]:
        wanted = [layers, heads, trace.prompt_len]
        raise _wrong(trace, f"prompt_mass has the shape {list(mass.shape)}", f"it must have {wanted}, or be left out")


def _check_heads(trace: Trace) -> None:
    heads = trace.query_heads
    fits = all(count > 0 and heads % count == 0 for count in trace.kv_heads)
    if len(trace.kv_heads) != trace.layers or not fits:
        raise _wrong(
            trace, f"kv_heads={list(trace.kv_heads)} does not fit {trace.layers} layers of {heads} query heads",
            f"give one number per layer that divides {heads}",
        )  # fmt: skip
    if trace.page_size < 1:
        raise _wrong(trace, f"page_size={trace.page_size}", f"it must be at least 1, {PAGE} is usual")


def _check_lengths(trace: Trace) -> None:
    lengths = trace.ctx_len
    if trace.prompt_len < 1 or trace.prompt_len > lengths[0]:
        raise _wrong(
            trace, f"prompt_len={trace.prompt_len} and ctx_len[0]={lengths[0]}",
            "the first step sees the whole prompt, so 1 <= prompt_len <= ctx_len[0]",
        )  # fmt: skip
    if len(bad := np.flatnonzero(np.diff(lengths) < 1)):
        at = int(bad[0])
        raise _wrong(
            trace, f"ctx_len[{at}]={lengths[at]} and ctx_len[{at + 1}]={lengths[at + 1]}", "every step sees one more"
        )


def _check_spans(trace: Trace) -> None:
    for start, end in trace.needle_spans:
        if not 0 <= start < end <= trace.prompt_len:
            raise _wrong(
                trace, f"the needle span [{start}, {end}] is not inside the prompt of {trace.prompt_len} positions",
                "give [start, end) with start < end",
            )  # fmt: skip


def _check_scores(trace: Trace) -> None:
    for scorer, scores in trace.prompt_scores.items():
        heads = [trace.layers, max(trace.kv_heads)]
        if scores.ndim != 3 or list(scores.shape[:2]) != heads or not 1 <= scores.shape[2] <= trace.prompt_len:
            raise _wrong(
                trace, f"prompt_scores[{scorer!r}] has the shape {list(scores.shape)}",
                f"it must have {[*heads, trace.prompt_len]}, or fewer positions",
            )  # fmt: skip
        if not np.isfinite(scores).all():
            raise _wrong(trace, f"prompt_scores[{scorer!r}] holds a score that is not finite", "give finite scores")


def _check_attention(trace: Trace, block: int = 64) -> None:
    """In blocks of steps, so that a large log is never in memory at once."""
    for first in range(0, trace.steps, block):
        here = slice(first, min(first + block, trace.steps))
        idx, val = np.asarray(trace.topk_idx[here]), np.asarray(trace.topk_val[here], dtype=np.float32)
        ordered = np.sort(idx, axis=-1)
        twice = np.zeros(idx.shape, bool)
        twice[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        beyond = (idx < -1) | (idx >= trace.ctx_len[here, None, None, None])
        _first_bad(trace, beyond, first, "topk_idx holds a position that the step does not see", "use -1 for none")
        _first_bad(trace, twice, first, "topk_idx names a position twice", "give each position once")
        wrong = ~np.isfinite(val) | (val < 0)
        _first_bad(trace, wrong, first, "topk_val holds a weight below 0 or not finite", "give softmax weights")
        _first_bad(trace, (idx == -1) & (val != 0), first, "topk_val has a weight without a position", "write 0 there")
        too_much = val.sum(axis=-1, dtype=np.float64) > 1.01  # 64 float16 roundings stay below
        _first_bad(trace, too_much, first, "the weights of one head sum to more than 1", "give softmax weights")
        share = trace.needle[here]
        _first_bad(trace, ~(np.isfinite(share) & (share >= 0)), first, "needle is below 0 or not finite", "see Eq. 2")


def _first_bad(trace: Trace, bad: NDArray[np.bool_], first: int, what: str, advice: str) -> None:
    if bad.any():
        step, layer, head = (int(number) for number in np.argwhere(bad)[0][:3])
        raise _wrong(trace, f"{what} (step {first + step}, layer {layer}, head {head})", advice)

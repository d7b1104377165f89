"""Traces whose every event was put there on purpose, so that a study can be asked whether it finds them.

A quiet head looks at pages around its home and gives the needle next to nothing. What is planted is written over that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from wakesight.traces.schema import TOP, Trace

WORDS = 1000  # token ids that a planted run draws from; a marker lies above
REACH = 8 * TOP  # positions from its home on among which a head picks: most of 32 pages, others each step
HOME, AWAY = 4, 40  # pages without one in common within reach


def planted_trace(
    seed: int = 0,
    *,
    steps: int = 200,
    layers: int = 2,
    heads: int = 3,
    prompt_len: int = 1280,
    wakes: Iterable[tuple[int, int, int]] = (),
    warning: int = 0,
    marker: int | None = None,
    moves: Iterable[tuple[int, int, int, int]] = (),
    tokens: Sequence[int] | None = None,
    regime: str = "planted",
    model: str = "tiny",
) -> Trace:
    """A run of random quiet heads with events written into it.

    wakes: (step, layer, head) at which a head's needle share rises to 0.8, for one step. warning: so many steps before
    a wake the head looks at other pages for one step, which signals may notice. marker: a token id written two steps
    before every wake. moves: (step, layer, head, page) from which on a head looks around another page. tokens: in place
    of random ones below WORDS.
    """
    noise = np.random.default_rng(seed)
    shape = (steps, layers, heads)
    context = prompt_len + np.arange(steps)
    home = np.full(shape, 16 * HOME)
    for step, layer, head, page in moves:
        home[step:, layer, head] = 16 * page
    needle = noise.uniform(0, 0.04, shape).astype(np.float32)
    written = np.array(noise.integers(WORDS, size=steps) if tokens is None else tokens, dtype=np.int32)
    for step, layer, head in wakes:
        needle[step, layer, head] = 0.8
        if warning and step >= warning:
            home[step - warning, layer, head] = 16 * AWAY
        if marker is not None and step >= 2:
            written[step - 2] = marker
    near = np.argsort(noise.random((*shape, REACH)), axis=-1)[..., :TOP]  # distinct positions around home
    weights = -np.sort(-noise.random((*shape, TOP)), axis=-1)
    return Trace(
        name=f"planted-{seed}",
        topk_idx=(home[..., None] + near).astype(np.int32),
        topk_val=(weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32),
        needle=needle,
        copy=needle > 0.5,
        tokens=written,
        ctx_len=context.astype(np.int32),
        prompt_len=prompt_len,
        needle_spans=[(0, 16)],
        kv_heads=(1,) * layers,
        meta={"model": model, "regime": regime, "seed": seed},
    )

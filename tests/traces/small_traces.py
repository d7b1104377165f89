"""Random little traces that obey the schema."""

from __future__ import annotations

import numpy as np

from wakesight.traces.schema import Trace


def small_trace(
    seed=0, steps=9, layers=2, heads=4, kv_heads=(2, 4), prompt=37, top=8, mass=True, dtype="float32", name="small",
    scored=0,
) -> Trace:  # fmt: skip
    """Rows with distinct positions by falling weight, some of them short. scored: prompt positions with scores."""
    rng = np.random.default_rng(seed)
    ctx_len = prompt + np.arange(steps, dtype=np.int32)
    idx = np.full((steps, layers, heads, top), -1, np.int32)
    val = np.zeros((steps, layers, heads, top), dtype)
    for place in np.ndindex(steps, layers, heads):
        count = int(rng.integers(1, top + 1))
        idx[place][:count] = rng.permutation(ctx_len[place[0]])[:count]
        val[place][:count] = np.sort(rng.integers(1, 9, count) / 8 / top)[::-1]  # many equal weights
    return Trace(
        name=name,
        topk_idx=idx,
        topk_val=val,
        needle=rng.random((steps, layers, heads), np.float32),
        copy=rng.random((steps, layers, heads)) < 0.3,
        tokens=rng.integers(0, 99, steps).astype(np.int32),
        ctx_len=ctx_len,
        prompt_len=prompt,
        needle_spans=((5, 9),),
        kv_heads=kv_heads,
        prompt_mass=rng.random((layers, heads, prompt), np.float32) if mass else None,
        prompt_scores={"keydiff": rng.normal(size=(layers, max(kv_heads), scored)).astype("f4")} if scored else {},
        meta={"model": "none", "regime": "niah", "seed": seed},
    )

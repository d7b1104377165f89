"""An artifact of random numbers for a tiny model, so that every scorer and every allocation runs on it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wakesight.core import Table, Tables
from wakesight.estimator.artifact import Artifact, described
from wakesight.estimator.features import READERS, FeatureSpec
from wakesight.estimator.net import LayerNets, Reader, empty_reader, initial
from wakesight.learning.query_statistics import collect, taps
from wakesight.scores.base import for_model, has_probe, score
from wakesight.testing import tiny

if TYPE_CHECKING:
    from wakesight.core import Scores
    from wakesight.engines.hf.engine import HFEngine
    from wakesight.engines.session import Session

SPREAD = 6.0  # factor on the last weights, so that scores fill most of [0, 1]
HEARD = 64  # tokens that query statistics are measured on


def random_artifact(engine: HFEngine, seed: int = 0, hidden: int = 8) -> Artifact:
    """Tables, readers and query statistics for the engine's model; the same seed gives the same artifact.

    Readers are "signals" and "signals+keys" where the model has native signals, else "hidden" and "hidden+keys".
    hidden: units of each network. A model whose entries cannot be evicted gets tables only: no scorer runs on it.
    """
    noise = torch.Generator().manual_seed(seed)
    geometry = engine.geometry
    tables = Tables(*(_table(geometry.kv_heads, noise) for _ in dataclasses.fields(Tables)))
    made = Artifact(engine.weights_fingerprint(), described(geometry), tables)
    if engine.only_whole is not None:
        return made
    names = ("signals", "signals+keys") if geometry.native_heads else ("hidden", "hidden+keys")
    width = _hidden_size(engine)
    shapes = {name: empty_reader(FeatureSpec(READERS[name]), geometry, hidden, width) for name in names}
    readers = {name: _filled(reader, noise) for name, reader in shapes.items()}
    return made.replaced(readers=readers, query_stats=_query_stats(engine))


def fitted(engine: HFEngine, seed: int = 0) -> HFEngine:
    """The engine itself, from now on with `random_artifact`."""
    engine.artifact = random_artifact(engine, seed)  # a cached property: what is set takes its place
    return engine


def scores_of(session: Session, scorer: Any) -> Scores:
    """What `scorer` gives on a session, by itself or by a second pass, as `compact` would get it."""
    from wakesight.engines.probe import score_by_probe

    method = for_model(scorer, session.engine)
    if has_probe(method):
        return score_by_probe(method, session)
    return score(method, session.signals(method), session.engine.geometry.kv_heads)  # type: ignore[arg-type]


def _table(kv_heads: tuple[int, ...], noise: torch.Generator) -> Table:
    """Numbers in [0.2, 1): no two heads are alike and none is next to nothing."""
    return tuple(tuple((0.2 + 0.8 * torch.rand(heads, generator=noise)).tolist()) for heads in kv_heads)


def _filled(reader: Reader, noise: torch.Generator) -> Reader:
    layers = []
    for nets in reader.layers:
        first, first_bias, second, second_bias = initial(nets.heads, nets.inputs, nets.first.shape[2], noise)
        mean = torch.randn(nets.inputs, generator=noise).expand(nets.heads, -1).contiguous()
        std = (0.5 + torch.rand(nets.heads, nets.inputs, generator=noise)).contiguous()
        layers.append(LayerNets(mean, std, first, first_bias, second * SPREAD, second_bias, shared=nets.shared))
    return Reader(reader.features, reader.windows, tuple(layers))


def _hidden_size(engine: HFEngine) -> int:
    """Width of what enters attention; some families join two streams there."""
    with engine.prefill(tiny.tokens(2), record=["hidden"]) as session:
        return session.signals()["hidden"][0].shape[1]


def _query_stats(engine: HFEngine) -> dict[str, Tensor]:
    """Measured on random tokens, in one pass from nothing: RoPE's frequencies show between neighbours."""
    heard = taps(len(engine.geometry.attention_layers))
    state = engine.empty_state(HEARD)
    try:
        engine.overhear(state, tiny.tokens(HEARD, seed=5), heard)
    finally:
        state.release()
    return collect(heard)

"""What both halves must agree on: the model's attention layers, which block group each has, and its artifact.

Read from vLLM's own KV-cache config, which scheduler and worker both get, and from the model's config.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakesight.core import LayerIndex, ModelGeometry, Tables
from wakesight.errors import RequestError
from wakesight.estimator.artifact import Artifact

ARTIFACT = "WAKESIGHT_VLLM_ARTIFACT"


@dataclass(frozen=True)
class Facts:
    """Of one engine. layers: names of the attention layers, by depth. groups: the KV-cache group of each.

    recurrent: names of the recurrent layers, by depth. block_size: tokens per block of the attention groups.
    block_bytes: of one block, whatever it holds. folder: of the artifact, None without one.
    """

    model: str
    geometry: ModelGeometry
    layers: tuple[str, ...]
    groups: tuple[int, ...]
    recurrent: tuple[str, ...]
    block_size: int
    block_bytes: int
    folder: Path | None

    @functools.cached_property
    def artifact(self) -> Artifact | None:
        """What was learned about the model, checked against its weights; None if there is nothing."""
        from wakesight.models.fingerprint import checkpoint_fingerprint

        if self.folder is None:
            return None
        found = Artifact.load(self.folder)
        found.check(self.geometry, checkpoint_fingerprint(Path(self.model)))
        return found

    def tables(self, rule: object) -> Tables | None:
        """What was measured of the model, for an allocation that needs it."""
        if not hasattr(rule, "needs_table") or self.artifact is None:
            return None
        return self.artifact.tables


def facts_of(kv_cache_config: Any, model_config: Any, query_heads: int) -> Facts:
    """From vLLM's KVCacheConfig and ModelConfig. query_heads: of one attention layer."""
    from wakesight.models.families import family_of
    from wakesight.models.load import own_artifact

    attention: list[tuple[int, str, int, Any]] = []
    recurrent: list[tuple[int, str, Any]] = []
    for group, found in enumerate(kv_cache_config.kv_cache_groups):
        spec, name = found.kv_cache_spec, found.layer_names[0]
        if hasattr(spec, "wakesight_layer"):
            attention.append((depth(name), name, group, spec))
        else:
            recurrent.append((depth(name), name, spec))
    attention.sort()
    recurrent.sort(key=lambda row: row[:2])
    config = model_config.hf_text_config
    family = family_of(config)
    specs = [spec for *_, spec in attention]
    geometry = ModelGeometry(
        family=family.name,
        n_layers=int(config.num_hidden_layers),
        attention_layers=tuple(LayerIndex(at) for at, *_ in attention),
        recurrent_layers=tuple(LayerIndex(at) for at, *_ in recurrent),
        query_heads=query_heads,
        kv_heads=tuple(spec.num_kv_heads for spec in specs),
        key_dims=tuple(spec.head_size for spec in specs),
        value_dims=tuple(spec.head_size_v or spec.head_size for spec in specs),
        itemsize=specs[0].dtype.itemsize,
        max_positions=int(config.max_position_embeddings),
        native_heads=tuple(spec.shapes[-1][0] for *_, spec in recurrent) if family.native_signals else (),
    )
    chosen = os.environ.get(ARTIFACT)
    return Facts(
        model=model_config.model,
        geometry=geometry,
        layers=tuple(name for _, name, *_ in attention),
        groups=tuple(group for *_, group, _ in attention),
        recurrent=tuple(name for _, name, _ in recurrent),
        block_size=specs[0].block_size,
        block_bytes=specs[0].page_size_bytes,
        folder=Path(chosen) if chosen else own_artifact(model_config.model),
    )


def depth(name: str) -> int:
    """The layer's number in "model.layers.3.self_attn.attn". Raises RequestError for a name without one."""
    found = re.search(r"\blayers\.(\d+)\.", name + ".")
    if found is None:
        raise RequestError(f"the layer {name!r} has no number, so wakesight cannot tell its depth; use another model")
    return int(found[1])

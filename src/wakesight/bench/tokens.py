"""Contexts for timings: speed does not depend on what a text says."""

from __future__ import annotations

import torch

from wakesight.engines.hf.engine import HFEngine


def random_tokens(engine: HFEngine, count: int, seed: int = 0) -> list[int]:
    """`count` token ids from the middle of the vocabulary, where no control tokens live."""
    vocabulary = engine.model.get_input_embeddings().weight.shape[0]
    noise = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(vocabulary // 8, vocabulary // 8 * 7, (count,), generator=noise)]

"""Labels whose answer is known: utility is a function of a few native signals, or of nothing at all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wakesight.core import ModelGeometry, Signals
from wakesight.learning.dataset import Labels
from wakesight.learning.labelled import LabelledDocument

CORPORA = ("code", "math", "news")
HEADS, DIM, HIDDEN, RECURRENT_HEADS = 2, 8, 12, 4


def geometry(family: str = "planted", native: bool = True) -> ModelGeometry:
    """Eight layers: G G G A G G G A."""
    return ModelGeometry(
        family=family, n_layers=8, attention_layers=(3, 7), recurrent_layers=(0, 1, 2, 4, 5, 6), query_heads=4,
        kv_heads=(HEADS, HEADS), key_dims=(DIM, DIM), value_dims=(DIM, DIM), itemsize=4, max_positions=4096,
        native_heads=(RECURRENT_HEADS,) * 6 if native else (),
    )  # fmt: skip


def signals(tokens: int, seed: int, prefix: int = 3) -> Signals:
    """Random signals of the planted geometry."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise)

    native = []
    for layer in range(6):
        beta = torch.sigmoid(normal(tokens, RECURRENT_HEADS))
        slowness = torch.logspace(0, -4, RECURRENT_HEADS) * (1 + layer)
        decay = -slowness * torch.exp(0.3 * normal(tokens, RECURRENT_HEADS))
        native.append(torch.stack([beta, decay, torch.exp(0.5 * normal(tokens, RECURRENT_HEADS))], dim=-1))
    return Signals(
        tokens,
        prefix,
        (DIM**-0.5,) * 2,
        {
            "native": tuple(native),
            "keys": tuple(normal(HEADS, tokens, DIM) + normal(HEADS, 1, DIM) for _ in range(2)),
            "value_norms": tuple(normal(HEADS, tokens).abs() for _ in range(2)),
            "hidden": tuple(normal(tokens, HIDDEN) for _ in range(2)),
        },
    )


def from_signals(found: Signals, layer: int) -> torch.Tensor:
    """Utility [head, token] that a small network can read: a bent product of two cells of the window."""
    first, second = found["native"][2 * layer], found["native"][2 * layer + 1]
    rows = [torch.exp(2 * first[:, head, 0] * second[:, head, 2].clamp_max(3)) for head in range(HEADS)]
    return torch.stack(rows) * (1 + 4 * layer)


def shuffled(found: Signals, layer: int) -> torch.Tensor:
    """The same values, dealt out at random."""
    values = from_signals(found, layer)
    noise = torch.Generator().manual_seed(int(values.sum() * 1000) % 2**31)
    return values[:, torch.randperm(values.shape[1], generator=noise)]


def labels(
    per_corpus: int = 6, tokens: int = 220, utility: Callable[[Signals, int], torch.Tensor] = from_signals,
    corpora: tuple[str, ...] = CORPORA, native: bool = True,
) -> Labels:  # fmt: skip
    def documents():
        for c, corpus in enumerate(corpora):
            for number in range(per_corpus):
                found = signals(tokens + number, seed=100 * c + number)
                of_layers = tuple(utility(found, layer).float() for layer in range(2))
                if not native:
                    streams = {name: value for name, value in found.streams.items() if name != "native"}
                    found = Signals(found.tokens, found.prefix, found.scaling, streams)
                yield LabelledDocument(f"{corpus}-{number}", corpus, found.tokens, found.prefix, of_layers, found, {})

    return Labels(geometry(native=native), "f" * 64, documents)

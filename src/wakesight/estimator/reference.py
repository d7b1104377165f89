"""A reader as it is meant: one network at a time, inputs standardised in the open, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from wakesight.core import Signals
from wakesight.estimator.net import Reader


def scores(reader: Reader, signals: Signals) -> tuple[Tensor, ...]:
    """What `Reader.scores` gives, [kv_head, token] per attention layer."""
    layers = []
    for layer, nets in enumerate(reader.layers):
        rows = []
        for head in range(nets.heads):
            x = reader.features.matrix(signals, layer, reader.windows[layer], head)[0]  # [token, input]
            x = (x - nets.mean[head]) / nets.std[head]
            inner = torch.relu(x @ nets.first[head] + nets.first_bias[head])
            rows.append(torch.sigmoid(inner @ nets.second[head] + nets.second_bias[head]))
        layers.append(torch.stack(rows))
    return tuple(layers)

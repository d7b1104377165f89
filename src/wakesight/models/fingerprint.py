"""Which model is this? A digest of its architecture and of a sample of every weight."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

SAMPLES = 16  # numbers read of every parameter: training moves all of them, and reading all would take minutes
_NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")


def fingerprint(model: Any) -> str:
    """Hex digest, the same on every device. The same weights in another dtype give another digest."""
    digest = hashlib.sha256(_architecture(model.config).encode())
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if weight.numel():
            step = max(1, weight.numel() // SAMPLES)
            sample = weight.detach().reshape(-1)[::step].to("cpu", torch.float32)
            digest.update(sample.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _architecture(config: Any) -> str:
    plain = config.to_dict()
    for name in _NOT_ARCHITECTURE:
        plain.pop(name, None)
    return json.dumps(plain, sort_keys=True, default=str)

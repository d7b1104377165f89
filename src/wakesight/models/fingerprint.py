"""Which model is this? A digest of its architecture and of a sample of every weight."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

SAMPLES = 16  # numbers read of every parameter: training moves all of them, and reading all would take minutes
# What changes the computation without changing a weight's shape; other fields change with transformers' versions.
ARCHITECTURE = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "layer_norm_eps", "rope_parameters", "partial_rotary_factor", "sliding_window", "num_experts_per_tok",
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "query_pre_attn_scalar",
)  # fmt: skip


def fingerprint(model: Any, any_dtype: bool = False) -> str:
    """Hex digest, the same on every device. The same weights in another dtype give another digest.

    any_dtype: digest of the weights rounded to bfloat16 instead, the same for a checkpoint loaded as bfloat16 or
    float32. What was learned about a model holds in every dtype; a saved cache does not.
    """
    digest = hashlib.sha256(_architecture(model.config).encode())
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tuple(weight.shape)} {'' if any_dtype else weight.dtype}".encode())
        if weight.numel():
            step = max(1, weight.numel() // SAMPLES)
            sample = weight.detach().reshape(-1)[::step].to("cpu", torch.float32)
            if any_dtype:
                sample = sample.to(torch.bfloat16).float()
            digest.update(sample.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _architecture(config: Any) -> str:
    text = config.get_text_config(decoder=True)
    return json.dumps({name: getattr(text, name, None) for name in ARCHITECTURE}, sort_keys=True, default=str)

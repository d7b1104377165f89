"""Which model is this? A digest of its architecture and of a sample of every weight."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from wakesight.errors import RequestError

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
        _add(digest, name, weight, any_dtype)
    return digest.hexdigest()


def _add(digest: Any, name: str, weight: torch.Tensor, any_dtype: bool) -> None:
    digest.update(f"{name} {tuple(weight.shape)} {'' if any_dtype else weight.dtype}".encode())
    if weight.numel():
        step = max(1, weight.numel() // SAMPLES)
        sample = weight.detach().reshape(-1)[::step].to("cpu", torch.float32)
        if any_dtype:
            sample = sample.to(torch.bfloat16).float()
        digest.update(sample.contiguous().numpy().tobytes())


def _architecture(config: Any) -> str:
    text = config.get_text_config(decoder=True)
    return json.dumps({name: getattr(text, name, None) for name in ARCHITECTURE}, sort_keys=True, default=str)


def checkpoint_fingerprint(folder: Path) -> str:
    """`fingerprint(model, any_dtype=True)` of a model folder, read from its safetensors without building the model.

    Raises RequestError for a folder whose weights go by other names than the model's.
    """
    import transformers
    from safetensors import safe_open

    files = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            files.update(dict.fromkeys(weights.keys(), file))
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    named = sorted(model.state_dict(keep_vars=True).items())
    stored = {id(weight): name for name, weight in named if name in files}
    digest = hashlib.sha256(_architecture(model.config).encode())
    for name, weight in named:
        if id(weight) not in stored:
            raise RequestError(
                f"the folder {folder} stores no weight {name}, so it cannot be told whether an estimator belongs to "
                "it; use the folder that the estimator was fitted on"
            )
        key = stored[id(weight)]
        with safe_open(files[key], "pt") as weights:
            _add(digest, name, weights.get_tensor(key), any_dtype=True)
    return digest.hexdigest()

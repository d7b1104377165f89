"""Fast CPU training forward of a transformers `Qwen3_5ForCausalLM`, on the model's own parameters (float32).

It computes what the stock forward computes, without padding, cache or dropout, several times faster; gradients land in
the model's parameters. `python -m training.fast --bench` prints its speed next to the stock one.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from training.kernels import causal_attention, conv_silu, delta_rule, gated_norm, rms_norm, swiglu
from wakesight.errors import RequestError


def hidden_states(model: Qwen3_5ForCausalLM, ids: Tensor, attention_scale: Tensor | None = None) -> Tensor:
    """Last hidden states, after the final norm: the stock `model.model(ids).last_hidden_state`.

    Args:
        ids: [B, T] token ids; every row is a whole sequence, there is no padding.
        attention_scale: [B] or [attention layers, B] factors on the output of the attention layers; 0 closes a layer
            for that row, 1 leaves it.

    Returns:
        [B, T, hidden]. RequestError if the model is not float32 on the CPU, has what this path leaves out (attention
        dropout, biases, scaled RoPE, another activation), or a shape does not fit.
    """
    config = model.config
    _check(model, ids)
    scales = _scales(config, ids.shape[0], attention_scale)
    rotary = _rotary(ids.shape[1], _rotary_dim(config), float(config.rope_parameters["rope_theta"]))
    x = F.embedding(ids, model.model.embed_tokens.weight)
    for layer in model.model.layers:
        h = _norm(layer.input_layernorm, x)
        if layer.block_type == "linear_attention":
            x = x + _delta_net(layer.linear_attn, h)
        else:
            out = _attention(layer.self_attn, h, rotary)
            scale = next(scales)
            x = x + (out if scale is None else out * scale[:, None, None])
        x = x + _mlp(layer.mlp, _norm(layer.post_attention_layernorm, x))
    return _norm(model.model.norm, x)


def loss(
    model: Qwen3_5ForCausalLM, ids: Tensor, weights: Tensor, attention_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted next-token loss and which predictions were right.

    Args:
        ids: [B, T] token ids.
        weights: [B, T - 1], >= 0; weights[b, t] belongs to the prediction of ids[b, t + 1].
        attention_scale: as in `hidden_states`.

    Returns:
        Scalar sum(weights * cross entropy) / sum(weights), and a bool mask [B, T - 1], True where the most probable
        token is ids[b, t + 1]. RequestError on a wrong shape or if all weights are zero.
    """
    batch, tokens = ids.shape
    if weights.shape != (batch, tokens - 1):
        raise RequestError(f"weights are {tuple(weights.shape)}; for these ids they must be {(batch, tokens - 1)}")
    total = weights.sum()
    if not total > 0:
        raise RequestError("all loss weights are zero; give at least one token of the batch a weight")
    states = hidden_states(model, ids, attention_scale)[:, :-1].reshape(batch * (tokens - 1), -1)
    logits = F.linear(states, model.lm_head.weight)
    targets = ids[:, 1:].reshape(-1)
    losses = F.cross_entropy(logits, targets, reduction="none")
    correct = (logits.detach().argmax(-1) == targets).view(batch, tokens - 1)
    return (losses * weights.reshape(-1)).sum() / total, correct


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.eps)  # type: ignore[arg-type]


def _joint(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Outputs of several projections of x, as slices of one large matrix product: faster than several small ones."""
    widths = [layer.out_features for layer in layers]
    return torch.split(F.linear(x, torch.cat([layer.weight for layer in layers])), widths, -1)


def _mlp(module: Any, x: Tensor) -> Tensor:
    both = F.linear(x, torch.cat((module.gate_proj.weight, module.up_proj.weight)))
    return F.linear(swiglu(both), module.down_proj.weight)


def _delta_net(module: Any, x: Tensor) -> Tensor:
    qkv, z, b, a = _joint(x, module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
    qkv = conv_silu(qkv, module.conv1d.weight)
    g = -module.A_log.exp() * F.softplus(a + module.dt_bias)
    out = delta_rule(qkv, g, b.sigmoid(), module.num_k_heads, module.head_k_dim)
    out = gated_norm(out, z, module.norm.weight, module.norm.variance_epsilon)
    return F.linear(out, module.out_proj.weight)


def _attention(module: Any, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    batch, tokens, _ = x.shape
    dim = module.head_dim
    query_gate, key, value = _joint(x, module.q_proj, module.k_proj, module.v_proj)
    query, gate = query_gate.view(batch, tokens, -1, 2 * dim).chunk(2, -1)
    query = _rotate(_norm(module.q_norm, query), rotary)
    key = _rotate(_norm(module.k_norm, key.reshape(batch, tokens, -1, dim)), rotary)
    out = causal_attention(query, key, value.reshape(batch, tokens, -1, dim)) * gate.sigmoid()
    return F.linear(out.view(batch, tokens, -1), module.o_proj.weight)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding on the first dims of every head of x [B, T, heads, d]."""
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


@functools.lru_cache(maxsize=16)
def _rotary(tokens: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, 1, dim / 2] of the rotation angles position * theta^(-2 i / dim)."""
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def _rotary_dim(config: Qwen3_5TextConfig) -> int:
    return int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _scales(config: Qwen3_5TextConfig, batch: int, scale: Tensor | None) -> Any:
    """Iterator over the scale [B] or None of every attention layer."""
    layers = config.layer_types.count("full_attention")
    if scale is None:
        return iter([None] * layers)
    if scale.shape not in ((batch,), (layers, batch)):
        raise RequestError(f"attention_scale is {tuple(scale.shape)}; give [{batch}] or [{layers}, {batch}]")
    return iter(scale.expand(layers, batch))


def _check(model: Qwen3_5ForCausalLM, ids: Tensor) -> None:
    config, weight = model.config, model.model.embed_tokens.weight
    refused = {
        f"weights in {weight.dtype} on {weight.device}": weight.dtype != torch.float32 or weight.device.type != "cpu",
        f"ids of shape {tuple(ids.shape)}": ids.ndim != 2,
        "attention dropout": model.training and config.attention_dropout > 0,
        "attention biases": bool(config.attention_bias),
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        f"RoPE of type {config.rope_parameters['rope_type']}": config.rope_parameters["rope_type"] != "default",
        f"a convolution of {config.linear_conv_kernel_dim} tokens": config.linear_conv_kernel_dim != 4,
    }
    found = next((name for name, present in refused.items() if present), None)
    if found is not None:
        raise RequestError(
            f"the fast training path has no {found}; it takes ids [B, T] and a plain float32 model on the CPU"
        )


def bench_config(hidden: int, layers: int, intermediate: int) -> Qwen3_5TextConfig:
    """The shape the speed is measured on: vocabulary 512, attention 4/2 x 64, delta net 2/4 x 64."""
    return Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )


def tokens_per_second(
    step: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, ids: Tensor, repeats: int = 4
) -> tuple[float, float]:
    """Tokens per second of forward and backward, by wall clock and by CPU time: the best of `repeats`.

    With one thread the second is what an idle machine would give; other processes lower the first.
    """
    best = [math.inf, math.inf]
    for turn in range(repeats + 1):
        model.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        step(model, ids).backward()  # type: ignore[no-untyped-call]
        if turn:
            best = [min(best[0], time.perf_counter() - wall), min(best[1], time.process_time() - cpu)]
    return ids.numel() / best[0], ids.numel() / best[1]


def bench(tokens: int, batch: int, threads: int) -> None:
    """Print a line per model shape: fast and stock tokens per second and their ratio."""
    torch.set_num_threads(threads)
    for hidden, layers, intermediate in ((128, 12, 256), (192, 12, 384)):
        torch.manual_seed(0)
        model = Qwen3_5ForCausalLM(bench_config(hidden, layers, intermediate)).train()
        ids = torch.randint(0, 512, (batch, tokens))
        millions = sum(p.numel() for p in model.parameters()) / 1e6

        def fast_step(model: Any, ids: Tensor) -> Tensor:
            return loss(model, ids, torch.ones(batch, tokens - 1))[0]

        def stock_step(model: Any, ids: Tensor) -> Tensor:
            return model(ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

        fast, stock = tokens_per_second(fast_step, model, ids), tokens_per_second(stock_step, model, ids)
        print(
            f"d{hidden} {layers} layers inter {intermediate} ({millions:.2f} M), {batch} x {tokens} tokens, {threads} "
            f"thread(s), tok/s wall (tok per CPU second): fast {fast[0]:.0f} ({fast[1]:.0f}), stock {stock[0]:.0f} "
            f"({stock[1]:.0f}), ratio {fast[0] / stock[0]:.2f} ({fast[1] / stock[1]:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", action="store_true", required=True, help="measure forward and backward")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    bench(arguments.tokens, arguments.batch, arguments.threads)


if __name__ == "__main__":
    main()

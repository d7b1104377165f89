"""Builds kernels.cpp and wraps its kernels as differentiable torch functions (float32, CPU).

Formulas stand beside the kernels in kernels.cpp. Every function takes tensors whose last axis is contiguous; where the
docstring says so, rows may be a slice of a wider tensor, so that the parts of a joint projection need no copy.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from wakesight.errors import RequestError, WorkError

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILE = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-fopenmp", "-fPIC", "-std=c++17")
# Linked without -ffast-math: with it, loading the library would switch denormal numbers off in the whole process.
LINK = ("-shared", "-fopenmp")
PARTS = 8  # runs of rows that sum their own weight gradient


def compiler() -> str | None:
    """Path of the C++ compiler: $CXX if set, else g++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Compile kernels.cpp unless the cache has it already, and return the library.

    The cache is $WAKESIGHT_KERNELS, else ~/.cache/wakesight/kernels. A library is named by the source, the flags, the
    compiler and the CPU, since -march=native code runs on its own kind of CPU only. RequestError without a compiler,
    WorkError if compiling fails.
    """
    cxx = compiler()
    if cxx is None:
        raise RequestError(
            "training needs a C++ compiler and found none; type: apt-get install g++, or set CXX to its path"
        )
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "wakesight" / "kernels"
    folder = Path(os.environ.get("WAKESIGHT_KERNELS", default))
    library = folder / f"kernels-{_fingerprint(cxx)}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unlinked, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
            _compile([cxx, *COMPILE, "-c", str(SOURCE), "-o", str(unlinked)])
            _compile([cxx, *LINK, str(unlinked), "-o", str(linked), "-lm"])
            linked.replace(library)
    return library


def delta_rule(qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_dim: int) -> Tensor:
    """Gated delta rule over whole sequences, from an empty state; queries and keys are made unit vectors here.

    Args:
        qkv: [B, T, 2 * key_heads * key_dim + value_heads * value_dim], the heads side by side. Contiguous.
        g: [B, T, value_heads] logarithm of the decay, <= 0.
        beta: [B, T, value_heads] write strength.
        key_heads: number of query and key heads; each serves value_heads / key_heads consecutive value heads.
        key_dim: width of a query or key head, a multiple of 16, as is value_dim.

    Returns:
        [B, T, value_heads * value_dim]. RequestError on shapes that do not fit.
    """
    value_heads = g.shape[-1]
    value_width = qkv.shape[-1] - 2 * key_heads * key_dim
    _require(g.shape == beta.shape == (*qkv.shape[:2], value_heads), "g and beta must be [B, T, value heads]")
    _require(value_heads % key_heads == 0, f"{value_heads} value heads cannot share {key_heads} key heads evenly")
    _require(
        value_width > 0 and value_width % value_heads == 0, "qkv is no 2 x key heads x key dim + value heads x dim"
    )
    value_dim = value_width // value_heads
    _require(key_dim % 16 == 0 and value_dim % 16 == 0, f"head dims {key_dim}, {value_dim} must be multiples of 16")
    return _DeltaRule.apply(qkv.contiguous(), g.contiguous(), beta.contiguous(), key_heads, key_dim)  # type: ignore[no-any-return, no-untyped-call]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention, scale d^-1/2; key heads serve consecutive query heads.

    query [B, T, heads, d], key and value [B, T, key heads, d], d a multiple of 16; returns [B, T, heads, d].
    """
    batch, tokens, heads, dim = query.shape
    key_heads = key.shape[2]
    _require(key.shape == value.shape == (batch, tokens, key_heads, dim), "key and value must be [B, T, key heads, d]")
    _require(heads % key_heads == 0, f"{heads} query heads cannot share {key_heads} key heads evenly")
    _require(dim % 16 == 0, f"head dim {dim} must be a multiple of 16")
    return _CausalAttention.apply(query.contiguous(), key.contiguous(), value.contiguous())  # type: ignore[no-any-return, no-untyped-call]


def conv_silu(x: Tensor, weight: Tensor) -> Tensor:
    """SiLU of a depthwise causal convolution. x [B, T, C] (may be a slice), weight [C, 1, 4]; returns [B, T, C]."""
    _require(weight.shape == (x.shape[-1], 1, 4), f"the convolution weight must be [{x.shape[-1]}, 1, 4]")
    return _ConvSilu.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 1.0) -> Tensor:
    """x / rms(x) * (offset + weight) over the last axis. x [..., C] (made contiguous)."""
    return _RmsNorm.apply(x.contiguous(), weight, eps, offset)  # type: ignore[no-any-return, no-untyped-call]


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(z) per head. x [B, T, heads * C], z the same (may be a slice), weight [C]."""
    _require(x.shape == z.shape and x.shape[-1] % weight.numel() == 0, "x and z must be [B, T, heads * C]")
    return _GatedNorm.apply(x.contiguous(), z, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up, with gate and up the halves of the last axis. both [..., 2 C]; returns [..., C]."""
    return _Swiglu.apply(both.contiguous())  # type: ignore[no-any-return, no-untyped-call]


class _DeltaRule(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_dim: int) -> Tensor:
        (batch, tokens, width), value_heads = qkv.shape, g.shape[-1]
        value_width = width - 2 * key_heads * key_dim
        sizes = (batch, tokens, key_heads, value_heads, key_dim, value_width // value_heads)
        out, error = qkv.new_empty(batch, tokens, value_width), qkv.new_empty(batch, tokens, value_width)
        chunks = -(-tokens // _library().chunk_tokens())
        states = qkv.new_empty(batch, value_heads, chunks, key_dim, sizes[-1])
        _call("delta_rule_forward", qkv, g, beta, out, error, states, *sizes)
        ctx.save_for_backward(qkv, g, beta, error, states)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        qkv, g, beta, error, states = ctx.saved_tensors
        dqkv, dg, dbeta = torch.empty_like(qkv), torch.empty_like(g), torch.empty_like(beta)
        _call("delta_rule_backward", qkv, g, beta, error, states, dout.contiguous(), dqkv, dg, dbeta, *ctx.sizes)
        return dqkv, dg, dbeta, None, None


class _CausalAttention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, tokens, heads, dim = query.shape
        out, lse = torch.empty_like(query), query.new_empty(batch, heads, tokens)
        ctx.sizes = (batch, tokens, heads, key.shape[2], dim)
        _call("attention_forward", query, key, value, out, lse, *ctx.sizes)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        saved = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in saved[:3]]
        _call("attention_backward", *saved, dout.contiguous(), *gradients, *ctx.sizes)
        return tuple(gradients)


class _ConvSilu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        taps = weight.squeeze(1).t().contiguous()
        out = x.new_empty(x.shape)
        _call("conv_silu_forward", x, _row_stride(x), taps, out, *x.shape)
        ctx.save_for_backward(x, taps)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, taps = ctx.saved_tensors
        dx, dtaps = x.new_empty(x.shape), x.new_empty(x.shape[0], *taps.shape)
        _call("conv_silu_backward", x, _row_stride(x), taps, dout.contiguous(), dx, dtaps, *x.shape)
        return dx, dtaps.sum(0).t().unsqueeze(1)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        width = x.shape[-1]
        out, inverse = torch.empty_like(x), x.new_empty(x.numel() // width)
        _call("rms_norm_forward", x, width, weight, offset, eps, out, inverse, inverse.numel(), width)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        dx, sums = torch.empty_like(x), x.new_empty(PARTS, width)
        sizes = (inverse.numel(), width, PARTS)
        _call("rms_norm_backward", x, width, weight, ctx.offset, inverse, dout.contiguous(), dx, sums, *sizes)
        return dx, sums.sum(0), None, None


class _GatedNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = weight.numel()
        sizes = (x.shape[0] * x.shape[1], x.shape[-1] // width, width)
        out, inverse = torch.empty_like(x), x.new_empty(sizes[0] * sizes[1])
        _call("gated_norm_forward", x, z, _row_stride(z), weight, eps, out, inverse, *sizes)
        ctx.save_for_backward(x, z, weight, inverse)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, z, weight, inverse = ctx.saved_tensors
        dx, dz, sums = torch.empty_like(x), torch.empty_like(x), x.new_empty(PARTS, weight.numel())
        _call(
            "gated_norm_backward",
            *(x, z, _row_stride(z), weight, inverse, dout.contiguous(), dx, dz, sums),
            *(*ctx.sizes, PARTS),
        )
        return dx, dz, sums.sum(0), None


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        _call("swiglu_forward", both, out, out.numel() // out.shape[-1], out.shape[-1])
        ctx.save_for_backward(both)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (both,) = ctx.saved_tensors
        dboth, width = torch.empty_like(both), dout.shape[-1]
        _call("swiglu_backward", both, dout.contiguous(), dboth, dout.numel() // width, width)
        return dboth


def _row_stride(x: Tensor) -> int:
    """Floats between one token and the next of x [B, T, C]; the batch rows must follow each other at the same pace."""
    batch, tokens, _ = x.shape
    stride = x.stride(1) if tokens > 1 else x.stride(0)
    dense = x.stride(2) == 1 and (batch == 1 or x.stride(0) == tokens * stride)
    _require(dense, f"rows of a tensor with strides {x.stride()} do not lie at one distance; pass a contiguous one")
    return stride


def _call(name: str, *arguments: Tensor | int | float) -> None:
    """Run a kernel on torch's number of threads: tensors go as pointers, floats as C floats, integers as C ints."""
    for tensor in arguments:
        if isinstance(tensor, Tensor):
            _require(
                tensor.dtype == torch.float32 and tensor.device.type == "cpu",
                f"the training kernels take float32 on the CPU, not {tensor.dtype} on {tensor.device}",
            )
    library = _library()
    library.set_threads(torch.get_num_threads())
    getattr(library, name)(*(_as_c(argument) for argument in arguments))


def _as_c(argument: Tensor | int | float) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build()))


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkError(f"compiling the training kernels failed; {' '.join(command)} said:\n{done.stderr[-2000:]}")


def _fingerprint(cxx: str) -> str:
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    kind = [next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags")]
    text = "\n".join([SOURCE.read_text(), *COMPILE, *LINK, version, *kind])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require(fits: bool, message: str) -> None:
    if not fits:
        raise RequestError(message)

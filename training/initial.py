"""The model's shape, and a start from which it learns to look things up within minutes instead of never.

Residual channels start with owners:

    block of attention layer 0 | block 1 | block 2 | a word's own | the last word | the one before | ... | bias

The bias channel is the same for every token: after the norm it is a constant, and the gates use it as a bias, since no
projection here has one. Every attention layer writes to its own block only, and nothing behind it reads that block but
the head. The embedding of a word is, in each block, the code of a group of words of its class: only all blocks
together name the word. What an attention layer looks up is thus one part of the answer, and no other layer can pass
the whole on in its place: an answer needs every attention layer that its class of words is spread over.

`start` sets weights by these roles; `constrain` keeps blocks theirs during training, everything else is free.
Recurrent layers 0 and 1 start as shift heads, which write a sketch of the last four words into their channels.
Attention layers start with heads that match two words and heads that match four.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from wakesight.evaluation.suites.closed import vocabulary as v

HEAD = 64
SHIFT, LAG, COPY = 0.1, 2.0, 0.3  # strength of a shift head's output, of a sketch in a key, of a copied block
LAGS = 4  # words back that the shift heads reach
QUERIES, RECURRENT = ("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # readers
QUIET = 0.01  # of other outputs into the residual stream, so that the structure is heard
EMBEDDING = 0.06  # standard deviation of an embedding's channels
# Groups of a class per attention layer, first to last; their product is at least the size of the class. A 1 means
# that the layer tells nothing within the class. Layers beyond the third repeat the row.
SPREAD = MappingProxyType(
    {
        "digit": (2, 5, 1),
        "code": (10, 1, 8),
        "noun": (1, 16, 8),
        "adjective": (8, 8, 1),
        "verb": (5, 1, 4),
        "variable": (8, 1, 8),
        "label": (1, 4, 2),
        "other": (6, 5, 5),
    }
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; every fourth layer is an attention layer."""

    layers: int = 12
    hidden: int = 192
    intermediate: int = 256
    query_heads: int = 4
    kv_heads: int = 2
    recurrent_key_heads: int = 2
    recurrent_value_heads: int = 4
    longest: int = 8192

    def config(self) -> Qwen3_5TextConfig:
        return Qwen3_5TextConfig(
            vocab_size=v.SIZE, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.query_heads, num_key_value_heads=self.kv_heads,
            head_dim=HEAD, linear_num_key_heads=self.recurrent_key_heads,
            linear_num_value_heads=self.recurrent_value_heads, linear_key_head_dim=HEAD, linear_value_head_dim=HEAD,
            linear_conv_kernel_dim=4, max_position_embeddings=self.longest, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            pad_token_id=v.IDS[v.PAD], bos_token_id=v.IDS[v.BOS], eos_token_id=v.IDS[v.EOS],
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Roles:
    """Who owns which residual channels, as [start, end). blocks: per attention layer. word: all channels that an
    embedding fills. lags: of the last four words, latest first. groups: [layer, word], the group of each word in
    each block; numbers run through all classes of a layer.
    """

    blocks: tuple[tuple[int, int], ...]
    word: tuple[int, int]
    lags: tuple[tuple[int, int], ...]
    groups: Tensor
    bias: int


def roles(shape: Shape) -> Roles:
    """The same for the same shape. The lags share half of the channels, the blocks three quarters of the rest."""
    layers = shape.layers // 4
    bias = shape.hidden - 1
    sketch = bias // (2 * LAGS)
    own = bias - LAGS * sketch
    width = own * 3 // 4 // layers
    blocks = tuple((i * width, (i + 1) * width) for i in range(layers))
    lags = tuple((own + i * sketch, own + (i + 1) * sketch) for i in range(LAGS))
    groups = torch.zeros(layers, v.SIZE, dtype=torch.long)
    for number, (name, words) in enumerate(v.CLASSES.items()):
        spread = SPREAD[name]
        for place, word in enumerate(words):
            rest = place
            for layer in range(layers):
                groups[layer, v.IDS[word]] = number * 64 + rest % spread[layer % 3]
                rest = rest // spread[layer % 3] if (layer + 1) % 3 else place
    return Roles(blocks, (0, own), lags, groups, bias)


def model(shape: Shape, seed: int) -> Qwen3_5ForCausalLM:
    """A float32 model with starting weights; the same seed gives the same weights."""
    built = Qwen3_5ForCausalLM(shape.config()).float()
    start(built, shape, seed)
    return built


@torch.no_grad()
def constrain(built: Qwen3_5ForCausalLM, part: Roles) -> None:
    """Attention outputs back into their blocks, blocks hidden from what follows, and words of one group back to one
    embedding in that block.
    """
    blocks = iter(part.blocks)
    written: list[tuple[int, int]] = []
    for layer in built.model.layers:
        attention = layer.block_type != "linear_attention"
        mixer = layer.self_attn if attention else layer.linear_attn
        _hide(written, *(getattr(mixer, name) for name in (QUERIES if attention else RECURRENT)))
        if attention:
            first, last = next(blocks)
            mixer.o_proj.weight[:first] = 0
            mixer.o_proj.weight[last:] = 0
            written.append((first, last))
        _hide(written, layer.mlp.gate_proj, layer.mlp.up_proj)
    embedding = built.model.embed_tokens.weight
    for groups, (first, last) in zip(part.groups, part.blocks, strict=True):
        sums = embedding.new_zeros(int(groups.max()) + 1, last - first).index_add_(0, groups, embedding[:, first:last])
        sizes = torch.bincount(groups).clamp(min=1)
        embedding[:, first:last] = (sums / sizes[:, None])[groups]


def _hide(blocks: list[tuple[int, int]], *projections: Any) -> None:
    for first, last in blocks:
        for projection in projections:
            projection.weight[:, first:last] = 0


def attention_layers(built: Qwen3_5ForCausalLM) -> Iterator[Any]:
    return (layer for layer in built.model.layers if layer.block_type != "linear_attention")


@torch.no_grad()
def start(built: Qwen3_5ForCausalLM, shape: Shape, seed: int) -> None:
    """Set every weight."""
    rng = torch.Generator().manual_seed(seed)
    part = roles(shape)
    _plain(built, rng)
    embedding = built.model.embed_tokens.weight.zero_()
    _normal(embedding[:, slice(*part.word)], EMBEDDING, rng)
    for groups, (first, last) in zip(part.groups, part.blocks, strict=True):
        codes = _normal(torch.empty(int(groups.max()) + 1, last - first), EMBEDDING, rng)
        embedding[:, first:last] = codes[groups]
    embedding[:, part.bias] = EMBEDDING * math.sqrt(part.word[1])
    sketch = _sketch(part, shape.hidden, rng)
    number = 0
    for index, layer in enumerate(built.model.layers):
        if layer.block_type != "linear_attention":
            _matching(layer.self_attn, shape, part, number, sketch, rng)
            number += 1
        elif index < LAGS // 2:
            _shifting(layer.linear_attn, shape, part, index, sketch, rng)
        else:
            _remembering(layer.linear_attn, part, rng)
    constrain(built, part)


def _sketch(part: Roles, hidden: int, rng: torch.Generator) -> Tensor:
    """Orthonormal directions of a word's channels, as many as a lag has channels, [sketch, hidden]."""
    size = part.word[1]
    rows = torch.linalg.qr(torch.randn(size, size, generator=rng))[0][: part.lags[0][1] - part.lags[0][0]]
    return torch.nn.functional.pad(rows, (0, hidden - size))


def _plain(built: Qwen3_5ForCausalLM, rng: torch.Generator) -> None:
    """Small outputs into the residual stream, so that the structure set below is heard."""
    for name, weight in built.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            scale = 0.7 / math.sqrt(weight.shape[1])
            _normal(weight, scale * (QUIET if "out_proj" in name or "down_proj" in name else 1.0), rng)


def _shifting(mixer: Any, shape: Shape, part: Roles, index: int, sketch: Tensor, rng: torch.Generator) -> None:
    """Memory of one token: q = k, decay e^-6, and values that the convolution delays by one or two tokens.

    Layer 0 delays the word itself, layer 1 what layer 0 wrote of the word before last.
    """
    _same_queries_and_keys(mixer, rng, spread=0.1)
    _gates(mixer, part, rng)
    keys, heads, width = mixer.key_dim, shape.recurrent_value_heads, len(sketch)
    weight, taps = mixer.in_proj_qkv.weight, mixer.conv1d.weight
    taps[2 * keys :].uniform_(-0.05, 0.05, generator=rng)
    channels = torch.arange(width)
    source = sketch
    if index:
        source = torch.zeros_like(sketch)
        source[channels, part.lags[2 * index - 1][0] + channels] = LAG
    for head in range(heads):
        lag = 1 + head * 2 // heads
        first = 2 * keys + head * HEAD
        sign = 1 - 2 * (head % 2)  # of two heads of a lag one reads the negative: the even part of SiLU cancels
        weight[first : first + width] = sign * source
        taps[first : first + HEAD, 0, 3 - lag] += 1
        target = part.lags[2 * index + lag - 1][0] + channels
        mixer.out_proj.weight[target, head * HEAD + channels] += sign * SHIFT
    _normal(mixer.in_proj_b.weight, 0.02, rng)
    mixer.in_proj_b.weight[:, part.bias] += 3 / 8  # beta 0.95
    mixer.A_log.fill_(math.log(6))
    mixer.dt_bias.fill_(_softplus_inverse(1.0))


def _remembering(mixer: Any, part: Roles, rng: torch.Generator) -> None:
    """One head forgets within a token, one within a few (longer strings of words), the others within 8 to 2,000."""
    _same_queries_and_keys(mixer, rng, spread=0.2)
    _gates(mixer, part, rng)
    taps = mixer.conv1d.weight[2 * mixer.key_dim :]
    taps.uniform_(-0.15, 0.15, generator=rng)
    taps[torch.arange(len(taps)), 0, torch.randint(0, 4, (len(taps),), generator=rng)] += 0.8
    spread = torch.rand(mixer.num_v_heads, generator=rng)
    half_lives = torch.exp(math.log(8) + spread * (math.log(2000) - math.log(8)))
    half_lives[0] = 0.3
    half_lives[1] = 1.5 + 4.5 * float(torch.rand(1, generator=rng))
    mixer.A_log.fill_(0.0)
    mixer.dt_bias.copy_(torch.log(torch.expm1(math.log(2) / half_lives)))


def _same_queries_and_keys(mixer: Any, rng: torch.Generator, spread: float) -> None:
    """q = k, so that a token reads its own writing at full strength."""
    keys = mixer.key_dim
    weight, taps = mixer.in_proj_qkv.weight, mixer.conv1d.weight
    weight[:keys] = weight[keys : 2 * keys]
    taps[: 2 * keys].uniform_(-spread / 2, spread / 2, generator=rng)
    taps[: 2 * keys, 0, 3] += 1
    taps[:keys] = taps[keys : 2 * keys]


def _gates(mixer: Any, part: Roles, rng: torch.Generator) -> None:
    mixer.in_proj_z.weight.mul_(0.3)
    mixer.in_proj_z.weight[:, part.bias] += 1.2 / 8
    _normal(mixer.in_proj_a.weight, 0.03, rng)


def _matching(mixer: Any, shape: Shape, part: Roles, number: int, sketch: Tensor, rng: torch.Generator) -> None:
    """KV heads match two words or four, in turn; all copy the layer's block. The rotary quarter stays out of it."""
    query = mixer.q_proj.weight.view(shape.query_heads, 2 * HEAD, shape.hidden)
    key = mixer.k_proj.weight.view(shape.kv_heads, HEAD, shape.hidden)
    value = mixer.v_proj.weight.view(shape.kv_heads, HEAD, shape.hidden)
    output = mixer.o_proj.weight.view(shape.hidden, shape.query_heads, HEAD)
    for weight, scale in ((query, 0.02), (key, 0.02), (value, 0.02), (output, 0.003)):
        _normal(weight, scale, rng)
    query[:, HEAD:, part.bias] += 1.2 / 8
    first, last = part.blocks[number]
    block = torch.arange(min(last - first, HEAD))
    free = HEAD // 4  # channels from here on are not rotated
    group = shape.query_heads // shape.kv_heads
    for head in range(shape.kv_heads):
        mine = range(head * group, (head + 1) * group)
        words = 2 if (head + number) % 2 else LAGS
        width = min(len(sketch), (HEAD - free) // words)
        for lag in range(words):
            rows, channels = free + lag * width + torch.arange(width), torch.arange(width)
            key[head, rows, part.lags[lag][0] + channels] += LAG
            for one in mine:
                if lag:
                    query[one, rows, part.lags[lag - 1][0] + channels] += LAG
                else:
                    query[one, rows] += sketch[:width]
        value[head, block, first + block] += 1
        for one in mine:
            output[first + block, one, block] += COPY
    output[:first] = 0
    output[last:] = 0
    mixer.q_norm.weight.fill_(1.2)


def _normal(weight: Tensor, scale: float, rng: torch.Generator) -> Tensor:
    return weight.normal_(0.0, scale, generator=rng)


def _softplus_inverse(value: float) -> float:
    return math.log(math.expm1(value))

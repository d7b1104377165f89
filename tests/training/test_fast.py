"""The fast training path against the stock model and against plain float64 autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from training import fast, kernels
from wakesight.errors import RequestError

pytestmark = pytest.mark.skipif(kernels.compiler() is None, reason="the training kernels are built with g++")


@pytest.fixture(autouse=True)
def _gradients():
    with torch.enable_grad():
        yield


def random_model(delta_dim: int = 64, **changes) -> Qwen3_5ForCausalLM:
    """A (G G G A) x 2 model whose norm weights, gates and half-lives are not at their initial values."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": delta_dim,
        "linear_value_head_dim": delta_dim,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**fields, **changes})).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5, 1)  # half-lives from a fraction of a token to a hundred tokens
            elif parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)
    return model


def delta_rule_reference(
    qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, key_heads: int, key_dim: int
) -> torch.Tensor:
    """The gated delta rule token by token in plain torch, in the dtype of its arguments."""
    batch, tokens, value_heads = g.shape
    keys = key_heads * key_dim
    query, key, value = qkv.split((keys, keys, qkv.shape[-1] - 2 * keys), -1)

    def heads(x: torch.Tensor) -> torch.Tensor:
        x = x.view(batch, tokens, key_heads, key_dim)
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(value_heads // key_heads, 2)

    query, key = heads(query) * key_dim**-0.5, heads(key)
    value = value.view(batch, tokens, value_heads, -1)
    state = qkv.new_zeros(batch, value_heads, key_dim, value.shape[-1])
    outputs = []
    for t in range(tokens):
        state = state * g[:, t, :, None, None].exp()
        told = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], beta[:, t, :, None] * (value[:, t] - told))
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outputs, 1).flatten(2)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude; an expected zero must be found as zero."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))


def gradients(function, inputs, dout):
    """Output and input gradients of `function` for the output gradient `dout`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, dout.to(out.dtype))


def assert_same(function, reference, inputs, tolerance=1e-4):
    """`function` in float32 gives the output and the gradients of `reference` in float64."""
    dout = torch.randn(function(*inputs).shape)
    out, found = gradients(function, inputs, dout)
    expected_out, expected = gradients(reference, [x.double() for x in inputs], dout)
    assert relative(out, expected_out) < tolerance
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert relative(a, b) < tolerance, f"gradient of input {index}"


@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 64, 101])
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim"),
    [(2, 4, 64, 64), (1, 2, 128, 128), (2, 2, 16, 48)],
)
def test_delta_rule_equals_the_float64_recurrence(tokens, key_heads, value_heads, key_dim, value_dim):
    torch.manual_seed(tokens)
    qkv = torch.randn(2, tokens, 2 * key_heads * key_dim + value_heads * value_dim)
    g = -torch.exp(torch.empty(2, tokens, value_heads).uniform_(-7, 2))
    beta = torch.rand(2, tokens, value_heads)
    assert_same(
        lambda *x: kernels.delta_rule(*x, key_heads, key_dim),
        lambda *x: delta_rule_reference(*x, key_heads, key_dim),
        [qkv, g, beta],
    )


def test_delta_rule_with_strong_decay_keeps_small_gradients_exact():
    """Decays of e^-20 a token: the gradient of g is tiny, and noise in it would move A_log under Adam."""
    torch.manual_seed(0)
    g = torch.full((1, 70, 2), -20.0)
    assert_same(
        lambda *x: kernels.delta_rule(*x, 1, 64),
        lambda *x: delta_rule_reference(*x, 1, 64),
        [torch.randn(1, 70, 256), g, torch.rand(1, 70, 2)],
    )


def test_delta_rule_with_closed_and_full_writes():
    torch.manual_seed(0)
    beta = torch.randint(0, 2, (1, 40, 2)).float()
    assert_same(
        lambda *x: kernels.delta_rule(*x, 1, 64),
        lambda *x: delta_rule_reference(*x, 1, 64),
        [torch.randn(1, 40, 256), torch.full((1, 40, 2), -0.01), beta],
    )


@pytest.mark.parametrize("tokens", [1, 31, 32, 77])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 64), (3, 1, 128), (2, 2, 16)])
def test_causal_attention_equals_float64(tokens, heads, key_heads, dim):
    torch.manual_seed(tokens)

    def reference(*x):
        query, key, value = (y.transpose(1, 2) for y in x)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    shapes = [(2, tokens, heads, dim), (2, tokens, key_heads, dim), (2, tokens, key_heads, dim)]
    inputs = [scale * torch.randn(shape) for scale, shape in zip((3, 3, 1), shapes, strict=True)]
    if tokens == 1:  # one key: its weight is 1 whatever the query, and those gradients are rounding errors
        inputs = [inputs[2].new_zeros(inputs[0].shape), inputs[1], inputs[2]]
        assert torch.equal(kernels.causal_attention(*inputs), inputs[2].repeat_interleave(heads // key_heads, 2))
        return
    assert_same(kernels.causal_attention, reference, inputs)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 3), (3, 20)])
def test_conv_silu_takes_a_slice(batch, tokens):
    torch.manual_seed(0)

    def reference(x, weight):
        padded = F.pad(x[..., 8:104].transpose(1, 2), (3, 0))
        return F.silu(F.conv1d(padded, weight, groups=96)).transpose(1, 2)

    inputs = [torch.randn(batch, tokens, 120), torch.randn(96, 1, 4)]
    assert_same(lambda x, weight: kernels.conv_silu(x[..., 8:104], weight), reference, inputs)


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_norms_and_swiglu(rows):
    torch.manual_seed(0)

    def plain_norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * (1 + weight)

    def plain_gated(x, z, weight):
        heads = x.view(2, rows, 3, 48)
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-3) * weight
        return normed.flatten(2) * F.silu(z[..., 10:154])

    x, weight = torch.randn(2, rows, 48), torch.randn(48)
    assert_same(lambda *a: kernels.rms_norm(*a, eps=1e-3), plain_norm, [x, weight])
    inputs = [torch.randn(2, rows, 144), torch.randn(2, rows, 160), weight]
    assert_same(lambda x, z, w: kernels.gated_norm(x, z[..., 10:154], w, 1e-3), plain_gated, inputs)
    assert_same(kernels.swiglu, lambda both: F.silu(both[..., :24]) * both[..., 24:], [x])


def stock_states(model, ids, monkeypatch):
    """Stock forward with the token-by-token delta rule in place of the chunked one."""

    def plain(query, key, value, g, beta, **_):
        qkv = torch.cat([x.flatten(2) for x in (query, key, value)], -1)
        out = delta_rule_reference(qkv, g.to(qkv.dtype), beta, key.shape[2], key.shape[3])
        return out.view(*value.shape), None

    module = "transformers.models.qwen3_5.modeling_qwen3_5"
    monkeypatch.setattr(f"{module}.torch_chunk_gated_delta_rule", plain)
    return model.model(ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize(("delta_dim", "tokens"), [(64, 1), (64, 31), (64, 96), (128, 70)])
def test_forward_equals_the_stock_model(delta_dim, tokens):
    model = random_model(delta_dim)
    ids = torch.randint(0, 64, (2, tokens))
    with torch.no_grad():
        expected = model.model(ids, use_cache=False).last_hidden_state
        assert relative(fast.hidden_states(model, ids), expected) < 1e-4


@pytest.mark.parametrize(("delta_dim", "tokens", "tied"), [(64, 75, True), (128, 64, False)])
def test_every_gradient_equals_float64_autograd(delta_dim, tokens, tied, monkeypatch):
    model = random_model(delta_dim, tie_word_embeddings=tied)
    ids = torch.randint(0, 64, (2, tokens))
    weights = torch.rand(2, tokens - 1)
    weights[0, : tokens // 2] = 0
    value, correct = fast.loss(model, ids, weights)
    value.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    model = model.double()
    logits = model.lm_head(stock_states(model, ids, monkeypatch))[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    expected = (losses * weights).sum() / weights.sum()
    expected.backward()

    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(correct, logits.argmax(-1) == ids[:, 1:])
    for name, parameter in model.named_parameters():
        # Every norm in the model works in float32 whatever the model's dtype; that, not the kernels, bounds the match.
        assert relative(found[name], parameter.grad) < 1e-3, name


def test_attention_scale_zero_closes_one_row_and_one_layer():
    model = random_model()
    ids = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        full = fast.hidden_states(model, ids)
        half = fast.hidden_states(model, ids, torch.tensor([1.0, 0.0]))
        layers = fast.hidden_states(model, ids, torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        first_closed = fast.hidden_states(model, ids)
        model.model.layers[7].self_attn.o_proj.weight.zero_()
        both_closed = fast.hidden_states(model, ids)
    assert relative(half[0], full[0]) < 1e-5
    assert relative(half[1], both_closed[1]) < 1e-5
    assert relative(layers[0], first_closed[0]) < 1e-5
    assert relative(layers[1], full[1]) < 1e-5
    assert relative(full[1], both_closed[1]) > 1e-2


def test_closed_attention_gets_no_gradient():
    model = random_model()
    ids = torch.randint(0, 64, (2, 12))
    fast.loss(model, ids, torch.ones(2, 11), torch.tensor([[0.0, 0.0], [1.0, 0.0]]))[0].backward()
    assert not model.model.layers[3].self_attn.q_proj.weight.grad.any()
    assert model.model.layers[7].self_attn.q_proj.weight.grad.any()


def test_gradients_do_not_depend_on_threads():
    model = random_model()
    ids = torch.randint(0, 64, (3, 50))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            model.zero_grad()
            fast.loss(model, ids, torch.ones(3, 49))[0].backward()
        finally:
            torch.set_num_threads(1)
        found.append(model.model.layers[0].linear_attn.conv1d.weight.grad.clone())
    assert relative(*found) < 1e-5


def test_building_twice_gives_the_cached_library(tmp_path, monkeypatch):
    monkeypatch.setenv("WAKESIGHT_KERNELS", str(tmp_path))
    first = kernels.build()
    stamp = first.stat().st_mtime_ns
    assert kernels.build() == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_loading_the_kernels_leaves_denormal_numbers_alone():
    tiny = torch.tensor([1e-40])
    kernels.swiglu(torch.randn(2, 32))
    assert (tiny * 1.0).item() > 0


def test_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RequestError, match=r"needs a C\+\+ compiler"):
        kernels.build()


def test_wrong_arguments_are_refused():
    model = random_model()
    ids = torch.randint(0, 64, (2, 12))
    with pytest.raises(RequestError, match="weights are"):
        fast.loss(model, ids, torch.ones(2, 12))
    with pytest.raises(RequestError, match="all loss weights are zero"):
        fast.loss(model, ids, torch.zeros(2, 11))
    with pytest.raises(RequestError, match="attention_scale is"):
        fast.hidden_states(model, ids, torch.ones(3))
    with pytest.raises(RequestError, match="float16"):
        fast.hidden_states(model.half(), ids)
    with pytest.raises(RequestError, match="multiples of 16"):
        kernels.delta_rule(torch.randn(1, 4, 72), torch.zeros(1, 4, 1), torch.zeros(1, 4, 1), 1, 24)

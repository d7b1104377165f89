"""How much one entry's removal changes an attention layer's output: the label that estimators learn.

Removing entry i from the softmax of query head j leaves weights a_j(k) / (1 - a_j(i)), so its output
o_j = sum_k a_j(k) v_k moves by a_j(i) / (1 - a_j(i)) * (o_j - v_i). All query heads of a KV head lose the entry
together and add up in the layer's output before the norm is taken:

    I(t, i) = || sum_j c_j(t, i) W_j (o_j(t) - v_i) ||,    c_j = a_j(t, i) / (1 - a_j(t, i))

with W_j the slice of the output projection that reads head j; an output gate is left out.

Source: GateSight, section on utility; its equation was rebuilt from its words and is checked against real removal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wakesight.signals.precision import working_dtype

GUARD = 1e-6  # the least 1 - a that c_j divides by
STRONG = 0.75  # from this weight on o_j - v_i is too small a difference for the squared form
BLOCK = 1 << 22  # numbers of the largest intermediate tensor


def influence(
    queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, scaling: float, first: int, entries: int, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Exact joint leave-one-out change of the ungated layer output, float [t, entries].

    queries: [J, t, d], the query heads of one KV head at positions first, first + 1, ...; keys: [m, d] and values:
    [m, dv] at positions 0 .. m - 1, m >= first + t (query r sees those up to its own). output: [J, hidden, dv], the
    slices W_j. entries: positions 0 .. entries - 1 are tried. dtype: of the sums; default float32, float64 for
    float64 queries. Works on blocks of queries, so memory beyond the result is bounded by `BLOCK` numbers (or one
    query's row, if that is longer).
    """
    return influence_and_outputs(queries, keys, values, output, scaling, first, entries, dtype=dtype)[0]


def influence_and_outputs(
    queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, scaling: float, first: int, entries: int, *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, and the head outputs o_j [J, t, dv] that it was computed with.

    Squared, I^2 = sum_jk c_j c_k (o_j - v_i)^T M_jk (o_k - v_i) with M_jk = W_j^T W_k, whose terms need one matrix
    product per pair of heads and no tensor with a hidden axis. v is centred first, which changes no difference and
    saves digits. Where a head puts more than `STRONG` on an entry, o_j - v_i loses digits to cancellation that
    squaring doubles: those few pairs are removed for real.
    """
    dtype = dtype or working_dtype(queries.dtype)
    values, output = values.to(dtype), output.to(dtype)
    centre = values.mean(dim=0)
    around = values - centre
    gram = _Gram(output, around[:entries])
    heads, new, _ = queries.shape
    step = max(1, BLOCK // (heads * keys.shape[0]))
    changes, outputs = [], []
    for start in range(0, new, step):
        weights = attention_weights(queries[:, start : start + step], keys, scaling, first + start, dtype)
        made = weights @ around[: weights.shape[2]]
        found = gram.norms(_odds(weights[..., :entries]), made)
        _removed(found, weights, around, output)
        changes.append(found)
        outputs.append(made + centre)
    return torch.cat(changes), torch.cat(outputs, dim=1)


def influence_reference(
    queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, scaling: float, first: int, entries: int, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The readable form of `influence`, one query at a time: project every difference and add them up."""
    dtype = dtype or working_dtype(queries.dtype)
    values, output = values.to(dtype), output.to(dtype)
    rows = []
    for row in range(queries.shape[1]):
        weights = attention_weights(queries[:, row : row + 1], keys, scaling, first + row, dtype)[:, 0]  # [J, seen]
        made = weights @ values[: weights.shape[1]]  # [J, dv]
        apart = made[:, None] - values[None, :entries]  # [J, entries, dv]
        moved = torch.einsum("ji,jhd,jid->ih", _odds(weights[:, :entries]), output, apart)
        rows.append(moved.norm(dim=-1))
    return torch.stack(rows)


def attention_weights(queries: Tensor, keys: Tensor, scaling: float, first: int, dtype: torch.dtype) -> Tensor:
    """Causal softmax weights [J, t, first + t] of queries [J, t, d] at positions first, first + 1, ... over keys."""
    new = queries.shape[1]
    seen = keys[: first + new].to(dtype)
    logits = (queries.to(dtype) * scaling) @ seen.T
    hidden = torch.ones(new, new, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., first:].masked_fill_(hidden, float("-inf"))
    return logits.softmax(dim=-1)


def _odds(weights: Tensor) -> Tensor:
    return weights / (1 - weights).clamp(min=GUARD)


class _Gram:
    """The pair products of one KV head: M_jk for j <= k, and v_i^T M_jk v_i once per entry."""

    def __init__(self, output: Tensor, values: Tensor) -> None:
        self.values = values  # [entries, dv]
        heads = output.shape[0]
        self.pairs = [(j, k) for j in range(heads) for k in range(j, heads)]
        self.products = {(j, k): output[j].T @ output[k] for j, k in self.pairs}
        self.of_values = {pair: ((values @ m) * values).sum(dim=1) for pair, m in self.products.items()}

    def norms(self, odds: Tensor, made: Tensor) -> Tensor:
        """odds: [J, t, entries], made: [J, t, dv] -> [t, entries]. The pair (k, j) equals (j, k) and counts twice."""
        total = torch.zeros_like(odds[0])
        for (j, k), product in self.products.items():
            left, right = made[j] @ product, made[k] @ product.T  # o_j^T M_jk, o_k^T M_kj
            bracket = torch.addmm(self.of_values[j, k], left + right, self.values.T, alpha=-1)
            bracket += (left * made[k]).sum(dim=1, keepdim=True)
            bracket *= odds[j]
            total.addcmul_(bracket, odds[k], value=1 if j == k else 2)
        return total.clamp_(min=0).sqrt_()


def _removed(found: Tensor, weights: Tensor, values: Tensor, output: Tensor) -> None:
    """Overwrite found [t, entries] where some head's weight is strong, by outputs without the entry.

    With o^-i the output over all others, o^-i - o = a (o^-i - v_i): nothing cancels. The guard enters as it does
    in c: 1 - a is the others' sum.
    """
    heads, _, seen = weights.shape
    strong = (weights[..., : found.shape[1]] > STRONG).any(dim=0).nonzero()
    for part in torch.split(strong, max(1, BLOCK // (heads * seen))):
        row, entry = part.unbind(dim=1)
        others = weights[:, row]  # [J, pair, seen], a copy
        pair = torch.arange(len(part), device=weights.device)
        own = others[:, pair, entry]
        others[:, pair, entry] = 0
        rest = others.sum(dim=-1)
        without = (others @ values[:seen]) / rest.clamp(min=torch.finfo(rest.dtype).tiny)[..., None]
        moved = (own * rest / rest.clamp(min=GUARD))[..., None] * (without - values[entry])
        found[row, entry] = torch.einsum("jpd,jhd->ph", moved, output).norm(dim=-1)

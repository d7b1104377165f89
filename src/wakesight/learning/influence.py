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
    dtype: torch.dtype | None = None, removal: Removal | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, and the head outputs o_j [J, t, dv] that it was computed with.

    Squared, I^2 = sum_jk c_j c_k (o_j - v_i)^T M_jk (o_k - v_i) with M_jk = W_j^T W_k, whose terms need one matrix
    product per pair of heads and no tensor with a hidden axis. v is centred first, which changes no difference and
    saves digits. Where a head puts more than `STRONG` on an entry, o_j - v_i loses digits to cancellation that
    squaring doubles: those few pairs are removed for real.

    removal: what does not depend on the queries, of the same values and output, where it is at hand.
    """
    dtype = dtype or working_dtype(queries.dtype)
    removal = removal or Removal(values[:entries], output, dtype)
    around = values.to(dtype) - removal.centre
    heads, new, _ = queries.shape
    step = max(1, BLOCK // (heads * keys.shape[0]))
    changes, outputs = [], []
    for start in range(0, new, step):
        weights = attention_weights(queries[:, start : start + step], keys, scaling, first + start, dtype)
        made = weights @ around[: weights.shape[2]]
        found = removal.norms(_odds(weights[..., :entries]), made)
        _removed(found, weights, around, removal.output)
        changes.append(found)
        outputs.append(made + removal.centre)
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
    rest = (1 - weights).clamp_(min=GUARD)
    return torch.div(weights, rest, out=rest)


class Removal:
    """What the removal of entries takes that no query changes: once per context, layer and KV head.

    values: [entries, dv]. output: [J, hidden, dv]. Of the pairs (j, k) with j <= k it holds M_jk, and v_i^T M_jk v_i as
    the last row of `right`, which a bracket of every query and entry is one matrix product with:

        (o_j - v_i)^T M_jk (o_k - v_i) = [-(o_j^T M_jk + o_k^T M_kj), o_j^T M_jk o_k, 1] . [v_i, 1, v_i^T M_jk v_i]
    """

    def __init__(self, values: Tensor, output: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.output = output.to(dtype)
        values = values.to(dtype)
        self.centre = values.mean(dim=0)
        around = values - self.centre
        heads = len(self.output)
        pairs = [(j, k) for j in range(heads) for k in range(j, heads)]
        self.left, self.right = (torch.tensor(side, device=values.device) for side in zip(*pairs, strict=True))
        flat = self.output.transpose(0, 1).flatten(1)  # [hidden, J * dv]
        width = values.shape[1]
        products = (flat.T @ flat).view(heads, width, heads, width).transpose(1, 2)
        self.products = products[self.left, self.right]  # [pair, dv, dv]
        squares = ((around @ self.products) * around).sum(dim=2)  # [pair, entries]
        ones = squares.new_ones(len(pairs), 1, len(around))
        self.columns = torch.cat([around.T.expand(len(pairs), -1, -1), ones, squares[:, None]], dim=1)
        self.twice = torch.where(self.left == self.right, 1.0, 2.0).tolist()  # (k, j) equals (j, k)

    def norms(self, odds: Tensor, made: Tensor) -> Tensor:
        """odds: [J, t, entries], made: [J, t, dv], centred -> [t, entries]."""
        left, right = made[self.left], made[self.right]  # [pair, t, dv]
        mine = left @ self.products  # o_j^T M_jk
        both = mine + right @ self.products.transpose(1, 2)
        rows = torch.cat([-both, (mine * right).sum(dim=2, keepdim=True), torch.ones_like(both[..., :1])], dim=2)
        total = torch.zeros_like(odds[0])
        for pair, (j, k) in enumerate(zip(self.left.tolist(), self.right.tolist(), strict=True)):
            bracket = rows[pair] @ self.columns[pair]
            bracket *= odds[j]
            total.addcmul_(bracket, odds[k], value=self.twice[pair])
        return total.clamp_(min=0).sqrt_()


def _removed(found: Tensor, weights: Tensor, values: Tensor, output: Tensor) -> None:
    """Overwrite found [t, entries] where some head's weight is strong, by outputs without the entry.

    With o^-i the output over all others, o^-i - o = a (o^-i - v_i): nothing cancels. The guard enters as it does
    in c: 1 - a is the others' sum.
    """
    heads, _, seen = weights.shape
    mine = weights[..., : found.shape[1]]
    head, query = (mine.amax(dim=-1) > STRONG).nonzero().unbind(dim=1)
    if not len(head):
        return
    entry = mine[head, query].argmax(dim=-1)  # only one weight of a row can be so strong
    strong = torch.stack([query, entry], dim=1).unique(dim=0)  # type: ignore[no-untyped-call]  # of several heads once
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

"""Drawing a next token the way a checkpoint asks to be sampled: temperature, top-k, top-p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# settings of a generation config that change what is drawn and that we do not apply: name -> value without effect
_OTHERS = {
    "min_p": 0.0, "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "guidance_scale": None,
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """top_k: 0 keeps all tokens. ignored: settings of the checkpoint that are not applied, by name."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Any) -> Sampling:
        """What a generation config states itself; temperature 1 and top-p 1 where it states nothing or is greedy.

        transformers' own default of top-k 50 is nothing that the checkpoint states, and is not applied.
        Source: GateSight, section on utility (continuations of one context must differ, so never greedy).
        """
        others = tuple(name for name, neutral in _OTHERS.items() if getattr(config, name, None) not in (None, neutral))
        if config is None or getattr(config, "do_sample", None) is False:
            return cls(ignored=others)
        return cls(
            temperature=float(getattr(config, "temperature", None) or 1.0),
            top_k=int(getattr(config, "top_k", None) or 0),
            top_p=float(getattr(config, "top_p", None) or 1.0),
            ignored=others,
        )


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [row, vocabulary] -> float32 of the same shape: tempered, and -inf for tokens that cannot be drawn.

    top-k keeps every token as good as the k-th best. top-p then keeps the fewest of the best tokens whose
    probability reaches it, at least one; of equal ones the lower ids.
    """
    kept = logits.float() / sampling.temperature
    if 0 < sampling.top_k < kept.shape[-1]:
        least = kept.topk(sampling.top_k, dim=-1).values[..., -1:]
        kept = kept.masked_fill(kept < least, float("-inf"))
    if sampling.top_p < 1:
        ranked, order = kept.sort(dim=-1, descending=True, stable=True)
        shares = ranked.softmax(dim=-1)
        beyond = shares.cumsum(dim=-1) - shares >= sampling.top_p  # what stands before a token suffices already
        beyond[..., 0] = False
        kept = kept.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf"))
    return kept


def draw(logits: Tensor, sampling: Sampling, noise: torch.Generator) -> list[int]:
    """One id per row of logits [row, vocabulary]; noise: a CPU generator, so that devices draw alike."""
    shares = filtered(logits, sampling).softmax(dim=-1).cpu()
    return [int(i) for i in torch.multinomial(shares, 1, generator=noise)[:, 0]]

"""How closely a compacted session predicts what the whole one predicts: far more power than counting right answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fidelity_grades(whole: Tensor, session: Tensor, ids: Sequence[int]) -> dict[str, float]:
    """Means over the continuation's tokens.

    whole, session: logits [token, vocabulary] of `ids` fed after the whole and after the compacted context.
    kl: KL(whole || session) in nats, 0 for equal predictions. top1: share of positions with the same best token.
    nll: mean negative log-likelihood in nats of the text itself (its exponential is the perplexity).
    """
    reference = whole[:-1].double().log_softmax(dim=-1)
    own = session[:-1].double().log_softmax(dim=-1)
    target = torch.tensor(ids[1:], device=own.device)[:, None]
    same = session[:-1].argmax(dim=-1) == whole[:-1].argmax(dim=-1)
    return {
        "kl": max(0.0, float((reference.exp() * (reference - own)).sum(dim=-1).mean())),
        "top1": float(same.double().mean()),
        "nll": -float(own.gather(1, target).mean()),
    }

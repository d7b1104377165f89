"""FlexiCache's way of choosing pages, for comparison: stable heads choose seldom and late, unstable ones always.

    unstable   all pages in fast memory; every step reads the K best by this step's query
    stable     K pages in fast memory, those of the last ranking, and every page written since; a ranking comes every
               `interval` steps, at the first one too, and takes effect in the step after it

`flexicache` is one step of one layer as a pure function; `reference` says the same page by page. What is always read
(protected prefix, open page) is the storage's. Quest is the case in which every head is unstable.

Source: FlexiCache (https://arxiv.org/abs/2511.00868) and its code, `flexi_cache_triton_kernels.py`; Quest
(https://arxiv.org/abs/2406.10774). Per query head both rank; ours rank per KV head, by the group's largest bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wakesight.cache.residency.wants import best_pages

INTERVAL = 16


class FlexiState(NamedTuple):
    """listed: int64 [kv_head, K], pages that stable heads read and hold, -1 = none; rows of unstable heads say nothing.

    ranked: how many pages could be listed when they were chosen: later ones are new. steps: since the first.
    """

    listed: Tensor
    ranked: int
    steps: int = 0


class FlexiStep(NamedTuple):
    """read: bool [kv_head, page], what this step attends to. units, pages: int64 [move], copied to fast memory after
    this step and before the next, newly listed ones. state: for the next step.
    """

    read: Tensor
    units: Tensor
    pages: Tensor
    state: FlexiState


def is_ranking(state: FlexiState, interval: int = INTERVAL) -> bool:
    """Whether the coming step ranks for stable heads: only then do their bounds matter."""
    return state.steps % interval == 0


def flexicache(state: FlexiState, worth: Tensor, unstable: Tensor, attend: int, interval: int = INTERVAL) -> FlexiStep:
    """One decode step.

    worth: float32 [kv_head, page], this step's bounds of all closed pages. unstable: bool [kv_head]. attend: K.
    Ties to the lower id.
    """
    pages = worth.shape[1]
    best = best_pages(worth, attend)[0]
    best = torch.nn.functional.pad(best, (0, attend - best.shape[1]), value=-1)
    read = _marks(torch.where(unstable[:, None], best, state.listed), pages)
    read[:, state.ranked :] |= ~unstable[:, None]  # a stable head reads every page written since its ranking
    if not is_ranking(state, interval):
        none = best.new_zeros(0)
        return FlexiStep(read, none, none, state._replace(steps=state.steps + 1))
    fetched = _marks(best, pages) & ~_held(state, pages) & ~unstable[:, None]
    units, ids = fetched.nonzero().unbind(1)
    return FlexiStep(read, units, ids, FlexiState(best, pages, state.steps + 1))


def quest(worth: Tensor, attend: int) -> Tensor:
    """bool [kv_head, page]: the K best of this step, all of them in fast memory. worth: float32 [kv_head, page]."""
    return _marks(best_pages(worth, attend)[0], worth.shape[1])


def reference(
    state: FlexiState, worth: Tensor, unstable: Tensor, attend: int, interval: int = INTERVAL
) -> FlexiStep:  # fmt: skip
    """`flexicache`, head by head and page by page."""
    heads, pages = worth.shape
    read, moves = torch.zeros(heads, pages, dtype=torch.bool), []
    listed = torch.full((heads, attend), -1)
    for head in range(heads):
        best = sorted(range(pages), key=lambda page: (-float(worth[head, page]), page))[:attend]
        old = [int(page) for page in state.listed[head] if page >= 0]
        new = list(range(state.ranked, pages))
        read[head, best if unstable[head] else old + new] = True
        listed[head, : len(best)] = torch.tensor(best, dtype=torch.int64)
        moves += [(head, page) for page in sorted(best) if not unstable[head] and page not in old + new]
    if state.steps % interval:
        none = torch.zeros(0, dtype=torch.int64)
        return FlexiStep(read, none, none, state._replace(steps=state.steps + 1))
    units, ids = torch.tensor(moves, dtype=torch.int64).view(-1, 2).T
    return FlexiStep(read, units, ids, FlexiState(listed, pages, state.steps + 1))


def _marks(listed: Tensor, pages: int) -> Tensor:
    """int64 [kv_head, any], -1 = none -> bool [kv_head, page]."""
    marks = torch.zeros(listed.shape[0], pages + 1, dtype=torch.bool, device=listed.device)
    return marks.scatter_(1, torch.where(listed < 0, pages, listed), True)[:, :pages]


def _held(state: FlexiState, pages: int) -> Tensor:
    """bool [kv_head, page]: what a stable head has in fast memory at the end of the step."""
    held = _marks(state.listed, pages)
    held[:, state.ranked :] = True
    return held

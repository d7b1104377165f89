"""KVzip: what the model looks at while it repeats the context is what the context needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.core import Scores
from wakesight.errors import RequestError
from wakesight.scores.base import Probe, at_least
from wakesight.signals.reconstruction import ReconstructionMax

REMINDER = 8  # last tokens of the part before, that say where a later part starts


@dataclass(frozen=True)
class KVzip:
    """s_i = max over the group's query heads and all queries t of a second pass of softmax(q_t K^T / sqrt(d))_i.

    The context behind the protected prefix is cut into parts of `chunk` tokens. For each part the model reads,
    behind the whole context, a request to repeat it, the chat template's tail, and the part's own tokens again. Their
    queries see prefix, part and what was read of the second pass so far, and the softmax runs over exactly these.
    The request for a later part ends with the 8 tokens before it. Every part starts from the state after the
    whole context, and everything read here is dropped again; on a compacted context only held entries take part.

    instruction: the request in words of one's own, without commas; "" for the model's own or the English one. A
    context given as ids or as plain text has no separator, so there it follows the last token directly.
    Source: arXiv 2505.23416, snu-mllab/KVzip `model/wrapper.py` and `attention/score.py`; that a hybrid's recurrent
    states start from the end of the context is ours, and so is the wording.
    """

    chunk: int = 2000
    instruction: str = ""
    reads: ClassVar[tuple[str, ...]] = ()
    natural_allocation: ClassVar[str] = "global"

    def __post_init__(self) -> None:
        at_least("kvzip chunk", self.chunk, 1, "it counts the tokens that are repeated at a time")
        if "," in self.instruction:
            raise RequestError(
                "kvzip instruction holds a comma, which separates settings in a method's text form; reword it without"
            )
        object.__setattr__(self, "instruction", self.instruction.strip())

    def probe(self, context: Probe) -> Scores:
        tokens, prefix = len(context.tokens), context.prefix
        parts: list[list[Tensor]] = [[] for _ in context.geometry.kv_heads]
        for start in range(prefix, tokens, self.chunk):
            stop = min(start + self.chunk, tokens)
            taps = [ReconstructionMax(prefix, start, stop, tokens) for _ in parts]
            context.overhear(self._repeat_input(context, start, stop), taps)
            for layer, tap in zip(parts, taps, strict=True):
                layer.append(tap.largest)
        layers = []
        for found, heads, device in zip(parts, context.geometry.kv_heads, context.devices, strict=True):
            body = torch.cat(found, dim=1) if found else torch.zeros(heads, 0, device=device)
            layers.append(F.pad(body, (prefix, 0)))
        return Scores(tuple(layers))

    def _repeat_input(self, context: Probe, start: int, stop: int) -> list[int]:
        """Ids of the second pass over one part: request, end of turn, the part again."""
        previous = None
        if start > context.prefix:
            previous = context.tokens[max(context.prefix, start - REMINDER) : start]
        return [*self._request(context, previous), *context.tail, *context.tokens[start:stop]]

    def _request(self, context: Probe, previous: Sequence[int] | None) -> Sequence[int]:
        try:
            if not self.instruction:
                return context.repeat_instruction(previous)
            return [*context.encode(context.separator + self.instruction), *(previous or ())]
        except RequestError as error:
            raise RequestError(
                f"kvzip asks the model to repeat its context, and its words could not be encoded ({error}); "
                "ask in words that the model knows: --scorer kvzip:instruction=..."
            ) from error

"""How a demoted session behaves: how many pages are in fast memory, how many are read, when they are chosen anew.

Takes numbers and words; gives a frozen value that `Policy.residency` carries. Nothing here knows a model or a tensor.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wakesight.arguments import as_whole, shown
from wakesight.errors import RequestError

ALL = "all"
Finding = Literal["sketch", "oracle"]
Reading = Literal["wanted", "resident"]
Sketch = Literal["same", "int8"]
FirstTouch = Literal["free", "miss"]
_WORDS: dict[str, Any] = {
    "wants": Finding, "victims": Literal["lru"], "reads": Reading, "sketch": Sketch, "first_touch": FirstTouch,
}  # fmt: skip
_LEAST = {"pages": 1, "attend": 1, "rerank": 1, "page_size": 1, "sinks": 0, "recent": 0, "dense_layers": 0, "block": 1}
_MAY_BE_NONE = ("pages", "attend", "page_size")


@dataclass(frozen=True)
class Residency:
    """Two numbers, not one: `pages` says what is held, `attend` what is read.

    pages: B, slots for closed pages per (layer, KV head); None: what the policy's size comes to.
    attend: K <= B, closed pages that one head reads per step; "all" reads every page, in waves of B, and is exact;
        None: B. The pages of the protected prefix, the sinks, the `recent` ones, those closed since the last rerank and
        the open page are read in addition.
    rerank: R, decode steps between two choices of pages. A question is read in blocks of at most `block` tokens, each
        of which chooses.
    page_size: positions per page; None: the policy's.
    wants: "sketch" ranks pages by an upper bound of q.k, "oracle" by their true attention, for which every page is
        streamed past.
    victims: "lru", the page whose last want is longest ago leaves.
    reads: "wanted", or everything that is "resident".
    sinks: pages at the start of the context that are always read; those inside the protected prefix cost nothing more.
    dense_layers: first attention layers that keep everything. dense_heads: (attention layer, KV head) that do.
    reservoir: "host" or "file:DIR". inclusive: every closed page has its copy there; False is not built.
    sketch: "same" dtype as the keys, or "int8", rounded outward.
    first_touch: how a page's first want counts where it is not resident.

    Raises RequestError for what contradicts itself, is out of range, or is not built.
    """

    pages: int | None = None
    attend: int | Literal["all"] | None = None
    rerank: int = 1
    page_size: int | None = None
    wants: Finding = "sketch"
    victims: Literal["lru"] = "lru"
    reads: Reading = "wanted"
    sinks: int = 1
    recent: int = 0
    dense_layers: int = 0
    dense_heads: tuple[tuple[int, int], ...] = ()
    block: int = 32
    reservoir: str = "host"
    inclusive: bool = True
    sketch: Sketch = "same"
    first_touch: FirstTouch = "miss"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if (value is None and name in _MAY_BE_NONE) or (name == "attend" and value == ALL):
                continue
            number = as_whole(value)
            if number is None or number < least:
                words = ', or "all"' if name == "attend" else ""
                raise RequestError(f"{name}={shown(value)} must be a whole number of at least {least}{words}")
            object.__setattr__(self, name, number)
        for name, choices in _WORDS.items():
            if getattr(self, name) not in typing.get_args(choices):
                known = " or ".join(repr(choice) for choice in typing.get_args(choices))
                raise RequestError(f"{name}={shown(getattr(self, name))} is unknown; use {known}")
        if self.pages is not None and isinstance(self.attend, int) and self.attend > self.pages:
            raise RequestError(
                f"attend={self.attend} pages cannot be read where pages={self.pages} are held; "
                f"lower --attend to {self.pages}, or raise --pages"
            )
        if self.inclusive is not True:
            raise RequestError("inclusive=False (a reservoir of demoted pages only) is not built; leave it out")
        if not isinstance(self.reservoir, str) or not (self.reservoir == "host" or self.reservoir[:5] == "file:"):
            raise RequestError(f"reservoir={shown(self.reservoir)} is unknown; use 'host' or 'file:FOLDER'")
        object.__setattr__(self, "dense_heads", _pairs(self.dense_heads))

    @property
    def reads_all(self) -> bool:
        return self.attend == ALL

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "dense_heads": [list(pair) for pair in self.dense_heads]}

    @classmethod
    def from_json(cls, plain: Any) -> Residency:
        """Inverse of `to_json`. Raises RequestError for unknown fields, or what is no dict."""
        if not isinstance(plain, Mapping):
            raise RequestError(f"{shown(plain)} is no residency; give the dict that to_json made")
        known = [f.name for f in dataclasses.fields(cls)]
        if unknown := sorted(set(plain) - set(known)):
            raise RequestError(f"a residency has no field {unknown[0]!r}; fields: {', '.join(known)}")
        return cls(**plain)


def _pairs(given: Any) -> tuple[tuple[int, int], ...]:
    """(layer, head) pairs, ascending, each once."""
    pairs = set()
    for pair in given if isinstance(given, Iterable) and not isinstance(given, str) else (given,):
        numbers = tuple(map(as_whole, pair)) if isinstance(pair, (tuple, list)) else ()
        if len(numbers) != 2 or any(number is None or number < 0 for number in numbers):
            raise RequestError(
                f"dense_heads={shown(given)} must list (attention layer, KV head) pairs, for example ((0, 1), (3, 0))"
            )
        pairs.add(numbers)
    return tuple(sorted(pairs))  # type: ignore[arg-type]

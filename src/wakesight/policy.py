"""The frozen recipe everyone passes around: which scorer, how much, how it is shared, what becomes of the rest.

Takes names, fields or method objects; gives methods to the session and plain JSON to run records.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wakesight.arguments import as_whole, shown
from wakesight.budget.base import Allocation, DataFree, ScoreBased
from wakesight.budget.rounding import check_keep
from wakesight.budget.table import allocation, allocation_spec
from wakesight.errors import RequestError
from wakesight.residency import Residency
from wakesight.scores.base import AnyScorer, has_probe
from wakesight.scores.table import scorer, scorer_spec
from wakesight.selection.pages import Reduce

LARGEST_PAGE = 4096
USUAL_PAGE = 16


@dataclass(frozen=True)
class Policy:
    """What to keep of a prefilled context.

    scorer: a name with optional settings ("snapkv:window=16") or a scorer object. Commands take the model's own
        estimator where none is named; here it is keydiff on every model.
    allocation: a name ("flat", "pyramid:beta=10"), an allocation object, or entries per KV head for
        each attention layer as a tuple of ints (then no size is given). Commands take `natural_allocation` where
        none is named; here it is flat for every scorer.
    keep: fraction p in (0, 1] of the entries beyond the protected prefix; or `entries` per (layer,
        KV head) on average; or `bytes` of fast memory in all. At most one of the three.
    protect: tokens kept at the start, beyond any budget; None = the session's own prefix.
    unit: "entry", or "page": `page_size` consecutive positions (1 to 4096) stay or go together, ranked by
        the max, mean or sum (`page_reduce`) of their scores; the budget is filled with whole pages.
    evicted: "drop" (gone), or "demote": moved to a reservoir and fetched back when wanted, by page only.
    residency: how many pages are held, read and chosen anew with "demote"; None: `Residency()`. Where it names `pages`,
        that is the size. Its page_size and the policy's are one: give either.

    Sizes may be numpy numbers; they are stored as Python's.

    Raises RequestError for a contradiction, an unknown name, or a part that is not built yet.
    """

    scorer: str | AnyScorer = "keydiff"
    allocation: str | Allocation | tuple[int, ...] = "flat"
    keep: float | None = None
    entries: int | None = None
    bytes: int | None = None
    protect: int | None = None
    unit: str = "entry"
    evicted: str = "drop"
    residency: Residency | None = None
    page_size: int = USUAL_PAGE
    page_reduce: Reduce = "max"

    def __post_init__(self) -> None:
        if isinstance(self.allocation, list):
            object.__setattr__(self, "allocation", tuple(self.allocation))
        self._check_types()
        sizes = [name for name in ("keep", "entries", "bytes") if getattr(self, name) is not None]
        if isinstance(self.allocation, tuple) and sizes:
            raise RequestError(f"an allocation of explicit counts is the whole size; leave out {sizes[0]}=")
        if len(sizes) > 1:
            raise RequestError(f"give one size, not {' and '.join(sizes)}")
        if self.keep is not None:
            check_keep(self.keep)
            object.__setattr__(self, "keep", float(self.keep))
        for name in ("entries", "bytes"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise RequestError(f"{name}={size} must be at least 1")
        self._check_eviction()
        if self.protect is not None and self.protect < 0:
            raise RequestError(f"protect={self.protect} must not be negative; it counts tokens kept at the start")
        # Unknown names are refused here, not after a long prefill; a method and its name are equal policies.
        object.__setattr__(self, "scorer", scorer_spec(self.scorer_method) or self.scorer)
        if not isinstance(self.allocation_rule, tuple):
            object.__setattr__(self, "allocation", allocation_spec(self.allocation_rule) or self.allocation)
        self._check_scale()

    def _check_scale(self) -> None:
        """Decided by what a scorer declares: scores of another scale may all be positive on one context."""
        if getattr(self.allocation_rule, "needs_normalised", False) and not self.normalised:
            scorer = self.scorer if isinstance(self.scorer, str) else type(self.scorer).__name__
            raise RequestError(
                f"the allocation {self.allocation!r} weighs heads by their utility, so it needs a scorer whose scores "
                f"are shares of one scale in all of them, and {scorer!r} is none; use --scorer gatesight+, or "
                f"--allocation {self.natural_allocation}"
            )

    def _check_eviction(self) -> None:
        if self.evicted not in ("drop", "demote"):
            raise RequestError(f"evicted={self.evicted!r} is unknown; use evicted='drop' or evicted='demote'")
        if self.unit not in ("entry", "page"):
            raise RequestError(f"unit={self.unit!r} is unknown; use unit='entry' or unit='page'")
        if not 1 <= self.page_size <= LARGEST_PAGE:
            raise RequestError(
                f"page_size={self.page_size} is no page: it counts consecutive positions, 1 to {LARGEST_PAGE}; "
                "16 is the usual value"
            )
        if self.page_reduce not in typing.get_args(Reduce):
            choices = " or ".join(repr(choice) for choice in typing.get_args(Reduce))
            raise RequestError(f"page_reduce={self.page_reduce!r} is unknown; use {choices}")
        if isinstance(self.residency, Mapping):
            object.__setattr__(self, "residency", Residency.from_json(self.residency))
        if self.residency is not None and not isinstance(self.residency, Residency):
            raise RequestError(
                f"residency={shown(self.residency)} is no residency; give one, for example Residency(attend=20)"
            )
        if self.evicted == "demote":
            self._check_demotion()
        elif self.residency is not None:
            raise RequestError("a residency says how pages come back, and dropped ones do not; add --evicted demote")

    def _check_demotion(self) -> None:
        """One page size, in the policy and in its residency."""
        if self.unit != "page":
            raise RequestError(
                f"evicted='demote' moves whole pages, so unit={self.unit!r} cannot be demoted; use --unit page"
            )
        residency = self.residency or Residency()
        if residency.page_size is not None and self.page_size == USUAL_PAGE:
            object.__setattr__(self, "page_size", residency.page_size)
        if residency.page_size not in (None, self.page_size):
            raise RequestError(
                f"page_size={self.page_size} and the residency's page_size={residency.page_size} differ; give one"
            )
        if self.page_size > LARGEST_PAGE:
            raise RequestError(f"page_size={self.page_size} is no page: at most {LARGEST_PAGE} positions")
        object.__setattr__(self, "residency", dataclasses.replace(residency, page_size=self.page_size))

    def _check_types(self) -> None:
        for name in ("entries", "bytes", "protect", "page_size"):
            value = getattr(self, name)
            if value is None and name != "page_size":
                continue
            if (number := as_whole(value)) is None:
                raise RequestError(f"{name}={value!r} must be a whole number")
            object.__setattr__(self, name, number)
        for name in ("scorer", "allocation"):
            if isinstance(method := getattr(self, name), type):
                raise RequestError(f"{name}={method.__name__} is a class; make one: {name}={method.__name__}()")
        if not isinstance(self.scorer, str) and not (hasattr(self.scorer, "score") or has_probe(self.scorer)):
            raise RequestError(f"scorer={self.scorer!r} is neither a name nor an object with a score or probe method")
        try:
            hash(self.scorer)
        except TypeError:
            raise RequestError(
                f"the scorer {type(self.scorer).__name__} cannot be hashed, so its scores could not be kept for other "
                "sizes; make it a frozen dataclass of plain values"
            ) from None
        if isinstance(self.allocation, tuple):
            counts = tuple(map(as_whole, self.allocation))
            if None in counts:
                raise RequestError(f"explicit allocations are whole numbers per attention layer, got {self.allocation}")
            object.__setattr__(self, "allocation", counts)
        elif not isinstance(self.allocation, (str, DataFree, ScoreBased)):
            raise RequestError(
                f"allocation={self.allocation!r} is no name, no allocation object (with per_layer or per_head) "
                "and no tuple of counts"
            )

    @cached_property
    def scorer_method(self) -> AnyScorer:
        return scorer(self.scorer) if isinstance(self.scorer, str) else self.scorer

    @property
    def natural_allocation(self) -> str:
        """The allocation that suits the scorer: its scores' scale, or the paper it comes from."""
        return str(getattr(self.scorer_method, "natural_allocation", "flat"))

    @property
    def normalised(self) -> bool:
        """Whether the scorer declares that its scores lie in [0, 1] and mean the same share in every head."""
        return bool(getattr(self.scorer_method, "normalised", False))

    @property
    def reads_artifact(self) -> bool:
        """Whether scorer or allocation look at what was fitted or measured of the model."""
        return bool(getattr(self.scorer_method, "needs_artifact", False)) or hasattr(
            self.allocation_rule, "needs_table"
        )

    @cached_property
    def allocation_rule(self) -> Allocation | tuple[int, ...]:
        return allocation(self.allocation) if isinstance(self.allocation, str) else self.allocation

    @property
    def has_size(self) -> bool:
        named = self.residency is not None and self.residency.pages is not None
        return named or isinstance(self.allocation, tuple) or not self.keep is self.entries is self.bytes is None

    def at(self, **changes: Any) -> Policy:
        """The same policy with other fields; a new size replaces the old one."""
        if changes.keys() & {"keep", "entries", "bytes"}:
            changes = {"keep": None, "entries": None, "bytes": None, **changes}
        if self.residency is not None and changes.get("evicted") == "drop":
            changes = {"residency": None, **changes}
        elif self.residency is not None and "page_size" in changes:
            changes = {"residency": dataclasses.replace(self.residency, page_size=None), **changes}
        try:
            return dataclasses.replace(self, **changes)
        except TypeError:
            known = ", ".join(f.name for f in dataclasses.fields(self))
            raise RequestError(f"a policy has no field among {sorted(changes)}; fields: {known}") from None

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives an equal policy back for every built-in or plugged-in method."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("scorer", "allocation"):
            if not isinstance(plain[name], (str, tuple)):
                kind = type(plain[name]).__name__
                raise RequestError(f"the {name} {kind} has no name in our tables, so it cannot be written as JSON")
        if isinstance(self.allocation, tuple):
            plain["allocation"] = list(self.allocation)
        plain["residency"] = self.residency and self.residency.to_json()
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Policy:
        """Inverse of `to_json`. Raises RequestError for unknown fields, or what is no dict."""
        if not isinstance(plain, Mapping):
            raise RequestError(f"{shown(plain)} is no policy; give the dict that to_json made")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(plain.keys() - known):
            raise RequestError(f"a policy has no field {unknown[0]!r}; fields: {', '.join(sorted(known))}")
        return cls(**plain)


def need_policy(value: object) -> Policy:
    """`value`, or a RequestError for what is no policy: a size or a name alone is none."""
    if not isinstance(value, Policy):
        raise RequestError(f"{shown(value)} is no policy; give a Policy, for example Policy(keep=0.3)")
    return value

"""The policies by name: settings as frozen values, each a few calls of the step functions.

`begin` makes the state before the first step, `step` one step with any of the three bodies. What a policy may know
beforehand (`Setting`) and at a step (`At`) is here too: belady's next uses and frozen's profile come from the future.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from wakesight.cache.residency.base import (
    NEVER,
    ArcState,
    Array,
    FirstTouch,
    SlotState,
    State,
    Step,
    TableState,
    Wants,
    first_lists,
    first_slots,
    first_table,
    top_pages,
)  # fmt: skip
from wakesight.errors import RequestError

Body = Any  # one of the three modules; see `body`
BodyName = Literal["plain", "numba", "torch"]
BODIES = {"plain": "step", "numba": "compiled", "torch": "on_device"}


def body(name: BodyName) -> Body:
    """The step functions: "plain" (to read), "numba" (arrays on a CPU), "torch" (any device).

    Raises RequestError without numba.
    """
    try:
        return importlib.import_module(f"wakesight.cache.residency.{BODIES[name]}")
    except ImportError as error:
        if name != "numba":
            raise
        raise RequestError(
            "the compiled residency body needs the package numba; type: pip install 'wakesight[traces]'"
        ) from error


@dataclass(frozen=True)
class Setting:
    """What is known before the first step.

    budget: pages per unit; full has none. layers: int64 [any] each, the units of each layer. first: int32 [unit, any],
    page ids of the first resident set, the most valuable first (-1 = none); the best `budget` are taken, None starts
    empty. prompt_scores: float32 [unit, prompt page]. unstable: bool [unit], the units that frozen leaves alone.
    """

    units: int
    pages: int
    prompt_pages: int
    budget: int
    layers: tuple[Array, ...] = ()
    first: np.ndarray | None = None
    prompt_scores: np.ndarray | None = None
    unstable: Array = None


@dataclass(frozen=True)
class At:
    """Where a step stands. step: from 0. context: pages in context. next_use: int32 [unit, column], for belady."""

    step: int
    context: int
    next_use: Array = None


@dataclass(frozen=True)
class Policy(ABC):
    """reversible: pages that leave can come back. bounded: at most `budget` pages per unit after every step."""

    reversible: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True

    @abstractmethod
    def begin(self, setting: Setting) -> State:
        """State before the first step, in numpy."""

    @abstractmethod
    def step(self, body: Body, state: Any, wants: Wants, at: At, setting: Setting) -> Step:
        """One step; `state` is unchanged."""


@dataclass(frozen=True)
class Reactive(Policy):
    """WakeKV: least recently used pages leave, misses are fetched. start: the scorer of the first resident set."""

    reversible: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    start: str = ""
    first_touch: FirstTouch = "free"

    def begin(self, setting: Setting) -> SlotState:
        return first_slots(setting.first, setting.units, setting.budget, setting.pages, setting.prompt_pages)

    def step(self, body: Body, state: SlotState, wants: Wants, at: At, setting: Setting) -> Step:
        step: Step = body.lru(state, wants, at.step, self.first_touch)
        return step


@dataclass(frozen=True)
class Evict(Policy):
    """The same schedule, but what leaves is destroyed and misses on every later want. First touches are free."""

    bounded: ClassVar[bool] = True
    start: str = ""

    def begin(self, setting: Setting) -> SlotState:
        return first_slots(setting.first, setting.units, setting.budget, setting.pages, setting.prompt_pages)

    def step(self, body: Body, state: SlotState, wants: Wants, at: At, setting: Setting) -> Step:
        step: Step = body.lru(state, wants, at.step, "free", True)
        return step


@dataclass(frozen=True)
class Belady(Policy):
    """The offline bound of reversible policies: whoever is needed latest leaves."""

    reversible: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    start: str = ""
    first_touch: FirstTouch = "free"

    def begin(self, setting: Setting) -> SlotState:
        """The first set is known by ids alone: until wanted, a page counts as needed at NEVER (see `start_uses`)."""
        return first_slots(setting.first, setting.units, setting.budget, setting.pages, setting.prompt_pages)

    def step(self, body: Body, state: SlotState, wants: Wants, at: At, setting: Setting) -> Step:
        step: Step = body.belady(state, wants, at.next_use, self.first_touch)
        return step


def start_uses(state: SlotState, first_use: np.ndarray) -> SlotState:
    """Belady's state with the steps at which the first set is wanted. first_use: int32 [unit, page], or NEVER."""
    pages = np.maximum(state.slot_page, 0)
    uses = np.where(state.slot_page >= 0, np.take_along_axis(first_use, pages, 1), state.last_use)
    return SlotState(state.slot_page, uses.astype(np.int32), state.last_weight, state.seen)


@dataclass(frozen=True)
class Arc(Policy):
    """ARC, one cache per unit."""

    reversible: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    start: str = ""
    first_touch: FirstTouch = "free"

    def begin(self, setting: Setting) -> ArcState:
        return first_lists(setting.first, setting.units, setting.budget, setting.pages, setting.prompt_pages)

    def step(self, body: Body, state: ArcState, wants: Wants, at: At, setting: Setting) -> Step:
        step: Step = body.arc(state, wants, setting.budget, self.first_touch)
        return step


@dataclass(frozen=True)
class Table(Policy):
    """What the policies that do not react share: they serve a step from what is there."""

    counts: ClassVar[bool] = False  # is `worth` a count of wants?
    every: ClassVar[str] = ""  # the field that holds the steps between two rankings; "": none

    def begin(self, setting: Setting) -> TableState:
        return first_table(None, setting.units, setting.pages, setting.prompt_pages)

    def admit_from(self, state: TableState, setting: Setting) -> Array:
        """int32 [unit]: pages from here on enter when first wanted."""
        return state.tail * 0

    def ranks_after(self, step: int) -> bool:
        """Whether a ranking follows this step: after `every` steps, 2 * `every`, ..."""
        return bool(self.every) and (step + 1) % int(getattr(self, self.every)) == 0

    def step(self, body: Body, state: TableState, wants: Wants, at: At, setting: Setting) -> Step:
        served: Step = body.serve(state, wants, self.admit_from(state, setting), self.counts)
        return served


@dataclass(frozen=True)
class Ranked(Table):
    """And every so often, after a step, they rank what is there anew."""

    @abstractmethod
    def rank(self, body: Body, state: TableState, context: int, setting: Setting) -> Step:
        """The ranking; moves and fetches of its own."""

    def step(self, body: Body, state: TableState, wants: Wants, at: At, setting: Setting) -> Step:
        served = super().step(body, state, wants, at, setting)
        if not self.ranks_after(at.step):
            return served
        ranked = self.rank(body, served.state, at.context, setting)
        return Step(ranked.state, _net(body, served, ranked), _fetched(served, ranked))


@dataclass(frozen=True)
class Full(Table):
    """Nothing ever leaves: no misses, ceiling memory."""

    needs_budget: ClassVar[bool] = False


@dataclass(frozen=True)
class Frozen(Ranked):
    """FlexiCache's published defaults: stable units rank pages by how often they were wanted, every `interval` steps.

    Between rankings every want outside the ranked set is a miss, first touches included, unless
    `tail_resident`: pages written since the last ranking are in fast memory, as FlexiCache's code has it.
    unstable: the share of units, those whose wants change most, that keep everything.
    Source: WakeKV, residency simulator, "frozen"; when the ranking happens (after the step) is ours.
    """

    reversible: ClassVar[bool] = True
    counts: ClassVar[bool] = True
    every: ClassVar[str] = "interval"
    interval: int = 16
    unstable: float = 0.25
    tail_resident: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self.interval, "interval")
        if not 0 <= self.unstable <= 1:
            raise RequestError(f"unstable={self.unstable} is no share of the units; give 0 to 1, 0.25 is the default")

    def begin(self, setting: Setting) -> TableState:
        first = None if setting.prompt_scores is None else top_pages(setting.prompt_scores, setting.budget)
        if first is not None and setting.unstable is not None:
            first[np.asarray(setting.unstable)] = -1  # they keep everything, so nothing is chosen for them
        return first_table(first, setting.units, setting.pages, setting.prompt_pages)

    def admit_from(self, state: TableState, setting: Setting) -> Array:
        tail = state.tail if self.tail_resident else state.tail * 0 + NEVER
        return tail * ~setting.unstable

    def rank(self, body: Body, state: TableState, context: int, setting: Setting) -> Step:
        step: Step = body.refresh(state, setting.budget, setting.unstable, context)
        return step


@dataclass(frozen=True)
class FrozenTail(Frozen):
    """Frozen with the pages written since the last ranking in fast memory."""

    tail_resident: bool = True


@dataclass(frozen=True)
class SnapKV(Table):
    """The prompt's pages are ranked once by its last queries; what was not kept misses on every want.

    Generated pages always stay. Source: WakeKV, residency simulator, "SnapKV".
    """

    def begin(self, setting: Setting) -> TableState:
        if setting.prompt_scores is None:
            raise RequestError("snapkv ranks the prompt's pages and needs their scores; record prompt attention")
        first = top_pages(setting.prompt_scores, setting.budget)
        return first_table(first, setting.units, setting.pages, setting.prompt_pages)

    def admit_from(self, state: TableState, setting: Setting) -> Array:
        return state.tail


@dataclass(frozen=True)
class RKV(Ranked):
    """Uniform R-KV: every `buffer` steps the pages with the most attention so far stay, the rest is destroyed.

    Between two prunings nothing leaves. The redundancy term is left out: a trace has no keys.
    Source: WakeKV, residency simulator, "uniform R-KV"; only pages that were wanted count as held (ours).
    """

    every: ClassVar[str] = "buffer"
    buffer: int = 128

    def __post_init__(self) -> None:
        _at_least_one(self.buffer, "buffer")

    def rank(self, body: Body, state: TableState, context: int, setting: Setting) -> Step:
        step: Step = body.prune(state, state.tail * 0 + setting.budget)
        return step


@dataclass(frozen=True)
class ReasonAlloc(Ranked):
    """R-KV whose heads share the layer's budget by demand, anew every `interval` steps.

    floor: what a head gets at least, as a fraction of its equal share (whole pages, rounded down, 1 at least).
    Source: WakeKV, residency simulator, "ReasonAlloc".
    """

    every: ClassVar[str] = "interval"
    interval: int = 128
    floor: float = 0.25

    def __post_init__(self) -> None:
        _at_least_one(self.interval, "interval")
        if not 0 <= self.floor <= 1:
            raise RequestError(f"floor={self.floor} is no fraction of an equal share; give 0 to 1, 0.25 is the default")

    def rank(self, body: Body, state: TableState, context: int, setting: Setting) -> Step:
        least = max(1, int(self.floor * setting.budget))
        step: Step = body.prune(state, body.head_budgets(state, setting.budget, setting.layers, least))
        return step


def _at_least_one(value: int, name: str) -> None:
    if value < 1:
        raise RequestError(f"{name}={value} must be at least 1")


def _fetched(served: Step, ranked: Step) -> Any:
    counts = served.counts
    return type(counts)(counts.hits, counts.misses, counts.first_touches, counts.fetches + ranked.counts.fetches)


def _net(body: Body, served: Step, ranked: Step) -> Any:
    """Both parts' moves, one after the other: the ranking may send away what has just come in."""
    return body.joined(served.moves, ranked.moves)

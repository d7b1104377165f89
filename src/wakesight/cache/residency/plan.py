"""What one layer of a demoted session holds and reads, in pages."""

from __future__ import annotations

from dataclasses import dataclass

from wakesight.residency import Finding, FirstTouch, Reading, Residency, Sketch


@dataclass(frozen=True)
class PagePlan:
    """A residency with its numbers filled in for one layer.

    slots: B. attend: K, None reads every page. strip: pages at the start of the context that are always read: the
    protected prefix, rounded up to whole pages, and the sinks. Page ids count from behind it. dense: KV heads that keep
    everything; `dense_heads.py` gives them a plan of their own.
    """

    page_size: int
    slots: int
    attend: int | None
    strip: int
    recent: int = 0
    rerank: int = 1
    block: int = 32
    wants: Finding = "sketch"
    reads: Reading = "wanted"
    sketch: Sketch = "same"
    first_touch: FirstTouch = "miss"
    reservoir: str = "host"
    dense: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, residency: Residency, slots: int, attend: int | None, prefix: int, dense: tuple[int, ...] = ()
    ) -> PagePlan:
        """prefix: protected tokens at the start. The residency names its page size."""
        assert residency.page_size is not None
        strip = max(-(-prefix // residency.page_size), residency.sinks)
        return cls(
            residency.page_size, slots, attend, strip, residency.recent, residency.rerank, residency.block,
            residency.wants, residency.reads, residency.sketch, residency.first_touch, residency.reservoir,
            dense,
        )  # fmt: skip

    def check(self) -> None:
        """Raises ValueError for numbers that make no plan; the words are those of a `Residency`."""
        least = {"page_size": 1, "slots": 1, "strip": 0, "recent": 0, "rerank": 1, "block": 1}
        numbers = {name: getattr(self, name) for name in least}
        if any(type(number) is not int or number < least[name] for name, number in numbers.items()):
            raise ValueError(f"no plan of pages: {numbers}")
        if self.attend is not None and not (type(self.attend) is int and 1 <= self.attend <= self.slots):
            raise ValueError(f"no plan of pages: it reads {self.attend} of {self.slots}")
        Residency(
            wants=self.wants, reads=self.reads, sketch=self.sketch, first_touch=self.first_touch,
            reservoir=self.reservoir,
        )  # fmt: skip

    @property
    def tail(self) -> int:
        """Pages at the end that are always read: the recent ones, those closed since the last rerank, the open one."""
        return self.recent + -(-self.rerank // self.page_size) + 1

    @property
    def fast_pages(self) -> int:
        """Page-sized places in fast memory per KV head."""
        return self.slots + self.strip + self.tail

    @property
    def sketches(self) -> bool:
        """Whether pages are chosen by their sketch."""
        return self.wants == "sketch" and self.attend is not None

    @property
    def staging(self) -> int:
        """Pages that stream past at a time where true attention chooses; 0 where nothing does."""
        return 16 if self.wants == "oracle" and self.attend is not None else 0

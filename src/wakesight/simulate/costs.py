"""What a fetch costs in time: the only clock of the simulator, and a made-up one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wakesight.errors import RequestError


@dataclass(frozen=True)
class CostModel:
    """Seconds that decode steps wait for fetches.

    A step with f > 0 fetches moves for latency + f * page_bytes / bandwidth seconds, of which overlap * step_time hide
    behind the step's own work: stall = max(0, latency + f * page_bytes / bandwidth - overlap * step_time). A step
    without a fetch never stalls. All fetches of a step travel as one transfer, demotions do not compete with them.

    bandwidth: bytes per second. latency, step_time: seconds. overlap: 0 (fetch, then compute) to 1. page_bytes: K and V
    of one page of one unit, 2 * page_size * head_dim * itemsize; the default is 16 positions of 128 dims in 2 bytes.
    Defaults: WakeKV's notes on the fetch cost bar (24 GB/s, 30 ms a step); latency and overlap ours.
    """

    bandwidth: float = 24e9
    latency: float = 0.0
    overlap: float = 0.0
    step_time: float = 0.03
    page_bytes: int = 8192

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise RequestError(
                f"a bandwidth of {self.bandwidth:g} bytes/s moves nothing; give --bandwidth-gbps above 0"
            )
        for name, value, option in (
            ("latency", self.latency, "--latency-us"), ("step time", self.step_time, "--step-ms")
        ):  # fmt: skip
            if not (math.isfinite(value) and value >= 0):
                raise RequestError(f"a {name} of {value:g} s is no time; give {option} of at least 0")
        if not 0 <= self.overlap <= 1:
            raise RequestError(f"overlap={self.overlap:g} is no fraction of a step; give --overlap from 0 to 1")
        if self.page_bytes < 1:
            raise RequestError(f"page_bytes={self.page_bytes} is no size; give at least 1")

    def stall(self, fetches: np.ndarray) -> np.ndarray:
        """Seconds each step waits. fetches: pages per step -> float64 of the same shape."""
        moving = self.latency + fetches * (self.page_bytes / self.bandwidth)
        return np.where(fetches > 0, np.maximum(0.0, moving - self.overlap * self.step_time), 0.0)

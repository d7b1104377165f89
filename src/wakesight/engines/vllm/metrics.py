"""Numbers of the plugin on vLLM's own /metrics endpoint, all beginning with wakesight_.

The scheduler's process counts, the server's process shows: the numbers ride on vLLM's SchedulerStats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GAUGES = {
    "sessions": "sessions held, children included",
    "children": "compacted sessions held",
    "session_blocks": "distinct cache blocks that sessions hold",
    "session_block_limit": "the most blocks that sessions may hold",
    "free_blocks": "cache blocks nobody holds",
    "session_bytes": "bytes of the blocks that sessions hold",
    "logical_bytes": "bytes that their contexts would take uncompacted",
}
COUNTERS = {
    "forks": "compacted children made",
    "refused": "requests refused with a sentence",
    "evictions": "sessions dropped to make room",
    "score_s": "seconds spent on scoring",
    "gather_s": "seconds spent on copying kept entries",
    "entries_kept": "entries per KV head that children kept, over all layers",
    "entries_full": "entries per KV head that their parents held",
}


def numbers(status: Mapping[str, Any], token_bytes: int) -> dict[str, float]:
    """What is shown, of `Scheduling.status`."""
    sessions = status["sessions"]
    found = {name: float(status[name]) for name in (*GAUGES, *COUNTERS) if isinstance(status.get(name), (int, float))}
    found["sessions"] = float(len(sessions))
    found["children"] = float(sum(one["parent"] is not None for one in sessions))
    found["session_bytes"] = float(status["session_blocks"] * status["block_bytes"])
    found["logical_bytes"] = float(sum(one["tokens"] for one in sessions) * token_bytes)
    return found


class Exporter:
    """Gauges and counters in the default Prometheus registry, made when the first numbers come."""

    def __init__(self) -> None:
        self._shown: dict[str, Any] = {}
        self._last: dict[str, float] = {}

    def show(self, found: Mapping[str, float]) -> None:
        """Set gauges, and let counters rise to the given totals."""
        import prometheus_client

        for name, value in found.items():
            if name in GAUGES:
                if name not in self._shown:
                    self._shown[name] = prometheus_client.Gauge(f"wakesight_{name}", GAUGES[name])
                self._shown[name].set(value)
            elif name in COUNTERS:
                if name not in self._shown:
                    self._shown[name] = prometheus_client.Counter(f"wakesight_{name}", COUNTERS[name])
                self._shown[name].inc(max(0.0, value - self._last.get(name, 0.0)))
                self._last[name] = value

"""wakesight: which KV-cache entries of a long context stay in fast memory, and what happens to the rest.

    import wakesight as ws
    engine = ws.load("smollm2")
    doc = engine.prefill(text)
    small = doc.compact(ws.Policy(scorer="keydiff", keep=0.2))
    print(small.ask("Where was the treaty signed?").text)

Importing this package loads no engine and patches nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "load": "wakesight.engines.hf.engine",
    "compacting": "wakesight.engines.hf.compacting",
    "SessionBatch": "wakesight.engines.batch",
    "Session": "wakesight.engines.session",
    "Policy": "wakesight.policy",
    "Residency": "wakesight.residency",
    "Answer": "wakesight.core",
    "KeptSet": "wakesight.core",
    "Scores": "wakesight.core",
    "Signals": "wakesight.core",
    "RequestError": "wakesight.errors",
    "WakesightError": "wakesight.errors",
    "WorkError": "wakesight.errors",
}
__all__ = [
    "Answer",
    "KeptSet",
    "Policy",
    "RequestError",
    "Residency",
    "Scores",
    "Session",
    "SessionBatch",
    "Signals",
    "WakesightError",
    "WorkError",
    "compacting",
    "load",
]

if TYPE_CHECKING:
    from wakesight.core import Answer, KeptSet, Scores, Signals
    from wakesight.engines.batch import SessionBatch
    from wakesight.engines.hf.compacting import compacting
    from wakesight.engines.hf.engine import load
    from wakesight.engines.session import Session
    from wakesight.errors import RequestError, WakesightError, WorkError
    from wakesight.policy import Policy
    from wakesight.residency import Residency


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'wakesight' has no attribute {name!r}")

"""How the plugin is set: by the environment, which reaches every process of an engine.

WAKESIGHT_VLLM=1 switches it on. WAKESIGHT_VLLM_TTL: seconds without use after which a session goes.
WAKESIGHT_VLLM_SHARE: the share of the pool's blocks that sessions may hold.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from wakesight.errors import RequestError

ENABLED, TTL, SHARE = "WAKESIGHT_VLLM", "WAKESIGHT_VLLM_TTL", "WAKESIGHT_VLLM_SHARE"
VERSIONS = ("0.28.0",)


@dataclass(frozen=True)
class Settings:
    """ttl in seconds; share of the pool in (0, 1]."""

    ttl: float = 3600.0
    share: float = 0.9

    @classmethod
    def from_environment(cls) -> Settings:
        """Raises RequestError for values that are no such numbers."""
        return cls(_number(TTL, cls.ttl, 1e9), _number(SHARE, cls.share, 1.0))


def enabled() -> bool:
    """Whether this process was asked for the plugin."""
    return os.environ.get(ENABLED, "") == "1"


def check_version(version: str) -> None:
    """RequestError for a vLLM whose inside we have not seen."""
    plain = version.partition("+")[0]
    if plain not in VERSIONS:
        raise RequestError(
            f"wakesight works inside vLLM {' and '.join(VERSIONS)}, and this is {version}: its inside may have "
            f"changed; install vllm=={VERSIONS[0]}, or switch the plugin off by leaving out {ENABLED}=1"
        )


def _number(name: str, usual: float, most: float) -> float:
    text = os.environ.get(name)
    try:
        value = usual if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= most:
        raise RequestError(f"{name}={text} must be a number above 0 and at most {most:g}; leave it out for {usual:g}")
    return value

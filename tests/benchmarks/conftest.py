"""The scripts behind docs/evidence.md are no part of the installed package: they come from the repository root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

"""JSON that may stand inside a script element, and compressed values that JavaScript can read."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def in_script(value: Any) -> str:
    """No text in `value` can end the script element or start another one."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, code in UNSAFE.items():
        text = text.replace(character, code)
    return text


def packed(value: Any) -> str:
    """JSON, compressed (zlib) and in base64; `inflate` of page.js reads it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()

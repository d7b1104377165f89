"""How one model is asked to repeat its context, where English is not its language: `wakesight.json` beside its weights.

{"repeat_all": "ask repeat the previous context exactly .",
 "repeat_from": "ask repeat the part starting with", "repeat_end": "."}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from wakesight.errors import RequestError

FILE = "wakesight.json"


@dataclass(frozen=True)
class RepeatWords:
    """repeat_all: asks for the context from its start. repeat_from, repeat_end: what stands before and behind the words
    that the part asked for begins with.
    """

    repeat_all: str
    repeat_from: str
    repeat_end: str = ""

    def ids(self, encode: Callable[[str], list[int]], previous: Sequence[int] | None) -> list[int]:
        """The request in tokens. previous: the last ids before the part that is wanted; None for all of the context."""
        if previous is None:
            return encode(self.repeat_all)
        return [*encode(self.repeat_from), *previous, *(encode(self.repeat_end) if self.repeat_end else ())]


def read_words(folder: Path) -> RepeatWords | None:
    """What a model folder says; None if it says nothing. Raises RequestError for a file of another form."""
    path = folder / FILE
    if not path.is_file():
        return None
    names = [field.name for field in fields(RepeatWords)]
    try:
        given = json.loads(path.read_text("utf-8"))
        if set(given) <= set(names) and all(isinstance(value, str) for value in given.values()):
            return RepeatWords(**given)
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    raise RequestError(f"{path} is damaged; it holds texts named {', '.join(names)}: mend it, or take it away")

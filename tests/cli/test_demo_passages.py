"""The passages that `wakesight demo` shows, token by token, read like the text."""

from __future__ import annotations

import pytest

from wakesight.cli.demo import _pieces


class Speaking:
    def __init__(self, between: str) -> None:
        self.between = between

    def decode(self, ids: list[int]) -> str:
        return self.between.join(("the", "lamp", "is", "out")[i] for i in ids)


@pytest.mark.parametrize("between", ["", " "])
def test_pieces_are_the_text_with_its_spaces(between):
    engine, ids = Speaking(between), (0, 1, 2, 3, 1)
    pieces = _pieces(engine, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == engine.decode(list(ids))

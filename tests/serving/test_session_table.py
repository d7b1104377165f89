"""Sessions by id: who may use them, when they go, and that every block comes back exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.engines.vllm.sessions import Held, SessionTable, known_as
from wakesight.errors import RequestError


@dataclass(frozen=True)
class Block:
    block_id: int


class World:
    """A table with a clock that tests turn, and a ledger of what came back."""

    def __init__(self, limit: int = 10, ttl: float = 100.0) -> None:
        self.now = 0.0
        self.released: list[Held] = []
        self.table = SessionTable(self.released.append, lambda: self.now, limit=limit, ttl=ttl)

    def held(self, name: str, *blocks: int, tokens: tuple[int, ...] = (1, 2, 3), parent: str | None = None) -> Held:
        self.now += 1
        return Held(name, tokens, (3,), (tuple(map(Block, blocks)),), 0, self.now, self.now, parent)

    def add(self, name: str, *blocks: int, **more: object) -> Held:
        held = self.held(name, *blocks, **more)
        self.table.add(held)
        return held


def test_a_prompt_must_begin_with_the_context_and_go_on():
    world = World()
    held = world.add("a", 1)

    assert world.table.matching("a", [1, 2, 3, 4]) is held
    with pytest.raises(RequestError, match="at least one token behind"):
        world.table.matching("a", [1, 2, 3])
    with pytest.raises(RequestError, match="differs from the session's context at token 1 of 3"):
        world.table.matching("a", [1, 9, 3, 4])
    with pytest.raises(RequestError, match=f"no session {known_as('b')}"):
        world.table.matching("b", [1, 2, 3, 4])


def test_an_id_is_taken_once_and_never_shown():
    world = World()
    world.add("a", 1)

    with pytest.raises(RequestError, match="exists already") as refused:
        world.add("a", 2)
    assert known_as("a") in str(refused.value)
    assert "session a " not in str(refused.value)


def test_the_session_used_longest_ago_makes_room():
    world = World(limit=4)
    world.add("a", 1, 2)
    world.add("b", 3, 4)
    world.now += 1
    world.table.get("a")

    world.add("c", 5)

    assert "b" not in world.table
    assert "a" in world.table
    assert [held.id for held in world.released] == ["b"]
    assert world.table.take_gone() == ("b",)
    assert world.table.take_gone() == ()


def test_a_session_that_cannot_fit_changes_nothing():
    world = World(limit=4)
    used = world.add("a", 1, 2)
    world.add("b", 3)
    world.table.enter(used)

    with pytest.raises(RequestError, match="needs 3 blocks, and sessions may hold 4"):
        world.add("c", 5, 6, 7)

    assert {held.id for held in world.table.all()} == {"a", "b"}
    assert world.released == []


def test_a_dropped_session_keeps_its_blocks_while_it_is_used():
    world = World()
    held = world.add("a", 1, 2)
    world.table.enter(held)
    world.table.enter(held)

    world.table.drop("a")
    assert "a" not in world.table
    assert world.table.blocks == 2
    assert world.table.take_gone() == ()
    with pytest.raises(RequestError, match="still in use"):
        world.add("a", 3)
    world.table.leave(held)
    assert world.released == []
    world.table.leave(held)

    assert world.released == [held]
    assert world.table.take_gone() == ("a",)
    assert world.table.blocks == 0


def test_sessions_expire_unless_used():
    world = World(ttl=10)
    world.add("a", 1)
    busy = world.add("b", 2)
    world.table.enter(busy)

    world.now = 100
    world.table.expire()

    assert "a" not in world.table
    assert "b" in world.table


def test_blocks_that_a_child_shares_count_once():
    world = World()
    world.add("a", 1, 2)
    world.add("b", 2, 3, parent="a")

    assert world.table.blocks == 3


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "enter", "leave", "drop", "evict", "wait"]), st.integers(0, 5), st.integers(1, 3)
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(OPERATIONS)
def test_whatever_happens_every_session_is_released_once_and_the_limit_holds(operations):
    world = World(limit=6, ttl=20)
    added: list[Held] = []
    users: Counter[int] = Counter()
    fresh = iter(range(10**6))
    for what, number, size in operations:
        name = str(number)
        living = {held.id: held for held in world.table.all()}
        try:
            if what == "add":
                added.append(world.add(name, *(next(fresh) for _ in range(size))))
            elif what == "enter" and name in living:
                world.table.enter(living[name])
                users[id(living[name])] += 1
            elif what == "leave":
                held = next((one for one in added if users[id(one)]), None)
                if held is not None:
                    users[id(held)] -= 1
                    world.table.leave(held)
            elif what == "drop":
                world.table.drop(name)
            elif what == "evict":
                world.table.evict_one()
            else:
                world.now += 15
                world.table.expire()
        except RequestError:
            pass
        assert world.table.blocks <= 6
    for held in added:
        while users[id(held)]:
            users[id(held)] -= 1
            world.table.leave(held)
    for held in world.table.all():
        world.table.drop(held.id)

    assert world.table.blocks == 0
    assert Counter(map(id, world.released)) == Counter(map(id, added))

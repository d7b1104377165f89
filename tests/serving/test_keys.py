"""Flat keys of a request: what they mean, and the sentence for every way to get them wrong."""

from __future__ import annotations

import pytest

from wakesight.engines.vllm import keys
from wakesight.engines.vllm.keys import Attach, Drop, Fork, Info, Keep
from wakesight.errors import RequestError
from wakesight.policy import Policy

ID, CHILD = "0123456789abcdef" * 2, "f" * 40
FORK = {"ws_fork": ID, "ws_child": CHILD}


def test_a_request_without_our_keys_is_none_of_ours():
    assert keys.read(None) is None
    assert keys.read({"kv_transfer_params": {}, "other": 1}) is None
    assert keys.read({"ws_attach": None}) is None


def test_every_verb():
    assert keys.read({"ws_session": ID}) == Keep(ID)
    assert keys.read({"ws_session": ID, "ws_protect": "7", "ws_record": "expected_attention,query_mean"}) == Keep(
        ID, 7, ("expected_attention", "query_mean")
    )
    assert keys.read({"ws_attach": ID}) == Attach(ID)
    assert keys.read({"ws_drop": ID}) == Drop(ID)
    assert keys.read({"ws_info": ID}) == Info(ID)


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"ws_keep": 0.2}, Policy(keep=0.2)),
        ({"ws_keep": "0.2", "ws_scorer": "snapkv:window=16"}, Policy("snapkv:window=16", keep=0.2)),
        ({"ws_entries": "40", "ws_protect": 3}, Policy(entries=40, protect=3)),
        ({"ws_allocation": "10, 20,30"}, Policy(allocation=(10, 20, 30))),
        ({"ws_allocation": [10, 20]}, Policy(allocation=(10, 20))),
        ({"ws_keep": 0.5, "ws_scorer": "gatesight"}, Policy("gatesight", "gate", keep=0.5)),
        ({"ws_keep": 1, "ws_allocation": "pyramid", "ws_evicted": "drop"}, Policy(allocation="pyramid", keep=1)),
    ],
)
def test_a_fork_names_a_policy(given, policy):
    assert keys.read({**FORK, **given}) == Fork(ID, CHILD, policy)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"ws_atach": ID}, "did you mean 'ws_attach'"),
        ({"ws_attach": ID, "ws_drop": ID}, "exactly one of"),
        ({"ws_keep": 0.2}, "exactly one of"),
        ({"ws_attach": ID, "ws_keep": 0.2}, "ws_keep does not go with ws_attach"),
        ({"ws_attach": "short"}, "32 to 128 hexadecimal"),
        ({"ws_attach": ID.upper()}, "32 to 128 hexadecimal"),
        ({"ws_attach": 12}, "32 to 128 hexadecimal"),
        ({"ws_session": ID, "ws_protect": -1}, "ws_protect=-1"),
        ({"ws_session": ID, "ws_protect": 1.5}, "whole number"),
        ({"ws_fork": ID, "ws_keep": 0.2}, "give ws_child"),
        ({"ws_fork": ID, "ws_child": ID, "ws_keep": 0.2}, "give the child another"),
        (FORK, "names no size"),
        ({**FORK, "ws_keep": 0.2, "ws_entries": 3}, "one size"),
        ({**FORK, "ws_keep": 2}, "keep=2"),
        ({**FORK, "ws_keep": "many"}, "no number"),
        ({**FORK, "ws_keep": 0.2, "ws_scorer": "keydif"}, "did you mean 'keydiff'"),
        ({**FORK, "ws_keep": 0.2, "ws_scorer": "kvzip"}, "second time"),
        ({**FORK, "ws_keep": 0.2, "ws_scorer": "h2o"}, "attention_sums"),
        ({**FORK, "ws_keep": 0.2, "ws_allocation": "ada"}, "different counts"),
        ({**FORK, "ws_keep": 0.2, "ws_scorer": "gatesight+"}, "different counts"),
        ({**FORK, "ws_keep": 0.2, "ws_evicted": "demote"}, "not built yet"),
        ({**FORK, "ws_keep": 0.2, "ws_pages": 4}, "not built yet"),
        ({**FORK, "ws_keep": 0.2, "ws_evicted": "burn"}, "evicted='burn'"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(given, sentence):
    with pytest.raises(RequestError, match=sentence):
        keys.read(given)

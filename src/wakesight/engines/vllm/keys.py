"""What a request asks of us, in flat keys: `SamplingParams.extra_args` offline, `vllm_xargs` over HTTP.

    ws_session=<id> [ws_protect=N] [ws_record=h2o,...]   keep the context of this request (max_tokens=1)
    ws_fork=<id> ws_child=<id> ws_keep=0.2 ...           make a compacted child, and answer what follows the context
    ws_attach=<id>                                       answer what follows the context
    ws_drop=<id>                                         forget a session
    ws_info=<id>                                         tell what it holds

Every one but the last two sends the whole prompt: the context's tokens are compared with the session's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

from wakesight.arguments import shown, whole_number
from wakesight.budget.base import DataFree
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.registry import did_you_mean, read_names
from wakesight.scores.base import has_probe, reads_of

SessionId = NewType("SessionId", str)

FORK_KEYS = (
    "ws_child", "ws_scorer", "ws_keep", "ws_entries", "ws_allocation", "ws_evicted", "ws_protect", "ws_pages",
    "ws_attend", "ws_rerank",
)  # fmt: skip
ALLOWED: dict[str, tuple[str, ...]] = {
    "ws_session": ("ws_protect", "ws_record"),
    "ws_fork": FORK_KEYS,
    "ws_attach": (),
    "ws_drop": (),
    "ws_info": (),
}
KEYS = tuple(dict.fromkeys([*ALLOWED, *(key for keys in ALLOWED.values() for key in keys)]))
ID = re.compile(r"[0-9a-f]{32,128}")
UNHEARD = ("attention_sums", "output_gate", "hidden")  # signals that no tap of this engine gives


@dataclass(frozen=True)
class Keep:
    """Keep the context of this request as `session`. protect: its first tokens that no compaction takes.

    record: signals and scorers to listen for beside keys, values, the last queries and native gates.
    """

    session: SessionId
    protect: int = 0
    record: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fork:
    """Make `child` of `parent` by `policy`; what follows the context in the prompt is answered from the child."""

    parent: SessionId
    child: SessionId
    policy: Policy


@dataclass(frozen=True)
class Attach:
    """Answer what follows the context of `session` in the prompt."""

    session: SessionId


@dataclass(frozen=True)
class Drop:
    """Forget `session`."""

    session: SessionId


@dataclass(frozen=True)
class Info:
    """Tell what `session` holds."""

    session: SessionId


Ask = Keep | Fork | Attach | Drop | Info


def read(extra: Mapping[str, Any] | None) -> Ask | None:
    """What the keys of one request ask for; None for a request that is none of ours.

    Raises RequestError for unknown keys, keys that do not go together, and values of the wrong form.
    """
    ours = {key: value for key, value in (extra or {}).items() if key.startswith("ws_") and value is not None}
    if not ours:
        return None
    if unknown := next((key for key in ours if key not in KEYS), None):
        raise RequestError(f"there is no key {unknown!r}{did_you_mean(unknown, KEYS)}; keys: {', '.join(KEYS)}")
    verbs = [key for key in ours if key in ALLOWED]
    if len(verbs) != 1:
        given = " and ".join(verbs) or ", ".join(ours)
        raise RequestError(f"a request takes exactly one of {', '.join(ALLOWED)}; this one has {given}")
    verb = verbs[0]
    if stray := next((key for key in ours if key != verb and key not in ALLOWED[verb]), None):
        raise RequestError(
            f"{stray} does not go with {verb}; {verb} takes {', '.join(ALLOWED[verb]) or 'nothing else'}"
        )
    session = _id(ours[verb], verb)
    if verb == "ws_session":
        protect = whole_number(_number(ours.get("ws_protect", 0)), "ws_protect", 0)
        return Keep(session, protect, tuple(_names(ours.get("ws_record", ()))))
    if verb == "ws_fork":
        return _fork(session, ours)
    if verb == "ws_attach":
        return Attach(session)
    return Drop(session) if verb == "ws_drop" else Info(session)


def _fork(parent: SessionId, keys: Mapping[str, Any]) -> Fork:
    if "ws_child" not in keys:
        raise RequestError("ws_fork needs the child's id: give ws_child, 32 or more hexadecimal characters of your own")
    child = _id(keys["ws_child"], "ws_child")
    if child == parent:
        raise RequestError("ws_child is the parent's own id; give the child another")
    if keys.get("ws_evicted", "drop") == "demote" or any(key in keys for key in ("ws_pages", "ws_attend", "ws_rerank")):
        raise RequestError("ws_evicted=demote (a reversible cache) is not built yet; use ws_evicted=drop")
    size: dict[str, Any] = {}
    if "ws_keep" in keys:
        size["keep"] = _number(keys["ws_keep"])
    if "ws_entries" in keys:
        size["entries"] = _number(keys["ws_entries"])
    policy = Policy(
        scorer=keys.get("ws_scorer", "keydiff"), allocation=_allocation(keys), evicted=keys.get("ws_evicted", "drop"),
        protect=_number(keys["ws_protect"]) if "ws_protect" in keys else None, **size,
    )  # fmt: skip
    check_policy(policy)
    return Fork(parent, child, policy)


def check_policy(policy: Policy) -> None:
    """RequestError for what an engine with equal block counts per head cannot do."""
    if not policy.has_size:
        raise RequestError("the fork names no size; give ws_keep (a fraction), ws_entries, or counts as ws_allocation")
    if policy.bytes is not None:
        raise RequestError("vLLM's memory comes in blocks, so no fork is sized in bytes; give ws_keep or ws_entries")
    if policy.unit != "entry":
        raise RequestError("dropping by page is not built for vLLM yet; use unit='entry'")
    if has_probe(policy.scorer_method):
        raise RequestError(
            f"the scorer {policy.scorer!r} reads the context a second time, which vLLM cannot do behind a session; "
            "use ws_scorer=keydiff, or compact with --engine hf"
        )
    if unheard := next((name for name in reads_of(policy.scorer_method) if name in UNHEARD), None):
        raise RequestError(
            f"the scorer {policy.scorer!r} reads {unheard}, which vLLM's kernels do not tell; use ws_scorer=keydiff"
        )
    rule = policy.allocation_rule
    if not isinstance(rule, (tuple, DataFree)):
        raise RequestError(
            f"the allocation {policy.allocation!r} gives heads of a layer different counts, which share one block "
            "table in vLLM; use ws_allocation=flat, gate, pyramid, utility or counts per layer"
        )


def _allocation(keys: Mapping[str, Any]) -> Any:
    given = keys.get("ws_allocation")
    if given is None:
        return Policy(scorer=keys.get("ws_scorer", "keydiff")).natural_allocation
    if isinstance(given, (list, tuple)):
        return tuple(given)
    if isinstance(given, str) and re.fullmatch(r"\d+(\s*,\s*\d+)*", given.strip()):
        return tuple(int(part) for part in given.split(","))
    return given if isinstance(given, str) else (given,)


def _names(given: Any) -> list[str]:
    if isinstance(given, (list, tuple)):
        return [str(name) for name in given]
    if isinstance(given, str):
        return read_names(given)
    raise RequestError(f"ws_record is {shown(given)}; give names of signals or scorers, comma-separated")


def _id(given: Any, key: str) -> SessionId:
    """An id that nobody guesses: whoever knows it may attach."""
    if not isinstance(given, str) or not ID.fullmatch(given):
        raise RequestError(
            f"{key} must be an id of 32 to 128 hexadecimal characters in lower case, for example "
            "secrets.token_hex(16): whoever knows it may use the session"
        )
    return SessionId(given)


def _number(given: Any) -> Any:
    """HTTP clients send numbers as text at times; a whole number stays one."""
    if not isinstance(given, str):
        return given
    try:
        return int(given)
    except ValueError:
        try:
            return float(given)
        except ValueError:
            raise RequestError(f"{given!r} is no number") from None

"""Names lead to methods: lookups, settings, plug-ins."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.errors import RequestError
from wakesight.registry import did_you_mean, name_of, resolve, spec_of
from wakesight.scores.knorm import KNorm
from wakesight.scores.table import ENTRY_POINTS, SCORERS, scorer, scorer_spec

LAWS = settings(deadline=None, derandomize=True, max_examples=150)


@dataclass(frozen=True)
class Toy:
    count: int = 3
    share: float = 0.5
    loud: bool = False
    mode: Literal["a", "b"] = "a"
    label: str = "x"
    reads: ClassVar[tuple[str, ...]] = ("keys",)


TABLE = {"toy": f"{__name__}:Toy", "absent": "no_such_module:Nothing"}


def toy(spec: str) -> Toy:
    return resolve(spec, TABLE, "toy")


@given(
    st.builds(
        Toy,
        st.integers(),
        st.floats(allow_nan=False),
        st.booleans(),
        st.sampled_from(["a", "b"]),
        st.text("abcxyz=-_", max_size=5),
    )
)
@LAWS
def test_the_text_of_a_method_leads_back_to_it(method):
    assert toy(spec_of(method, "toy")) == method


def test_only_what_is_not_the_default_is_written():
    assert spec_of(Toy(), "toy") == "toy"
    assert spec_of(Toy(loud=True, mode="b"), "toy") == "toy:loud=True,mode=b"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("toy", Toy()),
        ("toy:", Toy()),
        ("toy:count=5", Toy(5)),
        ("toy: count = 5 , share = 1e-3", Toy(5, 0.001)),
        ("toy:loud=TRUE", Toy(loud=True)),
        ("toy:loud=false", Toy()),
        ("toy:count=5,", Toy(5)),
        ("toy:label=a=b", Toy(label="a=b")),
        ("toy:label=a:b", Toy(label="a:b")),
    ],
)
def test_settings_are_read_by_the_type_of_their_field(spec, expected):
    assert toy(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tyo", "unknown toy 'tyo', did you mean 'toy'.; known: absent, toy"),
        ("toy ", "unknown toy 'toy ', did you mean 'toy'"),
        (
            "toy:cuont=5",
            "toy 'toy' has no setting 'cuont', did you mean 'count'.; settings: count, share, loud, mode",
        ),
        ("toy:count", "toy 'toy' setting 'count' has no value; write count=3"),
        ("toy:loud,count=5", "setting 'loud' has no value; write loud=False"),
        ("toy:count=1,count=2", "toy 'toy' setting 'count' is given twice; give it once"),
        ("toy:=5", "has no setting ''"),
        ("toy:reads=x", "has no setting 'reads'"),
        ("toy:count=", "setting 'count' is ''; it takes a value of type int"),
        ("toy:count=five", "setting 'count' is 'five'; it takes a value of type int"),
        ("toy:share=half", "setting 'share' is 'half'; it takes a value of type float"),
        ("toy:loud=1", "setting 'loud' is '1'; it takes true or false"),
        ("toy:mode=c", "setting 'mode' is 'c'; it takes one of a, b"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_alternatives(spec, message):
    with pytest.raises(RequestError, match=message):
        toy(spec)


@given(st.text(max_size=12))
@LAWS
def test_no_text_brings_anything_but_a_method_or_a_refusal(text):
    with contextlib.suppress(RequestError):
        assert isinstance(toy("toy:" + text), Toy)


def test_a_method_is_imported_only_when_its_name_is_given():
    assert toy("toy") == Toy()  # although "absent" leads nowhere
    code = "import sys, wakesight.scores.table; print('wakesight.scores.snapkv' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_did_you_mean_is_silent_when_nothing_is_close():
    assert did_you_mean("keydif", ["keydiff", "knorm"]) == ", did you mean 'keydiff'?"
    assert did_you_mean("zzz", ["keydiff", "knorm"]) == ""
    assert did_you_mean("bogus", ["out", "model"]) == ""  # two letters in common make no typo
    assert did_you_mean("", []) == ""


def test_a_class_no_table_knows_has_no_name():
    assert name_of(Toy(), TABLE) == "toy"
    assert name_of(KNorm(), TABLE) is None


@pytest.fixture
def plug_in(monkeypatch):
    """Pretend that an installed package offers these scorers."""

    def install(**targets: str) -> None:
        points = [importlib.metadata.EntryPoint(name, target, ENTRY_POINTS) for name, target in targets.items()]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == ENTRY_POINTS else [])

    return install


def test_a_plug_in_adds_a_name(plug_in):
    plug_in(toy=f"{__name__}:Toy")

    assert scorer("toy:count=9") == Toy(9)
    assert scorer_spec(Toy(9)) == "toy:count=9"
    with pytest.raises(RequestError, match=re.escape("known: " + ", ".join(sorted([*SCORERS, "toy"])))):
        scorer("tooooooy")


def test_a_plug_in_cannot_replace_a_built_in_name(plug_in):
    plug_in(knorm=f"{__name__}:Toy")

    assert scorer("knorm") == KNorm()
    assert scorer_spec(KNorm()) == "knorm"
    assert name_of(Toy(), {}, "another.group") is None
    assert scorer_spec(Toy()) is None  # its only name is taken


def test_a_broken_plug_in_does_not_disturb_the_others(plug_in):
    plug_in(broken="no_such_module:Nothing", toy=f"{__name__}:Toy")

    assert scorer("toy") == Toy()
    assert scorer("knorm") == KNorm()
    assert scorer_spec(Toy()) == "toy"


@pytest.mark.parametrize("target", ["no_such_module:Nothing", f"{__name__}:Nothing"])
def test_a_plug_in_that_cannot_be_loaded_is_named_in_one_sentence(plug_in, target):
    plug_in(broken=target)

    with pytest.raises(RequestError, match=f"scorer 'broken' comes from a plug-in .* from '{target}' .*; reinstall"):
        scorer("broken:window=3")


def test_a_plug_in_may_name_its_class_where_another_module_exports_it(plug_in, monkeypatch, tmp_path):
    (tmp_path / "toy_plug_in").mkdir()
    (tmp_path / "toy_plug_in" / "__init__.py").write_text("from toy_plug_in.inner import Toy\n")
    (tmp_path / "toy_plug_in" / "inner.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Toy:\n    count: int = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plug_in(broken="toy_plug_in.missing:Toy", other="elsewhere:Toy", toy="toy_plug_in:Toy")

    method = scorer("toy:count=9")

    assert type(method).__module__ == "toy_plug_in.inner"
    assert scorer_spec(method) == "toy:count=9"


def test_a_plug_in_of_another_package_is_not_imported_to_compare(plug_in, monkeypatch):
    def load(point):
        raise AssertionError(f"{point} was loaded")

    plug_in(other="elsewhere:Toy")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", load)

    assert scorer_spec(Toy()) is None


def test_installed_packages_are_searched_once(monkeypatch):
    searches = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: searches.append(group) or [])

    for _ in range(3):
        assert scorer(scorer_spec(KNorm())) == KNorm()
        assert scorer_spec(Toy()) is None

    assert searches == [ENTRY_POINTS]

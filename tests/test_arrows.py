"""Folders depend in one direction, and optional or heavy packages stay where they belong."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wakesight

PACKAGE = Path(wakesight.__file__).parent
ORDER = [
    {"errors", "arguments", "core", "registry"},
    {"models"},
    {"signals"},
    {"estimator"},
    {"scores"},
    {"budget"},
    {"selection"},
    {"policy", "residency"},
    {"cache"},
    {"engines"},
    {"client"},
    {"traces"},
    {"simulate"},
    {"learning"},
    {"evaluation"},
    {"bench"},
    {"report"},
    {"cli", "__main__"},
    {"testing"},  # may import anything
]
RANK = {folder: rank for rank, folders in enumerate(ORDER) for folder in folders}
ONLY_UNDER = {
    "transformers": ("models", "engines/hf", "bench", "testing"),
    "vllm": ("engines/vllm", "cli/serve.py", "cli/doctor.py"),
}


def violations(package: Path) -> list[str]:
    """Every import under `package`, lazy ones included, that goes against the order or out of its place."""
    found = []
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package)
        if str(place) == "__init__.py":
            continue  # the front door names everything and imports it on demand; see the fresh interpreter below
        folder = place.parts[0].removesuffix(".py")
        if folder not in RANK:
            found.append(f"{place}: {folder} has no place in the order")
            continue
        for line, name in imports(file, place):
            top, _, rest = name.partition(".")
            if top in ONLY_UNDER and not any(place.is_relative_to(allowed) for allowed in ONLY_UNDER[top]):
                found.append(f"{place}:{line}: imports {name}")
            if top == "wakesight" and rest != "__version__":
                target = rest.split(".")[0]
                if RANK.get(target, len(ORDER)) > RANK[folder]:
                    found.append(f"{place}:{line}: {folder} imports {name}")
    return found


def imports(file: Path, place: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import statement at any depth; names of `from wakesight import x` as wakesight.x."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            # `import wakesight` alone reaches nothing but the version: its other names are checked where they are used
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name != "wakesight")
        elif isinstance(node, ast.ImportFrom):
            start = (
                ".".join(("wakesight", *place.parent.parts)[: len(place.parts) - node.level + 1]) if node.level else ""
            )
            base = ".".join(filter(None, (start, node.module)))
            for alias in node.names:
                name = f"{base}.{alias.name}" if base == "wakesight" else base
                yield node.lineno, wakesight._WHERE.get(alias.name, name) if base == "wakesight" else name
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "wakesight"
            and node.attr in wakesight._WHERE
        ):
            yield node.lineno, wakesight._WHERE[node.attr]


def test_every_import_follows_the_arrows():
    assert violations(PACKAGE) == []


def test_the_order_names_every_folder_and_no_other():
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}

    assert there - {"__init__"} == set(RANK)


@pytest.mark.parametrize(
    ("place", "code", "reported"),
    [
        ("scores/new.py", "from wakesight.policy import Policy", "scores/new.py:1: scores imports wakesight.policy"),
        ("scores/new.py", "import wakesight.cache.pool", "scores imports wakesight.cache.pool"),
        (
            "scores/new.py",
            "def f():\n    from wakesight.budget import base",
            "new.py:2: scores imports wakesight.budget",
        ),
        ("scores/new.py", "from wakesight import Policy", "scores imports wakesight.policy"),
        ("scores/new.py", "from wakesight import load", "scores imports wakesight.engines.hf.engine"),
        ("scores/new.py", "from wakesight import budget", "scores imports wakesight.budget"),
        ("scores/new.py", "import wakesight\nwakesight.load('x')", "scores imports wakesight.engines.hf.engine"),
        ("scores/new.py", "from ..cache import pool", "scores imports wakesight.cache"),
        ("scores/deep/new.py", "from ...cache.pool import Pool", "scores imports wakesight.cache.pool"),
        ("scores/new.py", "from .. import cache", "scores imports wakesight.cache"),
        ("core.py", "from wakesight.testing import tiny", "core imports wakesight.testing"),
        ("engines/session.py", "import transformers", "engines/session.py:1: imports transformers"),
        ("cli/new.py", "def f():\n    from transformers.cache_utils import Cache", "imports transformers.cache_utils"),
        ("engines/hf/new.py", "import vllm.config", "imports vllm.config"),
        ("orchard/new.py", "", "orchard has no place in the order"),
    ],
)
def test_the_check_fails_on_a_planted_violation(tmp_path, place, code, reported):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(code + "\n")

    (found,) = violations(tmp_path)

    assert found.endswith(reported)


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("engines/session.py", "from wakesight.models.chat import Frame"),
        ("engines/hf/new.py", "import transformers"),
        ("cli/new.py", "from wakesight import __version__"),
        ("scores/new.py", "from .base import Scorer\nfrom ..core import Scores\nimport transformers_other"),
        ("scores/deep/new.py", "from ..base import Scorer"),
        ("testing/new.py", "from wakesight.cli.main import main\nimport transformers"),
        ("bench/new.py", "import wakesight\nprint(wakesight.__version__)"),
    ],
)
def test_the_check_passes_what_is_allowed(tmp_path, place, code):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(code + "\n")

    assert violations(tmp_path) == []


HEAVY = ("torch", "transformers", "numpy", "rich", "click", "matplotlib", "gguf")


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after running `code`."""
    code += f"\nimport json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_front_door_loads_nothing_heavy():
    assert loaded_by("import wakesight") == set()


def test_the_command_line_starts_without_torch_and_transformers():
    assert not loaded_by("import wakesight.cli.main") & {"torch", "transformers", "numpy"}


def test_the_fresh_interpreter_check_can_fail():
    assert loaded_by("import wakesight, click") == {"click"}


def test_everything_beside_the_engine_works_without_transformers():
    """Modules outside transformers' own places import while it is blocked, and the block is a real one."""
    files = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if file.name != "__main__.py"]
    files.remove(Path("engines/vllm/patches.py"))  # what touches vLLM's classes, and nothing else
    free = [file for file in files if not any(file.is_relative_to(place) for place in ONLY_UNDER["transformers"])]
    names = [".".join(("wakesight", *file.with_suffix("").parts)).removesuffix(".__init__") for file in free]
    blocked = "import importlib, sys\nsys.modules['transformers'] = None\n"
    load = "for name in {}: importlib.import_module(name)\nsys.modules.pop('transformers')"

    loaded = loaded_by(blocked + load.format([*names, "wakesight.models.chat", "wakesight.models.families"]))

    assert "transformers" not in loaded
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        loaded_by(blocked + load.format(["wakesight.models.load"]))

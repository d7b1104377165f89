"""Imports go one way along the data flow, optional engines stay where they belong, importing us loads nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "wakesight"
FLOW = [
    "errors",
    "core",
    "registry",
    "models",
    "signals",
    "scores",
    "budget",
    "selection",
    "policy",
    "cache",
    "engines",
    "bench",
    "report",
    "cli",
    "testing",
]
TRANSFORMERS = {"models", "engines", "bench", "testing"}


def imported(file: Path) -> set[str]:
    """Every module a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def wrong_arrows(source: Path) -> list[str]:
    found = []
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        if parts == ("__init__",):
            continue
        here = FLOW.index(parts[0])
        for name in imported(file):
            root = name.split(".")
            if root[0] == "wakesight" and len(root) > 1 and root[1] in FLOW and FLOW.index(root[1]) > here:
                found.append(f"{'/'.join(parts)} imports {name}")
            if root[0] == "vllm" or (root[0] == "transformers" and parts[0] not in TRANSFORMERS):
                found.append(f"{'/'.join(parts)} imports {name}")
    return found


def test_arrows_go_one_way():
    assert wrong_arrows(SOURCE) == []


def test_the_check_can_fail(tmp_path):
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "bad.py").write_text("def f():\n    from wakesight.engines import hf\n")
    (tmp_path / "cache.py").write_text("import transformers\nimport vllm\n")
    assert len(wrong_arrows(tmp_path)) >= 3


def test_importing_wakesight_loads_no_engine():
    code = "import sys, wakesight; print(sorted({'torch', 'transformers', 'vllm'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

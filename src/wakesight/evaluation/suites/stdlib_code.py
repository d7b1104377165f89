"""Functions of Python's standard library, cut with `ast`: code to find, and the docstring that describes it.

The docstring is taken out of the code, so the description does not stand beside what it describes. The set
depends on the Python that runs, so `SOURCE` names its version.
"""

from __future__ import annotations

import ast
import functools
import platform
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from wakesight.evaluation.suites import text

SOURCE = f"generated:python-{platform.python_version()}-stdlib"
REPO = f"python-{platform.python_version()}"
LINES = range(5, 41)  # long enough that similarity means something, short enough to repeat


@dataclass(frozen=True)
class Function:
    """module: where it is from. code: without its docstring, from the first column. description: the docstring."""

    module: str
    name: str
    code: str
    description: str


@functools.cache
def functions() -> tuple[Function, ...]:
    """Every function and method with a docstring that describes it without naming it; names and codes differ."""
    found: dict[str, Function] = {}
    codes: set[str] = set()
    for source, module in text.passages("code"):
        for function in _cut(source.rpartition("/")[2], module):
            if function.name not in found and function.code not in codes:
                found[function.name] = function
                codes.add(function.code)
    return tuple(found.values())


def _cut(module: str, source: str) -> Iterator[Function]:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        described = " ".join(docstring.split("\n\n")[0].split())
        first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
        note = node.body[0]
        last = note.end_lineno or note.lineno
        if note.lineno <= node.lineno or (node.body[1].lineno <= last):
            continue  # on one line with other code
        kept = lines[first - 1 : note.lineno - 1] + lines[last : node.end_lineno]
        code = textwrap.dedent("\n".join(line for line in kept if line.strip()))
        named = re.search(rf"\b{re.escape(node.name)}\b", described)
        if 40 <= len(described) <= 400 and not named and len(code.splitlines()) in LINES and _is_code(code):
            yield Function(module, node.name, code, described)


def _is_code(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True

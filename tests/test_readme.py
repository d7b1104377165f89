"""The README's way to an estimator in Python, run as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import wakesight
from wakesight.cli.demo import closed

README = Path(__file__).parents[1] / "README.md"


def test_gatesight_in_python(capsys):
    demo = closed()
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "gatesight" in block]
    names = {"ws": wakesight, "text": demo.text}
    exec(block, names)
    assert capsys.readouterr().out.strip()
    assert names["small"].policy.allocation == "utility_global"
    assert names["small"].stats.kv_bytes_freed > 0
    question = re.search(r'"(ask [^"]*)"', block)
    assert question
    assert question[1] in demo.questions

"""One self-contained HTML page: no network, no outside file; a content policy in the page itself forbids both."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Sequence
from html import escape
from string import Template
from typing import Any

import wakesight
from wakesight.evaluation.scored import counted
from wakesight.report.folder import Run
from wakesight.report.items import Items, collect
from wakesight.report.palette import DARK, LIGHT, css
from wakesight.report.safe_json import in_script
from wakesight.report.sections import about, article

MOST_CONTEXTS = 300


def page(runs: Sequence[Run], most_contexts: int = MOST_CONTEXTS) -> str:
    """The page of some runs. The same runs give the same bytes. Raises RequestError without matplotlib."""
    items = collect(runs, most_contexts)
    script = _asset("page.js")
    return Template(_asset("page.html")).substitute(
        title=escape(f"{', '.join(run.name for run in runs)} - wakesight report"),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Template(_asset("page.css")).substitute(light=css(LIGHT), dark=css(DARK)),
        runs=_run_picker(runs),
        articles="\n".join(article(run, place) for place, run in enumerate(runs)),
        about="\n".join(about(run, place) for place, run in enumerate(runs)),
        left_out=escape(_left_out(items)),
        index=in_script(items.index),
        blocks="\n".join(_block(name, block) for name, block in items.blocks.items()),
        version=escape(wakesight.__version__),
        script=script,
    )


def _asset(name: str) -> str:
    return (importlib.resources.files("wakesight") / "report" / "template" / name).read_text("utf-8")


def _run_picker(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    options = "".join(f'<option value="{place}">{escape(run.name)}</option>' for place, run in enumerate(runs))
    return f'<label class="pick-run">Run <select id="pick-run">{options}</select></label>'


def _left_out(items: Items) -> str:
    if not items.left_out:
        return ""
    return (
        f"{counted(items.left_out, 'context')} left out of this page, to keep its size in bounds; the tables and "
        "figures count them, and the run folder has them. Use --contexts to embed more."
    )


def _block(name: str, block: dict[str, Any]) -> str:
    return f'<script type="application/json" id="{name}">{in_script(block)}</script>'

"""An SVG file of matplotlib as a part of our page: own ids, the page's colours and font, no outside reference."""

from __future__ import annotations

import re
from html import escape

from wakesight.report.palette import variables


def inline(svg: str, name: str, about: str) -> str:
    """name: unique in the page. about: what a screen reader says."""
    head, _, body = svg[svg.index("<svg") :].partition(">")
    (box,) = re.findall(r'viewBox="[^"]*"', head)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="(curve\d+)">', r'<g class="curve \1">', body)
    body = re.sub(r'<g id="[a-zA-Z][^"]*">', "<g>", body)  # names of axes and ticks, which nothing refers to
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', body)
    body = body.replace("url(#", f"url(#{name}-")
    for colour, variable in variables().items():
        body = body.replace(colour, variable)
    return f'<svg {box} role="img" aria-label="{escape(about)}">{body.strip()}'

"""The pictures of the report in docs/: .venv/bin/python tests/report/screenshots.py RUN_FOLDER ITEM_HASH

RUN_FOLDER: a run of wakesight eval. ITEM_HASH: which item to show, as the page's address has it ("item=0.0.0.1").
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from chromium import Tab, tab
from PIL import Image

from wakesight.report.folder import open_runs
from wakesight.report.page import page

DOCS = Path(__file__).parents[2] / "docs"
GAP, GROUND = 16, (150, 158, 168)


def at(opened: Tab, selector: str, width: int, height: int) -> Image.Image:
    """What a reader sees after scrolling to an element."""
    opened.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    opened.run(f"window.scrollTo(0, {selector}.getBoundingClientRect().top + scrollY - 68)")
    with tempfile.TemporaryDirectory() as folder:
        opened.screenshot(Path(folder) / "shot.png")
        return Image.open(io.BytesIO((Path(folder) / "shot.png").read_bytes())).convert("RGB")


def joined(parts: list[Image.Image], *, across: bool) -> Image.Image:
    """Several screens in one picture, a gap between them."""
    sizes = [(part.width, part.height) for part in parts]
    length = sum(size[0 if across else 1] for size in sizes) + GAP * (len(parts) - 1)
    whole = Image.new("RGB", (length, sizes[0][1]) if across else (sizes[0][0], length), GROUND)
    place = 0
    for part in parts:
        whole.paste(part, (place, 0) if across else (0, place))
        place += (part.width if across else part.height) + GAP
    return whole  # in all its colours: a palette of 256 gives two curves one colour, or a table the wrong shades


def main(run: str, item: str) -> None:
    with tempfile.TemporaryDirectory() as folder, tab() as opened:
        file = Path(folder) / "report.html"
        file.write_text(page(open_runs([Path(run)])), encoding="utf-8")
        top, legend = "document.body", "document.querySelector('.legend')"
        items, kept = "document.querySelector('#items')", "document.querySelector('#map')"
        opened.open(f"{file.as_uri()}#{item}", 1400)
        places = ((top, 1000), (legend, 700), (items, 900), (kept, 640))
        desktop = [at(opened, place, 1400, height) for place, height in places]
        joined(desktop, across=False).save(DOCS / "report-desktop.png", optimize=True)
        opened.send("Page.navigate", url="about:blank")
        opened.open(f"{file.as_uri()}#{item}", 400)
        phone = [at(opened, place, 400, 860) for place in (top, legend, items, kept)]
        joined(phone, across=True).save(DOCS / "report-phone.png", optimize=True)
        assert opened.complaints == []


if __name__ == "__main__":
    main(*sys.argv[1:])

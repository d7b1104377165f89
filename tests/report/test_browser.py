"""The page in a real browser: it renders, sorts, drills down and is usable by keyboard, on a desk and on a phone."""

from __future__ import annotations

import pytest
from chromium import BINARY, tab
from run_folders import EVIL, HEADS, PIECES, make_run

from wakesight.report.folder import open_runs
from wakesight.report.page import page

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium here; on Debian: apt-get install chromium")
FIRST_TABLE = "document.querySelector('table.sortable')"


@pytest.fixture(scope="module")
def browser():
    with tab() as opened:
        yield opened


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("page")
    many = tuple(f"niah_{64 * n}" for n in range(1, 9))  # wider than any screen
    runs = [make_run(place / "one", tasks=many, items=2, skip="niah_64-1"), make_run(place / "two", output=EVIL)]
    long = make_run(place / "long", tasks=("vt_64",), items=1, copies=600)
    file = place / "report.html"
    file.write_text(page(open_runs([*runs, long])), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(autouse=True)
def no_complaint(browser):
    """No console message, no exception, nothing loaded but the page, whatever a test did."""
    browser.complaints.clear()
    browser.requests.clear()
    yield
    assert browser.complaints == []
    assert {request.partition("#")[0] for request in browser.requests} <= {browser.run("location.href.split('#')[0]")}


def select(browser, selector: str, value: str) -> None:
    """Choose an option, given as an expression of the select element s."""
    browser.run(
        f"(s => {{ s.value = {value}; s.dispatchEvent(new Event('change')); }})(document.querySelector('{selector}'))"
    )


def column(browser, number: int) -> list[str]:
    return browser.run(f"[...{FIRST_TABLE}.tBodies[0].rows].map(row => row.cells[{number}].firstChild.textContent)")


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_renders_without_scrolling_sideways(browser, address, width, dark):
    browser.open(address, width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, nav, caption, .skip') && "
    assert (
        browser.run(f"{wide} e.getClientRects().length && e.getBoundingClientRect().right > {width} + 1).length") == 0
    )
    assert browser.run("document.querySelectorAll('figure svg').length") > 10
    assert browser.run("[...document.querySelectorAll('h2')].some(h => h.textContent === 'Scores')")


def test_on_a_phone_the_tables_of_one_task_fit(browser, address):
    browser.open(address, 400)
    select(browser, "#pick-run", "'2'")  # the run with one task
    browser.wait("document.querySelectorAll('.tokens span').length === 4000")
    tables = "[...document.querySelectorAll('.scroll')].filter(e => e.getClientRects().length)"
    over = browser.run(f"{tables}.slice(0, 3).map(e => [e.getAttribute('aria-label'), e.scrollWidth - e.clientWidth])")
    assert len(over) == 3
    assert all(by <= 0 for _, by in over), over
    assert "kept entries" in browser.run(f"{tables}[0].textContent")


@pytest.mark.parametrize("width", [400, 1400])
def test_what_is_tapped_is_large_enough(browser, address, width):
    browser.open(address, width)
    small = browser.run(
        "[...document.querySelectorAll('button, select, .rules label, nav a, .answers label')]"
        ".filter(e => e.getClientRects().length && e.getBoundingClientRect().height < 32).map(e => e.outerHTML)"
    )
    assert small == []


def test_it_sorts_by_click_and_by_enter(browser, address):
    browser.open(address)
    before = column(browser, 2)
    browser.click("table.sortable thead th:nth-child(3) button")
    falling = [float(x) for x in column(browser, 2)]
    assert falling == sorted(falling, reverse=True) != [float(x) for x in before]
    state = f"[...{FIRST_TABLE}.querySelectorAll('thead th')].map(th => th.getAttribute('aria-sort'))"
    assert browser.run(state)[:3] == ["none", "none", "descending"]

    browser.run(f"{FIRST_TABLE}.querySelector('thead th:nth-child(2) button').focus()")
    browser.press("Enter", 13, "\r")
    browser.press("Enter", 13, "\r")
    assert [float(x) for x in column(browser, 1)] == sorted(float(x) for x in column(browser, 1))
    assert browser.run(state)[:3] == ["none", "ascending", "none"]


def test_it_drills_down_to_the_tokens_of_an_arm(browser, address):
    browser.open(address)
    assert browser.run("document.querySelectorAll('.answers tbody tr').length") == 13
    assert browser.run("document.querySelector('.prompt').textContent").endswith("What is code 0?\nThe code is")
    assert browser.run("document.querySelector('.tokens').textContent") == "".join(PIECES)
    shares = "[...document.querySelectorAll('.tokens span')].map(s => Number(s.style.getPropertyValue('--s')))"
    colours = (
        "new Set([...document.querySelectorAll('.tokens span')].map(s => getComputedStyle(s).backgroundColor)).size"
    )
    sparse = browser.run(shares)
    assert browser.run(colours) > 1
    browser.click(".answers tr[data-arm='0'] label")
    assert browser.run(shares) == [1.0] * len(PIECES) != sparse
    assert browser.run("document.querySelectorAll('.tokens .hit').length") == 2  # " 41" and "7"
    browser.click(".tokens span:nth-child(5)")
    assert browser.run("document.querySelector('#readout').textContent") == (
        f'Token 4 "The": kept by {HEADS} of {HEADS} (100%)'
    )


def test_it_goes_through_tasks_contexts_and_questions(browser, address):
    browser.open(address)
    browser.click("#next")
    browser.wait("document.querySelector('.prompt').textContent.includes('code 1')")
    select(browser, "#pick-task", "'niah_64'")
    browser.wait("item.source === 'generated:niah_64'")
    select(browser, "#pick-context", "s.options[1].value")
    browser.wait("document.querySelector('#item').textContent.includes('not run: the model reads at most 8 tokens')")
    shared = browser.run("location.href")
    browser.send("Page.navigate", url="about:blank")
    browser.open(shared)
    assert "not run" in browser.run("document.querySelector('#item').textContent")


def test_everything_is_reached_and_worked_by_keyboard(browser, address):
    browser.open(address)
    seen = []
    for _ in range(400):
        browser.press("Tab", 9)
        here = browser.run(
            "(e => e === document.body ? '' : e.id || e.name || e.className || e.textContent)(document.activeElement)"
        )
        outlined = browser.run(
            "(e => getComputedStyle(e).outlineStyle !== 'none' || e.matches('.rules input'))(document.activeElement)"
        )
        assert outlined or here in ("", "main"), here
        seen.append(here)
        if here == "tokens":
            break
    assert {"skip", "pick-run", "rule-0", "pick-task", "pick-question", "next", "arm", "tokens", "scroll"} <= set(seen)
    browser.press("ArrowRight", 39)
    browser.press("ArrowRight", 39)
    assert browser.run("document.querySelector('#readout').textContent").startswith('Token 1 " this"')
    browser.run("document.querySelector('.answers input:checked').focus()")
    browser.press("ArrowDown", 40)
    assert browser.run("document.querySelector('.answers tr.chosen').dataset.arm") == "2"


def test_rules_and_runs_change_what_is_shown(browser, address):
    browser.open(address)
    shown = "[...document.querySelectorAll('.rule')].filter(e => e.getClientRects().length).map(e => e.dataset.rule)"
    assert browser.run(shown) == ["0"]
    browser.click(".rules label:nth-of-type(2)")
    assert browser.run(shown) == ["1"]
    select(browser, "#pick-run", "'1'")
    browser.wait("document.querySelector('.answer div')?.textContent.includes('window.stolen')")
    assert browser.run("[window.stolen, document.querySelectorAll('img').length, document.title.includes('two')]") == [
        None, 0, True,
    ]  # fmt: skip


def test_the_legend_brings_a_method_forward(browser, address):
    browser.open(address)
    browser.click(".legend button:nth-child(2)")
    front = "[...document.querySelectorAll('.panels.chosen .curve')].filter(c => getComputedStyle(c).opacity > 0.5)"
    browser.wait(f"{front}.length > 0 && {front}.every(c => c.classList.contains('curve1'))")
    browser.click(".legend button:nth-child(2)")
    assert browser.run("document.querySelectorAll('.panels.chosen').length") == 0


def test_a_long_context_is_shown_in_parts(browser, address):
    browser.open(address)
    select(browser, "#pick-run", "'2'")
    browser.wait("document.querySelectorAll('.tokens span').length === 4000")
    assert "tokens 1 to 4,000 of 9,600" in browser.run("document.querySelector('#map').textContent")
    browser.run("goTo(9599)")
    assert browser.run("document.querySelector('#readout').textContent").startswith('Token 9,599 "é"')

"""Check the live page in headless Chromium, against a server that returns made-up figures."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixture_page import FixturePage, described, graph_of, work
from support.browser import CHROMIUM, Browser, Tab

from flowchan import Graph

Shape = dict[str, Any]  # the response from /graph
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

EVIL = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>&amp;"
ROWS = "document.querySelectorAll('#table tbody tr').length"
ORDER = "[...document.querySelectorAll('#table tbody tr')].map((row) => row.dataset.stage).join()"
DARK = "rgb(17, 22, 27)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def small() -> Shape:
    return described(graph_of(5))


@pytest.fixture(scope="module")
def large() -> Shape:
    return described(graph_of(35))


def shown(tab: Tab) -> None:
    """Wait until the page shows a snapshot."""
    tab.wait(f"{ROWS} > 0")


def test_page_shows_rates_from_snapshot(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        snapshot = page.figures.snapshot(61.0)
        snapshot["end_rate"] = 1234.4
        for number, stage in enumerate(snapshot["stages"]):
            stage["rate"] = 100.0 + number
        page.send(snapshot)
        tab.wait("document.getElementById('rate').textContent === '1,234/s'")
        assert tab.texts("#table tbody td.rate") == [f"{100 + number}/s" for number in range(5)]
        drawn = tab.texts("#picture .figures .rate")
        assert [text.split(" · ")[0] for text in drawn] == [f"{100 + number}/s" for number in range(5)]
        assert tab.text("#elapsed") == "1 min 1 s"
        assert tab.complaints() == []


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "name": lambda stage: stage["name"],
    "workers": lambda stage: -len(stage["workers"]),
    "rate": lambda stage: -stage["rate"],
    "busy": lambda stage: -stage["busy"],
    "items": lambda stage: -stage["items_out"],
    "failed": lambda stage: -stage["failed"],
    "cores": lambda stage: -stage["cores"],
}
"""Keys by which the first click on a column's header sorts the stages."""


def test_table_sorts_by_each_column_in_both_directions(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page:
        snapshot = page.snapshot
        for number, (one, described_) in enumerate(zip(snapshot["stages"], small["stages"], strict=True)):
            one |= {
                "name": described_["name"],
                "failed": (3 * number) % 5,
                "items_out": 10 + (2 * number) % 5,
            }
        page.send(snapshot)
        known = {stage["id"]: stage for stage in snapshot["stages"]}
        with browser.tab(page.address) as tab:
            shown(tab)
            for column, key in COLUMNS.items():
                tab.click(f"#table th.{column} button")
                expected = [stage["id"] for stage in sorted(snapshot["stages"], key=key)]
                assert tab.evaluate(ORDER) == ",".join(expected), column
                tab.click(f"#table th.{column} button")
                direction = "ascending" if column != "name" else "descending"
                assert tab.evaluate(f"document.querySelector('#table th.{column}').ariaSort") == direction
                values = [key(known[id]) for id in tab.evaluate(ORDER).split(",")]
                assert values == sorted(values, reverse=True), column


def test_table_sorts_by_trend_with_largest_increase_first(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page:
        page.history["stages"]["s3"]["rate"][0] = 1.0
        with browser.tab(page.address) as tab:
            shown(tab)
            tab.click("#table th.trend button")
            assert tab.evaluate(ORDER).startswith("s3,")


def test_selected_stage_shows_its_details(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        # the page shows the bottleneck until the user selects a stage
        assert tab.text("#stage-name") == "resize"
        tab.click("#s3")
        tab.wait("document.getElementById('stage-name').textContent === 'encode'")
        assert tab.text("#stage-about") == "map · on process · thumbnails.py:15"
        assert len(tab.texts("#stage-workers .chip")) == 4
        assert tab.evaluate("document.querySelector('#table tr.selected').dataset.stage") == "s3"
        page.send(page.figures.snapshot(61.0))
        tab.wait("document.getElementById('elapsed').textContent === '1 min 1 s'")
        assert tab.text("#stage-name") == "encode"


def test_page_highlights_bottleneck_in_graph_table_and_header(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        assert tab.evaluate("document.querySelector('#picture .node.limits').id") == "s2"
        assert tab.evaluate("document.querySelector('#table tr.limits').dataset.stage") == "s2"
        assert tab.text("#cause-stage") == "resize"
        moved = page.figures.snapshot(61.0)
        moved["cause"] |= {"stage": "s1"}
        page.send(moved)
        tab.wait("document.querySelector('#picture .node.limits').id === 's1'")
        assert tab.evaluate("document.querySelectorAll('#picture .node.limits').length") == 1
        moved["cause"] = None
        page.send(moved | {"elapsed": 62.0})
        tab.wait("document.querySelector('#picture .node.limits') === null")


def test_jump_button_shows_bottleneck_of_large_graph(browser: Browser, large: Shape) -> None:
    with FixturePage(large) as page, browser.tab(page.address, 400, 800) as tab:
        shown(tab)
        assert tab.evaluate("document.querySelector('#picture svg').classList.contains('far')")
        tab.click("#jump")
        inside = """(() => {
          const frameOf = (selector) => document.querySelector(selector).getBoundingClientRect();
          const node = frameOf("#picture .node.limits"), frame = frameOf("#picture");
          return node.width > 60 && node.left >= frame.left && node.right <= frame.right
            && node.top >= frame.top && node.bottom <= frame.bottom;
        })()"""
        assert tab.wait(inside)


def test_names_that_contain_markup_are_shown_as_text(browser: Browser) -> None:
    graph = graph_of(5, name=EVIL)
    graph.source(range(3), name=EVIL).sink(print, name="end")
    shape = described(graph)
    with FixturePage(shape) as page:
        page.snapshot["advice"] = EVIL
        page.snapshot["cause"] = {"kind": "order", "stage": "s5", "why": EVIL}
        page.snapshot["failures"] = [{"elapsed": 1.0, "stage": "s5", "text": EVIL}]
        page.snapshot["decisions"] = [{"elapsed": 1.0, "stage": "s5", "text": EVIL}]
        page.answers = {"stacks": {"stacks": {EVIL: EVIL}}}
        with browser.tab(page.address) as tab:
            shown(tab)
            tab.click("#stacks")
            tab.wait("document.querySelector('#stack-texts pre') !== null")
            for place in ("#name", "#cause-stage", "#cause-why", "#advice", "#stage-name"):
                assert tab.text(place) == EVIL
            assert tab.texts("#stack-texts h3, #stack-texts pre") == [EVIL, EVIL]
            assert EVIL in tab.texts("#table button.stage")
            assert EVIL in tab.text("#failures li")
            assert EVIL in tab.text("#decisions li")
            assert tab.evaluate("document.querySelectorAll('main img, main script').length") == 0
            assert tab.evaluate("document.title") == f"{EVIL} – flowchan"
            assert tab.complaints() == []


def test_scripts_inside_picture_do_not_run(browser: Browser, small: Shape) -> None:
    shape = copy.deepcopy(small)
    run = "document.title='run'"
    bad = f"""<script>{run}</script><a href="javascript:{run}"><image href="x" onerror="{run}"/></a>"""
    shape["svg"] = shape["svg"].replace("</svg>", f"{bad}</svg>")
    with FixturePage(shape) as page, browser.tab(page.address) as tab:
        shown(tab)
        assert tab.texts("#picture script, #picture image, #picture [href]") == []
        assert tab.evaluate("document.title") == "thumbnails – flowchan"
        # since version 156, Chromium reports a blocked handler while it parses the picture
        assert all("inline event handler" in one and "blocked" in one for one in tab.complaints())


def test_page_without_picture_shows_only_table(browser: Browser, small: Shape) -> None:
    with FixturePage(small | {"svg": None}) as page, browser.tab(page.address) as tab:
        shown(tab)
        assert tab.evaluate("document.getElementById('graph').hidden")
        assert tab.evaluate(ROWS) == 5
        assert tab.complaints() == []


def test_page_keeps_final_state_after_server_closes(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        page.send(page.figures.snapshot(61.0, "done"))
        page.end()
        tab.wait("document.body.classList.contains('ended')")
        page.close()
        assert tab.text("#state") == "✓ done"
        assert tab.evaluate("document.getElementById('connection').hidden")
        assert tab.complaints() == []


def test_failed_run_shows_its_error(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        page.send(page.figures.snapshot(61.0, "failed"))
        page.end()
        tab.wait("document.getElementById('state').textContent === '✗ failed'")
        assert tab.text("#failure-text") == "OSError: disk full"
        assert "line 31, in decode" in tab.text("#stage-failures pre")


def test_page_reports_lost_connection_until_it_reconnects(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        page.refuse = True
        page.drop()
        tab.wait("!document.getElementById('connection').hidden")
        assert tab.text("#connection").startswith("Connection to the run lost.")
        assert page.refused.wait(60)
        page.refuse = False
        tab.wait("document.getElementById('connection').hidden")


def test_saved_report_opens_from_file_without_other_requests(
    browser: Browser, small: Shape, tmp_path: Path
) -> None:
    with FixturePage(small) as page:
        page.snapshot = page.figures.snapshot(61.0, "done")
        (tmp_path / "report.html").write_text(page.report())
    address = (tmp_path / "report.html").as_uri()
    with browser.tab(address) as tab:
        shown(tab)
        assert tab.text("#state") == "✓ done"
        assert tab.evaluate("document.querySelectorAll('#picture .figures').length") == 5
        assert tab.evaluate("document.querySelectorAll('.uplot canvas').length") == 2
        assert tab.evaluate("['save', 'stacks', 'what-if'].every((id) => document.getElementById(id).hidden)")
        assert tab.evaluate("getComputedStyle(document.querySelector('.panel')).borderRadius") == "8px"
        assert [one for one in tab.requests() if not one.startswith("data:")] == [address]
        assert tab.complaints() == []


def test_page_can_be_saved_after_server_has_closed(browser: Browser, small: Shape, tmp_path: Path) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        tab.wait("performance.getEntriesByType('resource').some((one) => one.name.endsWith('/report.html'))")
        failed = page.figures.snapshot(61.0, "failed")
        failed["failures"][0]["text"] = EVIL
        page.send(failed)
        page.end()
        tab.wait("document.body.classList.contains('ended')")
        page.close()
        tab.evaluate("URL.createObjectURL = (blob) => { window.saved = blob; return 'data:,'; }; 0")
        tab.click("#save")
        (tmp_path / "report.html").write_text(tab.evaluate("saved.text()"))
    with browser.tab((tmp_path / "report.html").as_uri()) as tab:
        shown(tab)
        assert tab.text("#state") == "✗ failed"
        assert tab.text("#elapsed") == "1 min 1 s"
        assert tab.text("#failures li:last-child span:last-child") == EVIL
        assert tab.complaints() == []


def test_keyboard_sorts_table_selects_stages_and_moves_picture(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        tab.evaluate("document.querySelector('#table th.busy button').focus()")
        tab.press("Enter")
        tab.wait("document.querySelector('#table th.busy').ariaSort === 'descending'")
        tab.evaluate("document.querySelector('#table tr[data-stage=s3] button').focus()")
        tab.press("Enter")
        tab.wait("document.getElementById('stage-name').textContent === 'encode'")
        moved = page.figures.snapshot(61.0)
        moved["stages"][3]["busy"] = 0.99
        page.send(moved)
        tab.wait(f"{ORDER}.startsWith('s3,')")
        # focus follows the row to its new position
        assert tab.evaluate("document.activeElement.textContent") == "encode"
        tab.evaluate("document.getElementById('picture').focus()")
        view = "document.querySelector('#picture svg').getAttribute('viewBox')"
        whole = tab.evaluate(view)
        for key in ("+", "ArrowRight", "ArrowDown"):
            before = tab.evaluate(view)
            tab.press(key)
            tab.wait(f"{view} !== {before!r}")
        tab.press("0")
        tab.wait(f"{view} === {whole!r}")
        tab.press("w")
        tab.wait("document.querySelectorAll('#picture .waits path').length === 4")


def test_mouse_wheel_zooms_picture_only_if_focused(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        view = "document.querySelector('#picture svg').getAttribute('viewBox')"
        whole = tab.evaluate(view)
        event = "new WheelEvent('wheel', {deltaY: -100, cancelable: true})"
        turn = f"document.getElementById('picture').dispatchEvent({event})"
        assert tab.evaluate(turn)  # the page does not cancel the event, so the browser scrolls
        assert tab.evaluate(view) == whole
        tab.evaluate("document.getElementById('picture').focus()")
        assert not tab.evaluate(turn)
        assert tab.evaluate(view) != whole


def test_pinch_gesture_zooms_picture(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address, 400, 800) as tab:
        shown(tab)
        size = "document.querySelector('#picture svg').viewBox.baseVal.width"
        whole = tab.evaluate(size)
        frame = tab.evaluate("document.getElementById('picture').getBoundingClientRect().toJSON()")
        x, y = frame["x"] + frame["width"] / 2, frame["y"] + frame["height"] / 2
        for kind, apart in (("touchStart", 20), ("touchMove", 40), ("touchMove", 80)):
            points = [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
            tab.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        tab.wait(f"{size} < {whole} / 1.5")


def test_large_graph_collapses_chains_of_stages_in_same_state(browser: Browser, large: Shape) -> None:
    with FixturePage(large) as page, browser.tab(page.address) as tab:
        shown(tab)
        assert tab.evaluate(ROWS) < 15
        assert tab.evaluate("document.querySelector('#table tr.limits') !== null")
        tab.click("#table button.chain")
        tab.wait(f"{ROWS} > 15 || document.querySelector('#table button.chain').ariaExpanded === 'true'")
        tab.click("#collapse")
        tab.wait(f"{ROWS} === {len(large['stages'])}")


def test_filter_shows_stages_with_matching_names(browser: Browser, large: Shape) -> None:
    with FixturePage(large) as page, browser.tab(page.address) as tab:
        shown(tab)
        tab.evaluate("document.getElementById('filter').focus()")
        for key in "Merge":
            tab.press(key)
        tab.wait(f"{ROWS} === 2")
        assert tab.texts("#table button.stage") == ["merge3", "merge19"]


def test_page_uses_dark_colours_if_preferred(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address, dark=True) as tab:
        shown(tab)
        ground = "getComputedStyle(document.body).backgroundColor"
        assert tab.evaluate(ground) == DARK
        tab.show(1440, 900, dark=False)
        tab.wait(f"{ground} !== '{DARK}'")


def test_page_fits_phone_without_horizontal_scrolling(browser: Browser, large: Shape) -> None:
    with FixturePage(large) as page, browser.tab(page.address, 400, 800) as tab:
        shown(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400


def test_page_requests_stacks_and_predictions_on_demand(browser: Browser, small: Shape) -> None:
    more = {"change": "one more worker", "now": 240.0, "why": "decode is busy 99 %"}
    rows = [
        more | {"stage": "s1", "predicted": 241.0, "low": 235.0, "high": 250.0, "limited_by": "resize"},
        more | {"stage": "s2", "predicted": 312.0, "low": 290.0, "high": 330.0, "limited_by": "decode"},
    ]
    with FixturePage(small) as page:
        page.answers = {
            "stacks": lambda query: {"stacks": {f"{query['stage']}#1": "in decode"}},
            "what_if": {"rows": rows},
        }
        with browser.tab(page.address) as tab:
            shown(tab)
            tab.click("#stacks")
            tab.wait("document.querySelector('#stack-texts pre')?.textContent === 'in decode'")
            assert tab.text("#stack-texts h3") == "s2#1"
            tab.click("#what-if")
            tab.wait("document.querySelectorAll('#what-if-rows tbody tr').length === 2")
            first = tab.texts("#what-if-rows tbody tr:first-child td")
            assert first == ["resize", "one more worker", "240/s", "312/s", "290/s – 330/s", "decode"]
            assert tab.complaints() == []


def test_page_hides_buttons_for_unsupported_requests(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        for button in ("stacks", "what-if"):
            tab.click(f"#{button}")
            tab.wait(f"document.getElementById('{button}').hidden")
        assert tab.text("#stack-texts") == "this run has no stacks"


def test_page_shows_path_latency_if_items_are_sampled(browser: Browser, small: Shape) -> None:
    with FixturePage(small) as page, browser.tab(page.address) as tab:
        shown(tab)
        path = "list files → decode → … → write"
        assert tab.texts("#latency tbody td") == [path, "1,234", "42 ms", "1.3 s"]
        page.send(page.figures.snapshot(61.0) | {"latency": []})
        tab.wait("document.getElementById('latency').hidden")


def test_page_shows_history_to_new_viewer(browser: Browser, small: Shape) -> None:
    with FixturePage(small, seconds=50) as page, browser.tab(page.address) as tab:
        shown(tab)
        points = "document.querySelector('#table .trend path').getAttribute('d').split('L').length"
        assert tab.evaluate(points) >= 50


def test_page_follows_real_run_until_it_ends(browser: Browser) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(item: int) -> int:
        begun.set()
        assert go_on.wait(60)
        return item

    graph = Graph("real")
    graph.source(range(7), name="numbers").map(wait, workers=2).sink(work, name="end")
    with graph.start(page=True) as run:
        assert begun.wait(60)
        assert run.page is not None
        with browser.tab(run.page) as tab:
            shown(tab)
            assert tab.text("#state") == "● running"
            assert tab.texts("#picture .figures .name") == ["numbers", "wait", "end"]
            go_on.set()
            tab.wait("document.body.classList.contains('ended')")
            assert tab.text("#state") == "✓ done"
            assert tab.texts("#table td.items") == ["7", "7", "7"]
            assert tab.complaints() == []
        run.wait()

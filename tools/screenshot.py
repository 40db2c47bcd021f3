"""Take screenshots of the live page in headless Chromium, and measure its updates.

usage: screenshot.py FOLDER [NAME…]    (NAME is part of a picture's name, such as 35, dark or failed)

The pictures show graphs with 5, 35 and 150 stages in light and dark mode, in a wide and in a narrow window.
The runs are active, failed, ended or disconnected. The numbers in the pictures are invented.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "insight")]

from fixture_page import FixturePage, described, graph_of  # noqa: E402
from support.browser import Browser, Tab  # noqa: E402

UPDATES = 40


def prepare(page: FixturePage, tab: Tab, state: str) -> None:
    """Put the page into a state, and wait until the page shows that state."""
    tab.wait("document.querySelectorAll('#table tbody tr').length > 0")
    if state in ("failed", "done"):
        page.send(page.figures.snapshot(61.0, state))
        page.end()
        tab.wait("document.body.classList.contains('ended')")
    elif state == "lost":
        page.close()
        tab.wait("!document.getElementById('connection').hidden")
    elif state == "waits":
        tab.click("#waits")
    elif state == "near":
        tab.click("#jump")


def measure(page: FixturePage, tab: Tab) -> str:
    """Return the time of an update in milliseconds: wall-clock time and CPU time of the page's thread."""
    tab.wait("document.querySelectorAll('#table tbody tr').length > 0")
    tab.evaluate(
        "window.took = [];"
        "const took_ = (list) => took.push(...list.getEntries().map((one) => one.duration));"
        "new PerformanceObserver(took_).observe({ entryTypes: ['measure'] }); 0"
    )
    tab.call("Performance.enable", timeDomain="threadTicks")

    def spent() -> list[float]:
        metrics = {one["name"]: one["value"] for one in tab.call("Performance.getMetrics")["metrics"]}
        return [
            1000 * metrics[f"{name}Duration"] / UPDATES
            for name in ("Script", "RecalcStyle", "Layout", "Task")
        ]

    before = spent()
    for number in range(UPDATES):
        page.send(page.figures.snapshot(62.0 + number))
        tab.wait(f"took.length > {number}")
    script, style, layout, task = (late - early for late, early in zip(spent(), before, strict=True))
    times = sorted(tab.evaluate("took"))
    return (
        f"{times[len(times) // 2]:.1f} ms per update (wall clock), at most {times[-1]:.1f} ms; "
        f"CPU: script {script:.1f} ms, style {style:.1f}, layout {layout:.1f}, all {task:.1f}"
    )


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    states = ("running", "waits", "near", "failed", "done", "lost")
    with Browser() as browser:
        for stages in (5, 35, 150):
            graph = described(graph_of(stages))
            for state, dark, width in itertools.product(states, (False, True), (1440, 400)):
                name = f"{stages}-{state}-{'dark' if dark else 'light'}-{width}"
                if any(one not in name.split("-") for one in names):
                    continue
                with FixturePage(graph) as page, browser.tab(page.address, width, 900, dark=dark) as tab:
                    prepare(page, tab, state)
                    tab.screenshot(folder / f"{name}.png", whole=True)
                    for complaint in tab.complaints():
                        print(f"{name}: {complaint}")
            if not names or "measure" in names:
                with FixturePage(graph) as page, browser.tab(page.address) as tab:
                    print(f"{stages} stages: {measure(page, tab)}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])

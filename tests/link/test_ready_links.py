"""One thread can wait for the events and reports of many links."""

from __future__ import annotations

import threading
from typing import Any

from flowchan import Channel, _core
from flowchan.transport.link_events import LinkBroken, next_event
from tests.link.linked import Linked
from tests.support.waiting import WAIT_LIMIT_S


def test_link_announces_reports_and_events_under_its_number() -> None:
    events, reports = _core.ReadyLinks(), _core.ReadyLinks()
    commands, answers, there, back = (Channel[Any](4, across="processes") for _ in range(4))
    with Linked() as linked:
        ends = commands.reader(), answers.writer(), there.writer(), back.reader()
        linked.owner_side.open_stream(0, [ends[0]], [ends[1]])
        linked.owner_side.announce(7, events, reports)
        linked.worker_side.open_stream(0, [ends[2]], [ends[3]])
        back.put("report")
        assert reports.wait(WAIT_LIMIT_S) == [7]
        assert answers.get_nowait() == "report"
        assert events.wait(0) == []
        linked.worker_side.close()
        assert events.wait(WAIT_LIMIT_S) == [7]
        assert isinstance(next_event(linked.owner_side, 0), LinkBroken)


def test_ready_links_returns_each_link_once_and_ends_waits() -> None:
    ready = _core.ReadyLinks()
    for number in (3, 1, 3):
        ready.add(number)
    assert ready.wait() == [1, 3]
    assert ready.wait(0) == []
    waiting = threading.Thread(target=ready.wait)
    waiting.start()
    ready.close()
    waiting.join()
    assert ready.wait() == []

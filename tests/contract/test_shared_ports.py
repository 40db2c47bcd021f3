"""Threads that share a port of a ``processes`` channel put and get intact items."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from flowchan import ChannelError


@pytest.mark.copying
def test_threads_that_share_a_port_get_intact_items(make):
    """Although each get finishes the previous item, no thread may read reused memory."""
    ch = make(4)
    reader = ch.reader()
    wrong, seen = [], []

    def read() -> None:
        for item in reader:
            seen.append(item[0])
            if item.count(item[0]) != len(item):
                wrong.append(item[0])

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(300):
        ch.put(bytes([number % 250]) * (300_000 + number))
    ch.close()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sorted(seen) == sorted(number % 250 for number in range(300))
    reader.close()


@pytest.mark.copying
@pytest.mark.parametrize("side", ["reader", "writer"])
def test_port_can_be_closed_while_another_thread_copies_an_item(make, side, long_walk):
    ch = make(8)
    for _ in range(20 if long_walk else 3):
        item, other = b"a" * 30_000_000, b"b" * 30_000_000
        if side == "writer":
            port = ch.writer()
            with ch.writer() as stays:
                thread = threading.Thread(target=_ignoring_the_end, args=(port.put, item))
                thread.start()
                port.close()
                stays.put(other)
                thread.join()
                found = [ch.get() for _ in range(len(ch))]
            ch = make(8)
        else:
            ch.put(item)
            port, got = ch.reader(), []
            taking = lambda port=port, got=got: got.append(port.get())  # noqa: E731
            thread = threading.Thread(target=_ignoring_the_end, args=(taking,))
            with ch.reader():
                thread.start()
                port.close()
                ch.put(other)
                thread.join()
                found = got + [ch.get() for _ in range(len(ch))]
            ch = make(8)
        assert all(one in (item, other) for one in found)


def _ignoring_the_end(function: Any, *args: Any) -> None:
    with contextlib.suppress(ValueError, ChannelError):
        function(*args)

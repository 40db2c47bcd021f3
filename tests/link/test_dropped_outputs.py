"""The owner of a channel counts each output once, whether it puts the output or drops it (C3)."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

from scripted_peer import BREAK, BYTES, KEYLESS, NO_MORE, REFERENCE, STARVED, Frame, FrameType, ScriptedPeer
from support.waiting import wait_until

from flowchan import Channel, _core


def test_output_dropped_after_the_end_does_not_count_as_used() -> None:
    """`flush` returns normally for items that the owner reports as used, so it must not report lost items."""
    link = _core.Link(True)
    source, results = (Channel[Any](8, across="processes") for _ in range(2))
    reader, writer = source.reader(), results.writer()
    link.open_stream(1, [reader], [writer])
    with ScriptedPeer(link) as peer:
        peer.send(*[Frame(FrameType.OUT, KEYLESS, flags=BYTES, payload=b"kept")] * 2)
        assert any(frame.type is FrameType.OUTPUT and frame.b == 2 for frame in peer.receive_all())
        results.abort(None)
        # the link drops the first of these outputs when it notices the end, and later ones because of the end
        peer.send(*[Frame(FrameType.OUT, KEYLESS, flags=BYTES, payload=b"dropped")] * 3)
        list(peer.receive_all())
    with ScriptedPeer(link) as peer:  # the link now reports what has arrived over all connections
        report = peer.receive_type(FrameType.OUTPUT)
    assert (report.flags, report.a, report.b) == (NO_MORE | BREAK, 5, 2)
    link.close()


def test_writer_learns_of_the_end_while_a_reader_stays() -> None:
    """Outputs that waited for room must not delay the report, because no reader will ever finish them."""
    link = _core.Link(True)
    source, results = Channel[Any](8, across="processes"), Channel[Any](1, across="processes")
    reader, writer, stays = source.reader(), results.writer(), results.reader()
    writer._follow(reader, False, True)
    link.open_stream(1, [reader], [writer])
    source.put("item")
    small = Frame(FrameType.OUT, flags=BYTES, payload=b"small")
    kept = Frame(FrameType.OUT, flags=REFERENCE, payload=struct.pack("<QII", 100_000, BYTES, 0))
    with ScriptedPeer(link) as peer:
        peer.send(Frame(FrameType.INPUT, flags=STARVED))
        peer.receive_type(FrameType.ITEM)
        peer.send(small, small, kept)
        list(peer.receive_all())
        assert link.state()["streams"][1]["staged"] == 2
        results.close()
        peer.send(small, kept)
        list(peer.receive_all())
    with ScriptedPeer(link) as peer:
        report = peer.receive_type(FrameType.OUTPUT)
    assert (report.flags, report.a, report.b) == (NO_MORE, 5, 5)
    assert stays.get() == b"small"
    link.close()
    assert _core._references() == 0


def test_ending_stream_releases_unread_outputs_of_other_streams() -> None:
    """Otherwise, the other worker's host would keep these outputs, and the owner would keep their items."""
    links = _core.Link(True), _core.Link(True)
    results = Channel[Any](8, across="processes")
    sources = [Channel[Any](8, across="processes") for _ in links]
    ports = [(source.reader(), results.writer()) for source in sources]
    kept = struct.pack("<QII", 100_000, BYTES, 0)
    with contextlib.ExitStack() as stack:
        stays = results.reader()
        for link, source, (reader, writer) in zip(links, sources, ports, strict=True):
            writer._follow(reader, False, True)
            link.open_stream(1, [reader], [writer])
            source.put("item")
            peer = stack.enter_context(ScriptedPeer(link))
            peer.send(Frame(FrameType.INPUT, flags=STARVED))
            peer.receive_type(FrameType.ITEM)
            peer.send(Frame(FrameType.OUT, flags=REFERENCE, payload=kept))
            peer.send(Frame(FrameType.INPUT, a=1, b=1, flags=STARVED))
            list(peer.receive_all())
        assert [source.stats().leased for source in sources] == [1, 1]
        results.abort(None)
        links[0].drop(1)
        wait_until(lambda: not sources[1].stats().leased)
    for link in links:
        link.close()
    assert _core._references() == 0
    del stays

"""A worker keeps at most 8 MB of outputs on its host, except while an urgent item is being processed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_peer import REFERENCE, REMAKES, STARVED, Frame, FrameType, ScriptedPeer

from flowchan import Channel, _core

MB = 1 << 20


@contextlib.contextmanager
def worker_with(outputs: int, size: int) -> Iterator[ScriptedPeer]:
    """Yield the owner's side of a link whose worker has made outputs of ``size`` bytes, one for each item."""
    link = _core.Link(False)
    into, out = (Channel[Any](64, across="processes", max_bytes=64 * MB) for _ in range(2))
    feed, drain, reader, writer = into.writer(), out.reader(), into.reader(), out.writer()
    writer._follow(reader, False, True)
    link.open_stream(1, [feed], [drain], lends=True)
    feed.put_many(range(outputs))
    for _ in reader.get_many(outputs):
        writer.put(bytes(size))
    with ScriptedPeer(link) as owner:
        owner.send(Frame(FrameType.OUTPUT))
        yield owner
    link.close()


def references_in(frames: Iterator[Frame]) -> int:
    """Return how many of the frames are references to outputs. No output may be sent in full."""
    outputs = [frame for frame in frames if frame.type is FrameType.OUT]
    assert all(frame.flags & 7 == REFERENCE for frame in outputs)
    return len(outputs)


@pytest.mark.parametrize(("size", "most"), [(MB, 8), (3 * MB, 4)], ids=["8 MB", "four outputs"])
def test_worker_keeps_few_outputs_until_the_owner_releases_some(size: int, most: int) -> None:
    with worker_with(12, size) as owner:
        assert references_in(owner.receive_all()) == most
        owner.send(Frame(FrameType.OUTPUT, a=most, b=3))  # the owner has released three outputs
        assert references_in(owner.receive_all()) == 3
        owner.send(Frame(FrameType.OUTPUT, a=most + 3, b=3))
        assert references_in(owner.receive_all()) == 0


def test_worker_exceeds_the_limit_for_an_urgent_item() -> None:
    with worker_with(12, MB) as owner:
        assert references_in(owner.receive_all()) == 8
        owner.send(Frame(FrameType.OUTPUT, a=8, flags=REMAKES))
        assert references_in(owner.receive_all()) == 4


def test_owner_reports_an_urgent_item_until_it_is_finished() -> None:
    """An item that the worker gets after a later one is urgent, because readers may wait for its output."""
    link = _core.Link(True)
    source, results = Channel[Any](8, across="processes"), Channel[Any](8, across="processes")
    other, reader, writer = source.reader(), source.reader(), results.writer()
    writer._follow(reader, False, True)
    link.open_stream(1, [reader], [writer])
    source.put_many([b"early", b"late"])
    assert other.get() == b"early"
    with ScriptedPeer(link) as worker:
        worker.send(Frame(FrameType.INPUT, flags=STARVED))
        assert worker.receive_type(FrameType.ITEM).payload.endswith(b"late")
        worker.send(Frame(FrameType.INPUT, 1, a=1, flags=STARVED))
        assert all(
            frame.type is not FrameType.OUTPUT or not frame.flags & REMAKES for frame in worker.receive_all()
        )
        other._give_up()
        assert worker.receive_type(FrameType.ITEM).payload.endswith(b"early")
        assert worker.receive_type(FrameType.OUTPUT).flags & REMAKES
        worker.send(Frame(FrameType.INPUT, a=2, b=2, flags=STARVED))  # the worker has finished both items
        assert not worker.receive_type(FrameType.OUTPUT).flags & REMAKES
    link.close()

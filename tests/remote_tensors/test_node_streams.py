"""Test streams and events: each node has one ordered queue, and an event marks a position in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.optional_packages import optional
from support.waiting import wait_until

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

WAIT_S = 60


def test_event_is_done_after_the_commands_before_it(two_nodes: Any) -> None:
    from node_support import stopped

    event = torch.remote.Event()
    assert event.query()  # true before the first record, as in CUDA
    with stopped(two_nodes, 0):
        x = torch.ones(3, device=two_nodes[0]) + 1
        event.record(torch.remote.current_stream(two_nodes[0]))
        assert not event.query()
    wait_until(event.query)
    event.synchronize()
    assert x.tolist() == [2.0] * 3


def test_event_synchronize_waits_for_its_node_only(two_nodes: Any) -> None:
    from node_support import stopped

    with stopped(two_nodes, 1):
        torch.ones(3, device=two_nodes[1]).add_(1)
        event = torch.remote.Event()
        event.record(torch.remote.current_stream(two_nodes[0]))
        event.synchronize()
        torch.remote.synchronize(two_nodes[0])
        torch.remote.current_stream(two_nodes[0]).synchronize()
        assert event.query()
        assert not torch.remote.current_stream(two_nodes[1]).query()
    torch.remote.synchronize(two_nodes[1])
    assert torch.remote.current_stream(two_nodes[1]).query()


def test_second_record_replaces_the_first(two_nodes: Any) -> None:
    from node_support import stopped

    event = torch.remote.Event()
    event.record(torch.remote.current_stream(two_nodes[0]))
    event.synchronize()
    with stopped(two_nodes, 1):
        event.record(torch.remote.current_stream(two_nodes[1]))
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_elapsed_time_covers_the_commands_between_two_events(two_nodes: Any) -> None:
    before, after = (torch.remote.Event(enable_timing=True) for _ in range(2))
    stream = torch.remote.current_stream(two_nodes[0])
    x = torch.rand(300, 300, device=two_nodes[0])
    before.record(stream)
    for _ in range(3):
        x = x @ x
    after.record(stream)
    after.synchronize()
    assert before.elapsed_time(after) > 0
    assert before.elapsed_time(after) == -after.elapsed_time(before)
    elsewhere = torch.remote.Event(enable_timing=True)
    elsewhere.record(torch.remote.current_stream(two_nodes[1]))
    with pytest.raises(ValueError, match=r"elapsed_time: both events must be .* one node, got remote:\d"):
        before.elapsed_time(elsewhere)
    with pytest.raises(ValueError, match="enable_timing=True"):
        before.elapsed_time(torch.remote.Event())
    with pytest.raises(ValueError, match="record"):
        before.elapsed_time(torch.remote.Event(enable_timing=True))


def test_wait_event_lets_another_node_wait(two_nodes: Any, tmp_path: Path) -> None:
    from node_support import SeenTensor, stopped

    first, second = map(torch.remote.current_stream, two_nodes)
    seen = SeenTensor(tmp_path / "seen", two_nodes[1])
    event = torch.remote.Event()
    with stopped(two_nodes, 0):
        torch.ones(3, device=two_nodes[0]).add_(1)
        event.record(first)
        seen.remote.fill_(1)
        second.wait_event(event)
        seen.remote.fill_(2)
        seen.wait_for(1)
        assert not second.query()
        assert seen.value() == 1
    seen.wait_for(2)
    seen.remote.fill_(3)
    with stopped(two_nodes, 0):
        torch.ones(3, device=two_nodes[0]).add_(1)
        event.record(first)
        event.wait(second)
        seen.remote.fill_(4)
        assert not second.query()
        seen.wait_for(3)
    seen.wait_for(4)


def test_wait_stream_lets_another_node_wait(two_nodes: Any, tmp_path: Path) -> None:
    from node_support import SeenTensor, stopped

    first, second = map(torch.remote.current_stream, two_nodes)
    seen = SeenTensor(tmp_path / "seen", two_nodes[1])
    with stopped(two_nodes, 0):
        torch.ones(3, device=two_nodes[0]).add_(1)
        second.wait_stream(first)
        seen.remote.fill_(1)
        assert not second.query()
        assert seen.value() == 0
    seen.wait_for(1)


def test_many_unread_events_do_not_block(two_nodes: Any) -> None:
    stream = torch.remote.current_stream(two_nodes[0])
    events = [stream.record_event() for _ in range(1000)]
    events[-1].synchronize()
    assert events[0].query()
    assert (torch.ones(2, device=two_nodes[0]) + 1).tolist() == [2.0, 2.0]


def test_stream_is_the_queue_of_its_node(two_nodes: Any) -> None:
    stream = torch.remote.Stream(two_nodes[1])
    assert stream == torch.remote.current_stream(two_nodes[1])
    assert stream != torch.remote.current_stream(two_nodes[0])
    assert stream.device == two_nodes[1]
    assert len({stream, torch.remote.default_stream(two_nodes[1])}) == 1
    with torch.remote.stream(stream):
        assert torch.remote.current_device() == two_nodes[1].index
        assert torch.remote.current_stream() == stream
        assert torch.ones(2, device="remote").device == two_nodes[1]
        event = torch.remote.Event()
        event.record()
    event.synchronize()
    assert repr(stream) == f"<Stream of {two_nodes[1]}>"


def test_device_context_selects_the_current_node(two_nodes: Any) -> None:
    before = torch.remote.current_device()
    with torch.remote.device(two_nodes[1]):
        assert torch.remote.current_device() == two_nodes[1].index
        assert torch.ones(2, device="remote").device == two_nodes[1]
    assert torch.remote.current_device() == before


def test_synchronize_waits_for_all_commands_of_a_node(two_nodes: Any, tmp_path: Path) -> None:
    from node_support import SeenTensor

    seen = SeenTensor(tmp_path / "seen", two_nodes[0])
    for _ in range(100):
        seen.remote.add_(1)
    torch.remote.synchronize(two_nodes[0])
    assert seen.value() == 100
    seen.remote.add_(1)
    two_nodes.sync(WAIT_S)
    assert seen.value() == 101


def test_unread_events_do_not_block_the_other_node(two_nodes: Any) -> None:
    """The second node waits for a copy from the first, and the program waits for the second."""
    stream = torch.remote.current_stream(two_nodes[0])
    x = torch.ones(3, device=two_nodes[0])
    timed = [torch.remote.Event(enable_timing=True) for _ in range(200)]
    for event in timed:
        event.record(stream)
    assert x.to(two_nodes[1]).tolist() == [1.0] * 3
    stream.synchronize()
    assert all(one.query() for one in timed)
    times = [timed[0].elapsed_time(one) for one in timed]
    assert times == sorted(times)

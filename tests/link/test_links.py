"""Check that the ports of a remote worker behave like local ports over a link (C1–C9, R4)."""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import pytest

from flowchan import Broken, Channel, Closed, Drained, Empty, _core
from flowchan.transport.link_events import LinkBroken, next_event
from tests.link.linked import Linked, RemoteWorker, feeding
from tests.support.waiting import WAIT_LIMIT_S, wait_until

Function = Callable[[Any], Iterable[tuple[int, Any]]]


def channel(capacity: int = 100) -> Channel[Any]:
    return Channel(capacity, across="processes", max_bytes=1 << 26)


@pytest.fixture
def linked() -> Iterator[Linked]:
    with Linked() as both:
        yield both


def same(item: Any) -> list[tuple[int, Any]]:
    return [(0, item)]


def several(item: int) -> list[tuple[int, Any]]:
    return [(0, (item, k)) for k in range(item % 4)]


def large(item: int) -> list[tuple[int, Any]]:
    return [(0, (item, bytes([item % 251]) * (item % 7 * 30_000)))]


def run(
    linked: Linked, function: Function, n: int, workers: int, ordered: bool = False, breaks: bool = False
) -> list[Any]:
    """Return all outputs of ``workers`` workers for ``range(n)``.

    If ``breaks`` is given, the connection keeps breaking.
    """
    source, results = channel(), channel()
    one = function is not several
    remote = [
        RemoteWorker(linked, number, source, results, ordered=ordered, one_output=one)
        for number in range(1, workers + 1)
    ]
    threads = [worker.start(function) for worker in remote]
    threads.append(feeding(source, range(n)))
    over = threading.Event()
    if breaks:
        threads.append(threading.Thread(target=break_often, args=(linked, over)))
        threads[-1].start()
    outputs = list(results)
    over.set()
    for thread in threads:
        thread.join(WAIT_LIMIT_S)
    return outputs


def break_often(linked: Linked, over: threading.Event) -> None:
    draw = random.Random(1)
    while not over.wait(draw.random() / 100):
        linked.connect()


@pytest.mark.parametrize("breaks", [False, True], ids=["", "breaks"])
@pytest.mark.parametrize("function", [same, several], ids=["map", "flat_map"])
def test_outputs_of_one_worker_arrive_once_and_in_order(
    linked: Linked, function: Function, breaks: bool
) -> None:
    outputs = run(linked, function, 20_000, 1, breaks=breaks)
    assert outputs == [output for item in range(20_000) for _, output in function(item)]


@pytest.mark.parametrize("breaks", [False, True], ids=["", "breaks"])
@pytest.mark.parametrize("function", [same, several], ids=["map", "flat_map"])
def test_outputs_of_several_ordered_workers_keep_the_item_order(
    linked: Linked, function: Function, breaks: bool
) -> None:
    outputs = run(linked, function, 10_000, 3, ordered=True, breaks=breaks)
    assert outputs == [output for item in range(10_000) for _, output in function(item)]


@pytest.mark.parametrize("breaks", [False, True], ids=["", "breaks"])
def test_large_items_arrive_complete(linked: Linked, breaks: bool) -> None:
    outputs = run(linked, large, 1_000, 2, breaks=breaks)
    assert Counter(outputs) == Counter(output for item in range(1_000) for _, output in large(item))


def test_arrays_arrive_unchanged(linked: Linked) -> None:
    source, results = channel(), channel()
    remote = RemoteWorker(linked, 1, source, results, one_output=True)
    thread = remote.start(same)
    sent = [numpy.arange(n, dtype="f8") for n in (0, 1, 1_000, 100_000, 3_000_000)]
    feeder = feeding(source, sent)
    for array, arrived in zip(sent, results, strict=True):
        assert (arrived == array).all()
    thread.join()
    feeder.join()


def test_worker_with_slow_items_gets_none_in_advance(linked: Linked) -> None:
    """C8: no worker is idle while another worker has an item that it has not started."""
    source, results = channel(), channel()
    go = threading.Event()

    def wait(item: int) -> list[tuple[int, Any]]:
        go.wait(WAIT_LIMIT_S)
        return [(0, item)]

    remote = [RemoteWorker(linked, number, source, results, one_output=True) for number in (1, 2)]
    threads = [worker.start(wait) for worker in remote]
    with source.writer() as writer:
        writer.put(0)
        writer.put(1)
        wait_until(
            lambda: all(worker.into.stats().leased == 1 for worker in remote), what=linked.owner_side.state
        )
    go.set()
    assert sorted(results) == [0, 1]
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("breaks", [False, True], ids=["", "breaks"])
def test_unstarted_items_are_recalled_when_other_readers_wait(linked: Linked, breaks: bool) -> None:
    """C8: a worker gets many cheap items in advance.

    When one of these items is slow, waiting readers get the other items.
    """
    source, results = channel(4_000), channel(4_000)
    go = threading.Event()

    def wait_at_last(item: int) -> list[tuple[int, Any]]:
        if item == 3_000:
            go.wait(WAIT_LIMIT_S)
        return [(0, item)]

    thread = RemoteWorker(linked, 1, source, results, one_output=True).start(wait_at_last)
    reader = source.reader()
    with source.writer() as writer:
        writer.put_many(range(3_500))
        wait_until(lambda: results.stats().items_in == 3_000, what=linked.owner_side.state)
        if breaks:
            linked.connect()
        assert sorted(reader.get(timeout=WAIT_LIMIT_S) for _ in range(499)) == list(range(3_001, 3_500))
        go.set()
    reader.close()
    assert list(results) == list(range(3_001))
    thread.join()


def test_items_are_recalled_each_time_other_readers_wait(linked: Linked) -> None:
    source, results = channel(4_000), channel(8_000)
    may_go = [threading.Event() for _ in range(3)]

    def wait_now_and_then(item: int) -> list[tuple[int, Any]]:
        if item % 1_000 == 999:
            may_go[item // 1_000].wait(WAIT_LIMIT_S)
        return [(0, item)]

    thread = RemoteWorker(linked, 1, source, results, one_output=True).start(wait_now_and_then)
    reader = source.reader()
    with source.writer() as writer:
        for number, go in enumerate(may_go):
            done = results.stats().items_in
            writer.put_many(range(number * 1_000, number * 1_000 + 1_010))
            wait_until(lambda done=done: results.stats().items_in == done + 999, what=linked.owner_side.state)
            assert sorted(reader.get(timeout=WAIT_LIMIT_S) for _ in range(10)) == [
                number * 1_000 + 1_000 + k for k in range(10)
            ]
            go.set()
            wait_until(
                lambda done=done: results.stats().items_in == done + 1_000, what=linked.owner_side.state
            )
    reader.close()
    assert len(list(results)) == 3_000
    thread.join()


def test_broken_input_raises_its_cause_in_the_remote_worker(linked: Linked) -> None:
    source, results = channel(), channel()
    remote = RemoteWorker(linked, 1, source, results)
    source.abort(ValueError("no more"))
    with pytest.raises(Broken) as caught:
        remote.inside.get(timeout=WAIT_LIMIT_S)
    assert repr(caught.value.__cause__) == "ValueError('no more')"


def test_remote_abort_reaches_all_users_of_the_output_channel(linked: Linked) -> None:
    source, results = channel(), channel()
    remote = RemoteWorker(linked, 1, source, results)
    remote.outside[0].channel.abort(ValueError("no more"))
    with pytest.raises(Broken) as caught:
        results.get(timeout=WAIT_LIMIT_S)
    assert repr(caught.value.__cause__) == "ValueError('no more')"


@pytest.mark.parametrize("size", [1 << 20, 17 << 20])
def test_connection_survives_when_a_channel_breaks_with_a_large_cause(linked: Linked, size: int) -> None:
    channels = [channel() for _ in range(4)]
    one, other = RemoteWorker(linked, 1, *channels[:2]), RemoteWorker(linked, 2, *channels[2:])
    cause = ValueError("no more", bytes(size))
    one.source.abort(cause)
    other.outside[0].channel.abort(cause)
    for broken in (one.inside, other.results[0]):
        with pytest.raises(Broken) as caught:
            broken.get(timeout=WAIT_LIMIT_S)
        assert "no more" in str(caught.value.__cause__)
    assert linked.owner_side.state()["breaks"] == 0


def test_remote_writer_learns_that_the_last_reader_closed(linked: Linked) -> None:
    source, results = channel(), channel()
    remote = RemoteWorker(linked, 1, source, results)
    results.reader().close()
    wait_until(lambda: bool(remote.outside[0].closed))
    with pytest.raises(Closed):
        remote.outside[0].put(1)


def test_remote_reader_returns_untaken_items_when_it_closes(linked: Linked) -> None:
    source, results = channel(), channel()
    remote = RemoteWorker(linked, 1, source, results)
    other = source.reader()
    for item in range(10):
        source.put(item)
    assert remote.inside.get(timeout=WAIT_LIMIT_S) == 0
    for port in (remote.inside, *remote.outside):
        port.close()
    assert [other.get(timeout=WAIT_LIMIT_S) for _ in range(9)] == list(range(1, 10))
    with pytest.raises(Drained):
        results.get(timeout=WAIT_LIMIT_S)


@pytest.mark.parametrize("size", [40, 3_000])
def test_remote_worker_can_lease_any_number_of_items_at_once(linked: Linked, size: int) -> None:
    """The worker takes items without finishing any, and the link keeps delivering."""
    source, results = channel(), channel()
    remote = RemoteWorker(linked, 1, source, results)
    batches: list[list[int]] = []

    def gather() -> None:
        for first in remote.inside:
            batch = [first]
            try:
                while len(batch) < size:
                    batch.append(remote.inside.get_more())
            except Drained:
                pass
            batches.append(batch)
        remote.inside.close()
        remote.outside[0].close()

    thread = threading.Thread(target=gather)
    thread.start()
    feeding(source, range(size * 5 // 2)).join()
    thread.join(WAIT_LIMIT_S)
    assert [len(batch) for batch in batches] == [size, size, size // 2]
    assert sum(batches, []) == list(range(size * 5 // 2))  # noqa: RUF017 - three of them


def test_outputs_of_a_dead_host_are_not_repeated() -> None:
    """R4: if a host died after some of an item's outputs were put, the item's next worker skips these."""
    source, results = channel(4), channel(1000)
    with Linked() as first:
        remote = RemoteWorker(first, 1, source, results)
        feeder = feeding(source, range(3))
        assert remote.inside.get(timeout=WAIT_LIMIT_S) == 0
        for k in range(5):
            remote.outside[0].put((0, k))
        wait_until(lambda: results.stats().items_in == 5)
        first.owner_side.drop(1)
        first.owner_side.close()
        replacement, writer = source.reader(), results.writer()
        _core._take_up([remote.reader], remote.writers, [replacement])
        with Linked() as second:
            again = RemoteWorker(second, 1, source, results)
            replacement.close()
            writer.close()
            thread = again.start(lambda item: [(0, (item, k)) for k in range(8)])
            outputs = list(results)
            thread.join(WAIT_LIMIT_S)
            feeder.join(WAIT_LIMIT_S)
    assert sorted(outputs) == [(item, k) for item in range(3) for k in range(8)]


def test_item_stays_leased_while_output_from_several_inputs_waits(linked: Linked) -> None:
    """R4: an output that waits on the owner side does not finish its item, and is lost with its host."""
    sources, results = [channel(), channel()], channel(1)
    readers, writer = [source.reader() for source in sources], results.writer()
    rings, drains = [channel(), channel()], channel()
    insides, outside = [ring.reader() for ring in rings], drains.writer()
    feeds, drain = [ring.writer() for ring in rings], drains.reader()
    for port in (*readers, writer, *insides, outside):
        port._supervise()
    linked.owner_side.open_stream(1, readers, [writer])
    linked.worker_side.open_stream(1, feeds, [drain])

    def wait_for(**counts: int) -> None:
        wait_until(
            lambda: counts.items() <= linked.owner_side.state()["streams"][1].items(),
            what=linked.owner_side.state,
        )

    sources[0].put_many([0, 1])
    for item in range(2):
        assert insides[0].get(timeout=WAIT_LIMIT_S) == item
        outside.put(item)
    wait_for(staged=1, in_hand=1)
    with pytest.raises(Empty):
        insides[0].get_nowait()  # this finishes the item
    wait_for(staged=1, in_hand=0)
    linked.owner_side.drop(1)
    successors = [source.reader() for source in sources]
    _core._take_up(readers, [writer], successors)
    sources[0].close()
    assert results.get_nowait() == 0
    assert list(successors[0])[-1] == 1


@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
def test_no_item_is_lost_or_repeated_when_workers_die(linked: Linked, ordered: bool) -> None:
    """R4: ordered outputs also arrive, as do items that return to a worker that has later items."""
    source, results = channel(500), channel(32)
    remote = [
        RemoteWorker(linked, number, source, results, ordered=ordered, one_output=True) for number in range(3)
    ]
    threads = [worker.start(same) for worker in remote]
    threads.append(feeding(source, range(20_000)))
    outputs = []
    for number, output in enumerate(results, 1):
        outputs.append(output)
        if number % 1_000 == 0:
            line = 3 + number
            remote[line % 3] = remote[line % 3].die(line)
            threads.append(remote[line % 3].start(same))
    assert (outputs if ordered else sorted(outputs)) == list(range(20_000))
    for thread in threads:
        thread.join(WAIT_LIMIT_S)


@pytest.mark.parametrize("owner", [True, False], ids=["owner", "worker"])
def test_invalid_frames_end_only_the_connection(owner: bool) -> None:
    """Frames that no agent sends end the connection with an error, even from an authenticated peer."""
    draw = random.Random(7)
    link = _core.Link(owner)
    source, results = channel(), channel()
    ports = [source.reader()], [results.writer()]
    worker_ports = [results.writer()], [source.reader()]
    link.open_stream(1, *(ports if owner else worker_ports))
    try:
        for _ in range(2_000):
            link_end, peer_end = socket.socketpair()
            link.attach(link_end.detach())
            frame = struct.pack(
                "<QQIHBBQQ",
                draw.choice([0, 1, 100, 1 << 20, 1 << 46, 2**64 - 1]),
                draw.choice([0, 1, 2**63, 2**64 - 1]),
                draw.choice([0, 1, 2**32 - 1]),
                draw.choice([0, 1, 2**16 - 1]),
                draw.randrange(12),
                draw.randrange(256),
                draw.choice([0, 1, 2**64 - 1]),
                draw.choice([0, 1, 2**64 - 1]),
            )
            peer_end.sendall(frame + draw.randbytes(draw.randrange(200)))
            peer_end.close()
            while not isinstance(next_event(link, WAIT_LIMIT_S), LinkBroken):
                pass  # before that, a valid frame may cause other events
    finally:
        link.close()


@pytest.mark.parametrize("one_output", [True, False], ids=["outputs", "items"])
def test_fast_worker_gets_more_items_in_advance_over_slow_connections(one_output: bool) -> None:
    """The number of frames in flight adapts to the rate and the round-trip time, in both directions."""
    enough = 8_000
    with Linked(delay=0.02) as linked:
        source, results = channel(1 << 16), channel(1 << 16)
        remote = RemoteWorker(linked, 1, source, results)
        working = remote.start(same if one_output else lambda _: [])
        seen = threading.Event()

        def items() -> Iterator[int]:
            yield from itertools.takewhile(lambda _: not seen.is_set(), itertools.count())

        feeder = feeding(source, items())
        reading = threading.Thread(target=lambda: outputs.extend(results))
        outputs: list[int] = []
        reading.start()
        side = linked.worker_side if one_output else linked.owner_side
        try:
            wait_until(
                lambda: side.state()["streams"].get(1, {}).get("ahead", 0) > enough,
                what=lambda: side.state(),
            )
        finally:
            seen.set()
            for thread in (feeder, working, reading):
                thread.join(WAIT_LIMIT_S)
        assert outputs == (list(range(len(outputs))) if one_output else [])


@pytest.mark.parametrize("one_output", [True, False], ids=["outputs", "items"])
def test_byte_window_grows_only_while_the_receiver_is_fast(one_output: bool) -> None:
    """C2: the window grows until the bytes fill the connection, and shrinks when the receiver is slow."""
    size, least = 256 << 10, 4 << 20
    quick, over = threading.Event(), threading.Event()
    quick.set()

    def linger() -> None:
        if not quick.is_set():
            over.wait(0.1)

    def work(item: bytes) -> list[tuple[int, Any]]:
        if one_output:
            return [(0, item)]
        linger()
        return []

    with Linked(delay=0.1) as linked:
        source, results = channel(), channel()
        working = RemoteWorker(linked, 1, source, results).start(work)
        feeder = feeding(
            source, itertools.takewhile(lambda _: not over.is_set(), itertools.repeat(bytes(size)))
        )
        outputs = 0

        def read() -> None:
            nonlocal outputs
            for _ in results:
                outputs += 1
                linger()

        reading = threading.Thread(target=read)
        reading.start()
        side = linked.worker_side if one_output else linked.owner_side

        def line() -> dict[str, int]:
            found: dict[str, int] = side.state()["streams"][1]
            return found

        try:
            wait_until(lambda: line()["window"] > least and line()["ahead"] * size > least, what=side.state)
            quick.clear()
            wait_until(lambda: line()["window"] == least, what=side.state)
        finally:
            over.set()
            for thread in (feeder, working, reading):
                thread.join(WAIT_LIMIT_S)
        assert outputs == (source.stats().items_out if one_output else 0)


def test_excused_time_does_not_count_as_silence():
    link = _core.Link(True)
    silent = link.state()["heard_ago"]
    link.excuse(silent / 2)
    assert link.state()["heard_ago"] < 0.75 * silent
    link.close()

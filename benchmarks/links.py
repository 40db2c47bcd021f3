"""Measure the transfer of items between two processes that share only a TCP connection, like two hosts.

The systems are flowchan's link, pyzmq, the standard library's connection, and a bare socket.
"""

from __future__ import annotations

import multiprocessing.connection
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import zmq

from benchmarks import wire as wires
from benchmarks.harness import (
    Effort,
    Report,
    Row,
    at_least,
    at_most,
    echo,
    round_trips,
    throughput,
    timed_trips,
)
from benchmarks.peers import CONTEXT, across_processes, processes_channel
from flowchan import Channel, _core
from flowchan.transport.authentication import meet
from flowchan.transport.link_events import AHEAD, BEHIND, LinkBroken, next_event
from flowchan.transport.tcp import prepare

ISOLATES = (
    "One connection over loopback. This process puts, and a forked child on the other end gets. The clock "
    "runs from the common start until the child has reported the last get. For flowchan, this time includes "
    "the owner's channel, the link, the remote worker's ring, encoding and decoding. pyzmq sends the pickle "
    "of each item over PUSH and PULL, and arrays with copy=False. In 'fresh arrays', the sender creates and "
    "fills an array for each item, as copy=False requires. In the other rows, it sends the same array every "
    "time, and this array stays in the cache. The bare socket moves only the bytes, between memory that is "
    "already allocated. A long wire joins two network namespaces and delays every packet, including "
    "acknowledgements, by half the round-trip time. The rows with 0 ms use the same path without a delay. In "
    "the rows 'while Python code runs', a thread of the sending process computes and holds the GIL for as "
    "long as it can."
)

ROOM = 1024


@dataclass(frozen=True, slots=True)
class Wire:
    """One communication system, with a function for each end of the connection.

    Each function takes a connected socket, and returns three functions, which put an item, get an item, and
    close this end of the connection.
    """

    near: Callable[[socket.socket], tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], None]]]
    far: Callable[[socket.socket], tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], None]]]


def _linked_near(sock: socket.socket) -> Any:
    there, back = (Channel[Any](ROOM, across="processes") for _ in range(2))
    link = _core.Link(True)
    reader, writer = there.reader(), back.writer()
    link.open_stream(1, [reader], [writer])
    link.attach(sock.detach())
    feed, drain = there.writer(), back.reader()
    kept = (reader, writer, drain, feed)
    return feed.put, back.get, partial(_unlink, link, kept)


def _linked_far(sock: socket.socket) -> Any:
    there, back = (Channel[Any](places, across="processes") for places in (AHEAD, BEHIND))
    link = _core.Link(False)
    ports = there.reader(), back.writer(), there.writer(), back.reader()
    link.open_stream(1, [ports[2]], [ports[3]])
    link.attach(sock.detach())
    return ports[1].put, ports[0].get, partial(_unlink_after, link, ports)


def _over_tls(linked: Callable[[socket.socket], Any], dials: bool, sock: socket.socket) -> Any:
    return linked(meet(sock, bytes(32), dialled=dials, hello={}, timeout=60, tls=True)[0])


def _unlink(link: Any, kept: object) -> None:
    link.close()


def _unlink_after(link: Any, kept: object) -> None:
    """Wait until the other side has closed the link, so that all items are sent. Then close this side."""
    while not isinstance(next_event(link), LinkBroken):
        pass
    link.close()


def _zmq(sock: socket.socket, copies: bool, binds: bool) -> Any:
    """Connect two pairs of PUSH and PULL sockets. Both sides exchange the port numbers over ``sock``."""
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.set_hwm(ROOM)
    pull.set_hwm(ROOM)
    if binds:
        here = sock.getsockname()[0]
        ports = [one.bind_to_random_port(f"tcp://{here}") for one in (pull, push)]
        sock.sendall(np.array(ports, "i4").tobytes())
    else:
        ports = np.frombuffer(sock.recv(8, socket.MSG_WAITALL), "i4").tolist()
        there = sock.getpeername()[0]
        push.connect(f"tcp://{there}:{ports[0]}")
        pull.connect(f"tcp://{there}:{ports[1]}")

    def put(item: Any) -> None:
        push.send(item if not copies else pickle.dumps(item, 5), 0, copies)

    def get() -> Any:
        return pickle.loads(pull.recv()) if copies else np.frombuffer(pull.recv(copy=False).buffer, np.uint8)

    return put, get, partial(context.destroy, linger=1000)


def _standard(sock: socket.socket) -> Any:
    connection = multiprocessing.connection.Connection(sock.detach())
    return connection.send, connection.recv, connection.close


def _bare(sock: socket.socket, size: int) -> Any:
    memory = memoryview(bytearray(size))

    def get() -> memoryview:
        have = 0
        while have < size:
            have += sock.recv_into(memory[have:])
        return memory

    return sock.sendall, get, sock.close


LINK = Wire(_linked_near, _linked_far)
ZMQ = Wire(partial(_zmq, copies=True, binds=True), partial(_zmq, copies=True, binds=False))
ZMQ_VIEWS = Wire(partial(_zmq, copies=False, binds=True), partial(_zmq, copies=False, binds=False))
STANDARD = Wire(_standard, _standard)
TLS_LINK = Wire(partial(_over_tls, _linked_near, False), partial(_over_tls, _linked_far, True))


def measure(effort: Effort) -> Report:
    report = Report()
    for name, items, factor in (
        ("int", range, 3.0),
        ("(1, 'abc', 2.5)", partial(repeat, (1, "abc", 2.5)), 3.0),
        ("1 KB bytes", partial(repeat, bytes(1024)), 2.5),
        ("64 KB bytes", partial(repeat, bytes(64 << 10)), 1.3),
    ):
        _small(report, name, items, factor, effort)
    for size in (1 << 20, 16 << 20):
        _arrays(report, size, effort)
    wires = (("flowchan", LINK), ("pyzmq", ZMQ))
    cases = [round_trips(name, partial(_trips, wire), effort) for name, wire in wires]
    mine, peer = report.interleave("round trip over a link", cases, effort.rounds)
    report.rows.append(at_most(1.3, mine, peer))
    _far(report, effort)
    _encrypted(report, effort)
    return report


def _far(report: Report, effort: Effort) -> None:
    # Measure long rounds, because the flow-control window grows slowly.
    long = replace(effort, seconds=4 * effort.seconds)
    for name, items, scale, unit, factor, peers in (
        ("int", range, 1, "items/s", 3.0, ZMQ),
        ("array of 1 MB", partial(repeat, np.ones(1 << 20, np.uint8)), 1 << 20, "B/s", 1.0, ZMQ_VIEWS),
    ):
        work = f"link, {name}, 1→1, over a long wire"
        if lacks := wires.missing():
            report.rows.append(Row(work, f"skipped: {lacks}", "", "", "", reached=False))
            continue
        moves: dict[str, Callable[[int], float]] = {}
        for time_ in (0, 1, 10):
            for who, wire in (("flowchan", LINK), ("pyzmq", peers)):
                moves[f"{who}, {time_} ms"] = partial(_move_far, wire, items, time_ / 1000)
        cases = [throughput(case, move, long, scale=scale, unit=unit) for case, move in moves.items()]
        near, _, *others = report.interleave(work, cases, effort.rounds)
        for mine, peer in zip(others[::2], others[1::2], strict=True):
            rows = at_least(0.8, mine, near), at_least(factor, mine, peer)
            report.rows += [replace(row, work=f"{work}: {mine.name}") for row in rows]


def _encrypted(report: Report, effort: Effort) -> None:
    for name, items, scale, unit in (
        ("int", range, 1, "items/s"),
        ("array of 1 MB", partial(repeat, np.ones(1 << 20, np.uint8)), 1 << 20, "B/s"),
    ):
        for busy, way in (("", move), (", while Python code runs", _move_beside_code)):
            moves: dict[str, Callable[[int], float]] = {
                "TLS": partial(way, TLS_LINK, items),
                "plain": partial(way, LINK, items),
            }
            cases = [throughput(case, way, effort, scale=scale, unit=unit) for case, way in moves.items()]
            encrypted, plain = report.interleave(f"link, {name}, 1→1, TLS{busy}", cases, effort.rounds)
            report.rows.append(at_least(0.2, encrypted, plain))


def _small(
    report: Report, name: str, items: Callable[[int], Iterable[Any]], factor: float, effort: Effort
) -> None:
    moves: dict[str, Callable[[int], float]] = {
        "flowchan": partial(move, LINK, items),
        "pyzmq": partial(move, ZMQ, items),
        "multiprocessing.connection": partial(move, STANDARD, items),
        "own ring": partial(across_processes, processes_channel, items),
    }
    cases = [throughput(case, move, effort) for case, move in moves.items()]
    mine, peer, _, ring = report.interleave(f"link, {name}, 1→1", cases, effort.rounds)
    report.rows.append(at_least(factor, mine, peer))
    if name in ("int", "(1, 'abc', 2.5)"):
        report.rows += [at_least(factor, mine, peer, 0.1), at_least(0.5, mine, ring)]


def _arrays(report: Report, size: int, effort: Effort) -> None:
    items = partial(repeat, np.ones(size, np.uint8))
    bare = Wire(partial(_bare, size=size), partial(_bare, size=size))
    moves: dict[str, Callable[[int], float]] = {
        "flowchan": partial(move, LINK, items),
        "pyzmq copy=False": partial(move, ZMQ_VIEWS, items),
        "bare socket": partial(move, bare, items),
    }
    cases = [throughput(case, move, effort, scale=size, unit="B/s") for case, move in moves.items()]
    mine, peer, raw = report.interleave(f"link, array of {size >> 20} MB, 1→1", cases, effort.rounds)
    report.rows += [at_least(1.0, mine, peer), at_least(0.5, mine, raw)]
    anew = partial(_made, size)
    moves = {"flowchan": partial(move, LINK, anew), "pyzmq copy=False": partial(move, ZMQ_VIEWS, anew)}
    cases = [throughput(case, move, effort, scale=size, unit="B/s") for case, move in moves.items()]
    mine, peer = report.interleave(f"link, fresh arrays of {size >> 20} MB, 1→1", cases, effort.rounds)
    report.rows.append(at_least(1.0, mine, peer))


def _made(size: int, count: int) -> Iterable[Any]:
    return (np.full(size, number & 255, np.uint8) for number in range(count))


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        prepare(end, "127.0.0.1")
    return near, far


def move(wire: Wire, items: Callable[[int], Iterable[Any]], count: int) -> float:
    return _move_over(wire, items, count, *_connected())


def _move_beside_code(wire: Wire, items: Callable[[int], Iterable[Any]], count: int) -> float:
    """Move the items while another thread of this process runs Python code all the time."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(10_000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return move(wire, items, count)
    finally:
        over.set()
        thread.join()


def _move_far(wire: Wire, items: Callable[[int], Iterable[Any]], round_trip: float, count: int) -> float:
    with wires.wire(round_trip) as between:

        def work() -> float:
            return _move_over(wire, items, count, *between.connected(), between.far)

        return wires.within(between.near, work)


def _move_over(
    wire: Wire,
    items: Callable[[int], Iterable[Any]],
    count: int,
    near: socket.socket,
    far: socket.socket,
    network: int | None = None,
) -> float:
    """Move the items, and return how many seconds it took.

    ``network`` is the network of the far end, or None if both ends are in the same network.
    """
    start, (told, tell) = CONTEXT.Barrier(2), CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_take, args=(wire, far, count, start, tell, network))
    child.start()
    far.close()
    put, _, close = wire.near(near)
    start.wait()
    began = time.perf_counter()
    for item in items(count):
        put(item)
    told.recv()
    took = time.perf_counter() - began
    close()
    child.join()
    return took


def _take(wire: Wire, sock: socket.socket, count: int, start: Any, tell: Any, network: int | None) -> None:
    if network is not None:
        wires.enter(network)
    _, get, close = wire.far(sock)
    start.wait()
    for _ in repeat(None, count):
        get()
    tell.send(None)
    close()


def _trips(wire: Wire, count: int) -> float:
    near, far = _connected()
    child = CONTEXT.Process(target=_echo, args=(wire, far, count))
    child.start()
    far.close()
    put, get, close = wire.near(near)
    took = timed_trips(put, get, count)
    close()
    child.join()
    return took


def _echo(wire: Wire, sock: socket.socket, count: int) -> None:
    put, get, close = wire.far(sock)
    echo(put, get, count)
    close()

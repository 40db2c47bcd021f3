"""Test the socket through which other programs view a run: protocol, permissions and names."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from support.sample_stats import STATS
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, Run
from flowchan.cli import view_client
from flowchan.cli.view_client import ViewedRun, ViewError, run_names, viewed_runs
from flowchan.run.observe import view_socket
from flowchan.run.observe.feed import Feed
from flowchan.run.observe.stats_json import SCHEMA
from flowchan.run.observe.view_socket import ViewConnection, socket_prefix

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")


def names() -> set[str]:
    """Return the names of the runs of this process that have a socket."""
    return {name for name in run_names() if name.startswith(f"{os.getpid()}-")}


@contextlib.contextmanager
def running(name: str = "viewed") -> Iterator[Run]:
    """Run a graph that has a socket, until the ``with`` block exits."""
    gate = Gate()
    graph = Graph(name)
    graph.source([1, 2], name="numbers").map(gate.wait, name="wait").sink(str, name="end")
    try:
        with graph.start() as run:
            wait_until(lambda: bool(sockets(name)))
            yield run
            gate.open()
    finally:
        gate.open()


def sockets(graph: str) -> list[ViewedRun]:
    """Connect to the runs of this process, and close the connections afterwards."""
    found = viewed_runs(str(os.getpid()))
    names = [one.hello()["graph"] for one in found]
    for one in found:
        one.close()
    return [one for one, name in zip(found, names, strict=True) if name == graph]


def test_viewer_receives_hello_and_then_stats_until_run_ends() -> None:
    gate = Gate()
    graph = Graph("told")
    graph.source([1], name="one").sink(gate.wait, name="wait")
    with graph.start() as run:
        wait_until(lambda: bool(names()))
        (viewed,) = viewed_runs(str(os.getpid()))
        hello = viewed.hello()
        assert (hello["event"], hello["schema"], hello["graph"]) == ("hello", SCHEMA, "told")
        assert hello["run"] == viewed.name == f"{os.getpid()}-1"
        statistics = viewed.statistics()
        first = next(statistics)
        assert (first.graph, first.state) == ("told", "running")
        gate.open()
        run.wait()
        *_, last = statistics  # the iterator ends without an error
        assert last == run.stats()
        viewed.close()


def test_socket_closes_with_the_run() -> None:
    with running():
        assert names() == {f"{os.getpid()}-1"}
    assert not names()


def test_short_run_creates_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_socket, "POLL_INTERVAL_S", 600)
    graph = Graph("short")
    graph.source([1]).sink(str)
    graph.run()
    assert not names()


def test_run_without_viewers_has_no_viewer_thread() -> None:
    with running():
        wait_until(lambda: not any("feed" in thread.name for thread in threading.enumerate()))


def test_runs_in_one_program_have_different_socket_names() -> None:
    with running("a"), running("b"):
        assert {one.name for one in sockets("a") + sockets("b")} == {f"{os.getpid()}-{n}" for n in (1, 2)}
        (chosen,) = viewed_runs(f"{os.getpid()}-2")
        assert chosen.hello()["graph"] == "b"
        chosen.close()


def as_nobody(call: Callable[[], int]) -> int:
    """Call a function as another user in a forked child, and return the result."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = call()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def received(name: str) -> int:
    """Return 2 if the program closes the connection, and 3 if it sends data."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name)
        try:
            return 3 if connection.recv(1) else 2
        except ConnectionError:
            return 2


@needs_root
def test_other_user_receives_nothing() -> None:
    with running():
        (name,) = names()
        address = f"\0{socket_prefix()}{name}"
        assert received(address) == 3
        assert as_nobody(lambda: received(address)) == 2


@needs_root
def test_socket_of_another_user_is_ignored() -> None:
    name = f"{os.getpid()}-900"
    with socket.socket(socket.AF_UNIX) as listener:
        prefix = socket_prefix()
        ready, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            os.setuid(NOBODY)
            listener.bind(f"\0{prefix}{name}")
            listener.listen()
            theirs.send(b"1")
            theirs.recv(1)
            os._exit(0)
        ready.recv(1)
        assert name in names()
        assert viewed_runs(name) == []
        ready.send(b"1")
        os.waitpid(child, 0)
        ready.close()
        theirs.close()


def test_forked_child_does_not_keep_sockets_open() -> None:
    with running() as run:
        (viewed,) = viewed_runs(str(os.getpid()))
        viewed.hello()
        ours = run._supervisor._view_socket
        assert ours._listener is not None
        kept = [ours._listener, *(one._connection for one in ours._viewers)]
        assert len(kept) > 1
        inodes = {os.fstat(one.fileno()).st_ino for one in kept if one.fileno() >= 0}
        child = os.fork()
        if child == 0:
            found = set()
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.fstat(int(number)).st_ino)
            os._exit(1 if inodes & found else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert next(viewed.statistics()).graph == "viewed"  # the parent's socket still works
        viewed.close()


def test_feed_thread_ends_after_viewer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_socket, "STATS_EVERY_S", 0.01)
    with running() as run:
        (viewed,) = viewed_runs(str(os.getpid()))
        next(viewed.statistics())
        assert run._supervisor.feed._subscriptions
        viewed.close()
        wait_until(lambda: not run._supervisor.feed._subscriptions)


def test_run_continues_if_viewer_thread_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def no_thread(*_: object, **__: object) -> None:
        failed.set()
        raise RuntimeError("can't start new thread")

    with running() as run:
        monkeypatch.setattr(run._supervisor.feed, "subscribe", no_thread)
        (viewed,) = viewed_runs(str(os.getpid()))
        failed.wait()
        with pytest.raises(ViewError, match="has ended"):
            viewed.hello()
        viewed.close()
        monkeypatch.delattr(run._supervisor.feed, "subscribe")
        assert len(sockets("viewed")) == 1  # later viewers are accepted
    assert run.state == "done"


class Delivered(Feed):
    """A feed that delivers statistics only on the test's command."""

    def __init__(self) -> None:
        pass

    def subscribe(self, **_: object) -> None:  # type: ignore[override]
        pass


def test_slow_viewer_misses_updates_but_receives_complete_lines() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = ViewConnection(ours, Delivered(), {}, {"event": "hello"})
    for _ in range(1000):
        connection._show(STATS)  # never blocks
    assert connection._missed
    connection.end()
    received = theirs.makefile("rb").read()
    lines = received.split(b"\n")[:-1]
    assert 1 < len(lines) < 1000
    assert all(json.loads(line)["event"] in ("hello", "stats") for line in lines)
    theirs.close()


def test_reading_viewer_receives_end_event_despite_small_buffer() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.extend(theirs.makefile("rb")))
    reader.start()
    connection = ViewConnection(ours, Delivered(), {}, {"event": "hello"})
    connection._show(STATS)
    connection.end()
    reader.join()
    assert [json.loads(line)["event"] for line in lines] == ["hello", "stats", "end"]
    theirs.close()


def test_connection_that_closes_before_run_ends_is_reported() -> None:
    viewed = served({"event": "hello", "schema": SCHEMA, "graph": "g"})
    viewed.hello()
    with pytest.raises(ViewError, match="the program of run 7-1 exited before the run ended"):
        next(viewed.statistics())
    viewed.close()


def test_different_protocol_version_is_refused() -> None:
    viewed = served({"event": "hello", "schema": SCHEMA + 1})
    with pytest.raises(ViewError, match="uses another version of flowchan"):
        viewed.hello()
    viewed.close()


def test_program_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_client, "ANSWER_S", 0.01)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{socket_prefix()}7-1")
        listener.listen()
        (viewed,) = viewed_runs("7-1")
        with pytest.raises(ViewError, match=r"has sent nothing for 0\.01 s; it may be suspended"):
            viewed.hello()
        viewed.close()


def served(*messages: dict[str, object]) -> ViewedRun:
    """Return a connection to a program that is killed after sending these messages."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{socket_prefix()}7-1")
        listener.listen()
        (viewed,) = viewed_runs("7-1")
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in messages))
    return viewed


def test_socket_uses_next_name_if_its_name_is_taken() -> None:
    with socket.socket(socket.AF_UNIX) as other:
        # for example, a program in a container has this name
        other.bind(f"\0{socket_prefix()}{os.getpid()}-1")
        gate = Gate()
        graph = Graph("next")
        graph.source([1]).sink(gate.wait)
        with graph.start():
            wait_until(lambda: f"{os.getpid()}-2" in names())
            gate.open()
    assert not names()

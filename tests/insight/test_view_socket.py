"""Test the socket through which other programs view a run: protocol, permissions and stale files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sample_stats import STATS
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, Run
from flowchan.cli import view_client
from flowchan.cli.view_client import ViewedRun, ViewError, viewed_runs
from flowchan.run.observe import view_socket
from flowchan.run.observe.feed import Feed
from flowchan.run.observe.stats_json import SCHEMA
from flowchan.run.observe.view_socket import ViewConnection, ViewSocket, view_folders

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the socket folder of this test. The folder does not exist yet."""
    with tempfile.TemporaryDirectory(prefix="fc", dir="/tmp") as runtime:  # a socket's path must be short
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setenv("TMPDIR", runtime)
        assert view_folders()[0] == Path(runtime) / "flowchan"
        # the second folder has the runs of all other programs of this user
        monkeypatch.setattr(view_client, "view_folders", lambda: view_folders()[:1])
        yield Path(runtime) / "flowchan"


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


def test_viewer_receives_hello_and_then_stats_until_run_ends(folder: Path) -> None:
    gate = Gate()
    graph = Graph("told")
    graph.source([1], name="one").sink(gate.wait, name="wait")
    with graph.start() as run:
        wait_until(lambda: bool(list(folder.glob("*"))))
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


def test_socket_folder_is_private_and_empty_after_the_run(folder: Path) -> None:
    with running():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [path.name for path in folder.iterdir()] == [f"{os.getpid()}-1"]
    assert not list(folder.iterdir())


def test_short_run_creates_no_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_socket, "POLL_INTERVAL_S", 600)
    graph = Graph("short")
    graph.source([1]).sink(str)
    graph.run()
    assert not folder.exists()


def test_run_without_viewers_has_no_viewer_thread(folder: Path) -> None:
    with running():
        wait_until(lambda: not any("feed" in thread.name for thread in threading.enumerate()))


def test_runs_in_one_program_have_different_socket_names(folder: Path) -> None:
    with running("a"), running("b"):
        assert {one.name for one in sockets("a") + sockets("b")} == {f"{os.getpid()}-{n}" for n in (1, 2)}
        (chosen,) = viewed_runs(f"{os.getpid()}-2")
        assert chosen.hello()["graph"] == "b"
        chosen.close()


def test_run_has_no_socket_if_others_can_access_the_folder(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    socket_of_run = ViewSocket("open", Feed("feed", lambda: None))  # type: ignore[arg-type]
    socket_of_run._due = 0.0
    socket_of_run.poll()
    assert socket_of_run._due == float("inf")
    assert not list(folder.iterdir())
    socket_of_run.close()
    assert viewed_runs() == []


def test_socket_folder_falls_back_to_tmp_without_private_runtime_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    assert view_folders() == [Path(f"/tmp/flowchan-{os.geteuid()}")]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")  # any user can write to /tmp
    assert view_folders() == [Path(f"/tmp/flowchan-{os.geteuid()}")]


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


def received_by_nobody(path: Path) -> int:
    """Return 1 if access is denied, 2 if the program closes the connection, and 3 if it sends data."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except PermissionError:
            return 1
        try:
            return 3 if connection.recv(1) else 2
        except ConnectionError:
            return 2


@needs_root
def test_other_user_cannot_access_the_socket_folder(folder: Path) -> None:
    with running():
        (path,) = folder.iterdir()
        assert as_nobody(lambda: received_by_nobody(path)) == 1


@needs_root
def test_other_user_with_access_to_the_socket_receives_nothing(folder: Path) -> None:
    with running():
        (path,) = folder.iterdir()
        for shared in (folder.parent, folder, path):
            shared.chmod(0o777)
        assert as_nobody(lambda: received_by_nobody(path)) == 2


def test_forked_child_does_not_keep_sockets_open(folder: Path) -> None:
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


def test_feed_thread_ends_after_viewer_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_socket, "STATS_EVERY_S", 0.01)
    with running() as run:
        (viewed,) = viewed_runs(str(os.getpid()))
        next(viewed.statistics())
        assert run._supervisor.feed._subscriptions
        viewed.close()
        wait_until(lambda: not run._supervisor.feed._subscriptions)


def test_run_continues_if_viewer_thread_cannot_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Feed that leaves it to the test to deliver statistics."""

    def __init__(self) -> None:
        pass

    def subscribe(self, **_: object) -> None:  # type: ignore[override]
        pass


def test_slow_viewer_misses_updates_but_receives_complete_lines() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = ViewConnection(ours, Delivered(), {"event": "hello"})
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
    connection = ViewConnection(ours, Delivered(), {"event": "hello"})
    connection._show(STATS)
    connection.end()
    reader.join()
    assert [json.loads(line)["event"] for line in lines] == ["hello", "stats", "end"]
    theirs.close()


def stale(folder: Path, name: str, age: float) -> Path:
    """Create the socket file of a program that was killed ``age`` seconds ago."""
    path = folder / name
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_socket_of_killed_program_is_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    old = stale(folder, "999999-1", 2 * view_client.STALE_S)
    new = stale(folder, "999999-2", 0.0)
    other = stale(folder, "notes", 2 * view_client.STALE_S)
    assert viewed_runs() == []
    assert not old.exists()
    assert new.exists()  # its program may not be listening yet
    assert other.exists()


def test_connection_that_closes_before_run_ends_is_reported(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    viewed = served(folder, {"event": "hello", "schema": SCHEMA, "graph": "g"})
    viewed.hello()
    with pytest.raises(ViewError, match="the program of run 7-1 exited before the run ended"):
        next(viewed.statistics())
    viewed.close()


def test_different_protocol_version_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    viewed = served(folder, {"event": "hello", "schema": SCHEMA + 1})
    with pytest.raises(ViewError, match="uses another version of flowchan"):
        viewed.hello()
    viewed.close()


def test_program_that_does_not_answer_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_client, "ANSWER_S", 0.01)
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "7-1"))
        listener.listen()
        (viewed,) = viewed_runs("7")
        with pytest.raises(ViewError, match=r"has sent nothing for 0\.01 s; it may be suspended"):
            viewed.hello()
        viewed.close()


def served(folder: Path, *messages: dict[str, object]) -> ViewedRun:
    """Return a connection to a program that is killed after sending these messages."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "7-1"))
        listener.listen()
        (viewed,) = viewed_runs("7")
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in messages))
    return viewed


def test_socket_uses_next_name_if_its_name_is_taken(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    other = stale(folder, f"{os.getpid()}-1", 0.0)
    gate = Gate()
    graph = Graph("next")
    graph.source([1]).sink(gate.wait)
    with graph.start():
        wait_until(lambda: (folder / f"{os.getpid()}-2").exists())
        gate.open()
    assert [path.name for path in folder.iterdir()] == [other.name]
    shutil.rmtree(folder)

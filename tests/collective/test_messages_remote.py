"""Test how messages between hosts are received, with bytes that the test sends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.group_members import SECRET, free_address, in_threads, over_hosts, raised
from support.peers import ProcessPeer, ThreadPeer
from support.waiting import wait_until

from flowchan import GroupError, MemberDied, MemberLeft
from flowchan.collective.connector import Connector
from flowchan.collective.messages_remote import READ_AHEAD, SIZE, RemotePeers
from flowchan.collective.point_to_point import Messages
from flowchan.collective.rendezvous.address import meet_at
from flowchan.collective.rendezvous.forming import this_host
from flowchan.collective.rendezvous.membership import Membership
from flowchan.collective.value_bytes import dumps

CONNECTOR = Connector(SECRET, "127.0.0.1")


class Received:
    """The messages of rank 0. The test sends in place of the other members, and one member may have ended."""

    def __init__(self) -> None:
        addresses = ["", free_address(), free_address(), free_address()]
        self.peers = RemotePeers(0, CONNECTOR.listen({"rank": 0}), addresses, CONNECTOR)
        self.messages = Messages(0, 2, self.peers.peer)
        self.receive, self.receive_any = self.messages.receive, self.messages.receive_any


@pytest.fixture
def to_us() -> Iterator[Received]:
    made = Received()
    yield made
    made.peers.close()


def sender(to_us: Received, rank: int) -> socket.socket:
    local, remote = socket.socketpair()
    to_us.peers.adopt(local, {"rank": rank})
    return remote


def two() -> tuple[RemotePeers, RemotePeers]:
    """Create two members on two hosts."""
    listeners = [CONNECTOR.listen({"rank": rank}) for rank in (0, 1)]
    local, remote = (
        RemotePeers(rank, listener, [listener.address for listener in listeners], CONNECTOR)
        for rank, listener in enumerate(listeners)
    )
    return local, remote


def test_message_is_received_despite_timeouts_between_its_parts(to_us: Received) -> None:
    message = dumps(x := bytes(range(256)) * 400)
    whole = SIZE.pack(len(message)) + message
    with sender(to_us, 1) as remote:
        for start in range(0, len(whole), 50_000):
            with pytest.raises(TimeoutError, match="rank 1 sent nothing to rank 0 in time"):
                to_us.receive(1, 0.001)
            with pytest.raises(TimeoutError):
                to_us.receive_any(0.0)
            remote.sendall(whole[start : start + 50_000])
        assert to_us.receive(1, None) == x
        remote.sendall(whole)
        assert to_us.receive_any(60.0) == (x, 1)


def interrupted(after: int, call: Callable[[], Any]) -> Any:
    """Return the result of the call, or ``KeyboardInterrupt`` if it was raised at point number ``after``.

    A point is the start of a Python function or the end of a system call.
    """
    points = itertools.count()

    def trace(frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_return") and next(points) == after:
            raise KeyboardInterrupt

    sys.setprofile(trace)
    try:
        return call()
    except KeyboardInterrupt:
        return KeyboardInterrupt
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("where", [in_threads, over_hosts])
@pytest.mark.parametrize("how", ["receive", "receive into an array", "receive_any"])
def test_receive_loses_no_message_to_ctrl_c(where: Any, how: str) -> None:
    """A message that an interrupted call has already taken is returned by the next call."""
    first = np.arange(700.0)

    def call(g: Any) -> Any:
        if how == "receive_any":
            return g.receive_any(timeout=60.0)[0]
        return g.receive(1, timeout=60.0, out=np.empty_like(first) if "array" in how else None)

    def body(g: Any) -> Any:
        if g.rank:
            while g.receive(0):
                g.send(first, 0)
                g.send("second", 0)
            return None
        for after in itertools.count():
            g.send(True, 1)
            found = interrupted(after, lambda: call(g))
            is_interrupted = found is KeyboardInterrupt
            assert np.array_equal(call(g) if is_interrupted else found, first)
            assert g.receive(1, timeout=60.0) == "second"
            if not is_interrupted:
                break
        g.send(False, 1)
        return after

    assert raised(where(2, body))[0] > 5


@pytest.mark.parametrize("any_source", [False, True])
def test_first_message_arrives_after_ctrl_c_in_receive(any_source: bool) -> None:
    """The interrupted receive has already begun to watch the sender."""
    for after in range(0, 60, 3):
        local, remote = two()
        own, other = Messages(0, 2, local.peer), Messages(1, 2, remote.peer)

        def receive(timeout: float, own: Messages = own) -> Any:
            return own.receive_any(timeout)[0] if any_source else own.receive(1, timeout)

        with contextlib.suppress(TimeoutError):
            interrupted(after, lambda: receive(0.01))
        other.send("first", 0, None)
        assert receive(60.0) == "first"
        local.close(wait=False)
        remote.close(wait=False)


class Now:
    """An object that fails to unpickle the first time and succeeds later."""

    error: BaseException | Callable[[], BaseException] | None = None

    def __reduce__(self) -> Any:
        return Now._made, ()

    @staticmethod
    def _made() -> str:
        error, Now.error = Now.error, None
        if error is not None:
            raise error() if callable(error) else error
        return "made"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(errno.EMFILE, "too many")])
def test_message_that_fails_to_unpickle_is_received_again(to_us: Received, error: BaseException) -> None:
    with sender(to_us, 1) as remote:
        remote.sendall(SIZE.pack(len(message := dumps(Now()))) + message)
        Now.error = error
        with pytest.raises(type(error)):
            to_us.receive(1, 60.0)
        assert to_us.receive(1, 60.0) == "made"


def test_handler_exception_loses_no_message(to_us: Received) -> None:
    class TimeIsUp(Exception):
        pass

    def time_is_up(*_: Any) -> None:
        raise TimeIsUp

    def comes() -> Exception:
        signal.raise_signal(signal.SIGUSR1)
        return AssertionError("the handler has raised before this")

    before = signal.signal(signal.SIGUSR1, time_is_up)
    try:
        with sender(to_us, 1) as remote:
            remote.sendall(SIZE.pack(len(message := dumps(Now()))) + message)
            Now.error = comes
            with pytest.raises(TimeIsUp):
                to_us.receive(1, 60.0)
            assert to_us.receive(1, 60.0) == "made"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_message_that_can_never_be_unpickled_is_skipped(to_us: Received) -> None:
    with sender(to_us, 1) as remote:
        for message in (dumps(Now()), dumps("next")):
            remote.sendall(SIZE.pack(len(message)) + message)
        Now.error = ValueError("never")
        with pytest.raises(ValueError, match="never"):
            to_us.receive(1, 60.0)
        assert to_us.receive(1, 60.0) == "next"


def test_receive_notices_that_a_silent_peer_has_ended(to_us: Received) -> None:
    with pytest.raises(MemberDied) as died:
        to_us.receive(1, None)
    assert died.value.ranks == (1,)
    with pytest.raises(MemberLeft, match="rank 1, on another host, has left"):
        to_us.receive_any(None)


@pytest.mark.parametrize("leaves", [False, True])
def test_receive_any_notices_that_a_watched_peer_has_ended(leaves: bool) -> None:
    """The peer leaves, or it loses its connections without leaving."""
    local, remote = two()
    found = ThreadPeer(Messages(0, 2, local.peer).receive_any, None)
    wait_until(lambda: bool(remote._watchers))
    if not leaves:
        remote._watchers.pop().close()
    remote.close()
    with pytest.raises(MemberDied) as ended:
        found.result()
    assert type(ended.value) is (MemberLeft if leaves else MemberDied)
    local.close()


@pytest.mark.parametrize("where", [in_threads, over_hosts])
def test_threads_of_one_member_share_received_messages(where: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank:
            for number in range(300):
                g.send((number, bytes(20_000)), 0)
            g.barrier()
            return None
        threads = [ThreadPeer(lambda: [g.receive(1)[0] for _ in range(100)]) for _ in range(3)]
        found = [thread.result() for thread in threads]
        g.barrier()
        return found

    found = raised(where(2, body))[0]
    assert sorted(itertools.chain(*found)) == list(range(300))
    assert all(numbers == sorted(numbers) for numbers in found)


def test_repr_hides_the_group_secret() -> None:
    slot = Membership(0, 0, 2, "group", "host").reached("127.0.0.1:1", SECRET, False)
    assert SECRET.decode() not in repr([slot, CONNECTOR])


PID, TIME, USER = 0x20000000, 0x80, 0x10000000  # CLONE_NEWPID, CLONE_NEWTIME, CLONE_NEWUSER


def separate_hosts(namespace: int) -> tuple[str, str]:
    """Return the identity of this host, and that of a container with its own namespace."""
    if ctypes.CDLL(None).unshare(namespace | (USER if os.geteuid() else 0)):
        return "", ""
    reader_end, writer_end = os.pipe()
    if not (child := os.fork()):
        os.write(writer_end, this_host().encode())
        os._exit(0)
    os.waitpid(child, 0)
    return this_host(), os.read(reader_end, 1000).decode()


@pytest.mark.parametrize(("namespace", "place"), [(PID, 2), (TIME, 4)], ids=["pid", "time"])
def test_processes_in_different_namespaces_count_as_different_hosts(namespace: int, place: int) -> None:
    """In the containers of one pod, a process id may mean a different process or none.

    In another time namespace, a process seems to have started at a different time.
    """
    local, remote = ProcessPeer(separate_hosts, namespace).result()
    if not local:
        pytest.skip("this system does not allow new PID or time namespaces")
    assert local == this_host()
    here, there = local.split("/"), remote.split("/")
    assert here[:2] == there[:2]
    assert here[place] != there[place]


def test_processes_of_two_users_count_as_two_hosts() -> None:
    """A user cannot open the memory of another user's process."""
    if os.geteuid():
        pytest.skip("only root can become another user: run the test as root")
    at = free_address()

    def work(g: Any) -> Any:
        return g.allreduce(g.rank + 1), type(g).__name__

    def member(rank: int, user: int) -> Any:
        os.setresuid(user, user, user)
        with meet_at(at, SECRET, rank, 2, 60) as g:
            return work(g)

    raised(over_hosts(2, work))  # first imports modules that the other user may be unable to read
    peers = [ProcessPeer(member, rank, user) for rank, user in ((0, 0), (1, 65534))]
    assert [peer.result() for peer in peers] == [(3, "LinkedGroup")] * 2


def test_close_ends_the_receive_of_another_thread(to_us: Received) -> None:
    found: list[BaseException] = []

    def receive() -> None:
        try:
            to_us.receive(1, None)
        except BaseException as error:
            found.append(error)

    with sender(to_us, 1) as remote:
        remote.sendall(b"the begin of a size"[:3])
        thread = threading.Thread(target=receive)
        thread.start()
        wait_until(lambda: to_us.peers.peer(1).incoming().stats().waiting_readers == 1)
        to_us.peers.close()
        thread.join()
    assert type(found[0]) is GroupError
    assert str(found[0]) == "receive failed: this member has left the group"


def sending() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "flowchan-collective-send"]


@pytest.mark.parametrize("lets_in", [False, True])
@pytest.mark.parametrize("tls", [False, True])
def test_sending_thread_ends_when_its_messages_are_abandoned(lets_in: bool, tls: bool) -> None:
    """The peer never accepts the connection, or it accepts but never reads."""
    if tls:
        pytest.importorskip("cryptography")
    connector = Connector(SECRET, "127.0.0.1", tls)
    with connector.listen({"rank": 1}) as silent:
        listeners = [connector.listen({"rank": rank}) for rank in range(2)]
        addresses = [listeners[0].address, listeners[1].address if lets_in else silent.address]
        local, remote = (
            RemotePeers(rank, listener, addresses, connector) for rank, listener in enumerate(listeners)
        )
        for _ in range(20):  # more than the peer's threads accept while nothing is received
            local.peer(1).send(bytes(4 << 20), None)
        if lets_in:
            wait_until(lambda: remote.peer(0).incoming().stats().inside == READ_AHEAD)
        else:
            wait_until(lambda: bool(select.select([silent], [], [], 0)[0]))
        local.close(wait=False)
        wait_until(lambda: not sending())
        remote.close()

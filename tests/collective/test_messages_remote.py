"""Messages between hosts, as one member receives the bytes that the test sends."""

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

import pytest
from support.group_members import SECRET, free_address, in_threads, over_hosts, raised
from support.peers import ProcessPeer, ThreadPeer
from support.waiting import wait_until

from flowchan import GroupError, MemberDied, MemberLeft
from flowchan.collective.messages_remote import READ_AHEAD, SIZE, RemotePeers, Way
from flowchan.collective.point_to_point import Messages
from flowchan.collective.rendezvous.address import meet_at
from flowchan.collective.rendezvous.forming import this_host
from flowchan.collective.rendezvous.membership import Membership
from flowchan.collective.value_bytes import dumps

WAY = Way(SECRET, "127.0.0.1")


class Received:
    """The messages of rank 0; the test sends for the other members, and one of them may be gone."""

    def __init__(self) -> None:
        addresses = ["", free_address(), free_address(), free_address()]
        self.peers = RemotePeers(0, WAY.door({"rank": 0}), addresses, WAY)
        self.messages = Messages(0, 2, self.peers.peer)
        self.receive, self.receive_any = self.messages.receive, self.messages.receive_any


@pytest.fixture
def to_us() -> Iterator[Received]:
    made = Received()
    yield made
    made.peers.close()


def sender(to_us: Received, rank: int) -> socket.socket:
    here, there = socket.socketpair()
    to_us.peers.adopt(here, {"rank": rank})
    return there


def two() -> tuple[RemotePeers, RemotePeers]:
    """Make two members on two hosts."""
    doors = [WAY.door({"rank": rank}) for rank in (0, 1)]
    here, there = (
        RemotePeers(rank, door, [door.address for door in doors], WAY) for rank, door in enumerate(doors)
    )
    return here, there


def test_receive_that_times_out_amid_a_message_gets_it_later(to_us: Received) -> None:
    message = dumps(x := bytes(range(256)) * 400)
    whole = SIZE.pack(len(message)) + message
    with sender(to_us, 1) as there:
        for start in range(0, len(whole), 50_000):
            with pytest.raises(TimeoutError, match="rank 1 sent nothing to rank 0 in time"):
                to_us.receive(1, 0.001)
            with pytest.raises(TimeoutError):
                to_us.receive_any(0.0)
            there.sendall(whole[start : start + 50_000])
        assert to_us.receive(1, None) == x
        there.sendall(whole)
        assert to_us.receive_any(60.0) == (x, 1)


def interrupted(after: int, call: Callable[[], Any]) -> Any:
    """Return the result of the call, or whether Ctrl-C was raised at point number ``after``.

    The points are the start of each Python function and the end of each system call.
    """
    points = itertools.count()

    def look(frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_return") and next(points) == after:
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        return call()
    except KeyboardInterrupt:
        return KeyboardInterrupt
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("any_source", [False, True])
def test_receive_continues_after_ctrl_c(to_us: Received, any_source: bool) -> None:
    """The message that is being received may be lost, as between the return of a call and the use of its
    result."""

    def receive() -> Any:
        return to_us.receive_any(60.0)[0] if any_source else to_us.receive(1, 60.0)

    sent, lost = [b"first" * 1000, ["second"]], 0
    with sender(to_us, 1) as there:
        for after in itertools.count():
            for message in map(dumps, sent):
                there.sendall(SIZE.pack(len(message)) + message)
            found = interrupted(after, receive)
            if found is not KeyboardInterrupt:
                assert found == sent[0]
                assert receive() == sent[1]
                break
            if (then := receive()) == sent[0]:
                then = receive()
            else:
                lost += 1
            assert then == sent[1]
    assert after > 5
    assert lost < 8


@pytest.mark.parametrize("any_source", [False, True])
def test_first_message_arrives_after_ctrl_c_in_receive(any_source: bool) -> None:
    """The interrupted receive starts to watch its sender."""
    for after in range(0, 60, 3):
        here, there = two()
        mine, other = Messages(0, 2, here.peer), Messages(1, 2, there.peer)

        def receive(timeout: float, mine: Messages = mine) -> Any:
            return mine.receive_any(timeout)[0] if any_source else mine.receive(1, timeout)

        with contextlib.suppress(TimeoutError):
            interrupted(after, lambda: receive(0.01))
        other.send("first", 0, None)
        assert receive(60.0) == "first"
        here.close(wait=False)
        there.close(wait=False)


class Now:
    """An object that fails to unpickle now and succeeds later."""

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
    with sender(to_us, 1) as there:
        there.sendall(SIZE.pack(len(message := dumps(Now()))) + message)
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
        with sender(to_us, 1) as there:
            there.sendall(SIZE.pack(len(message := dumps(Now()))) + message)
            Now.error = comes
            with pytest.raises(TimeIsUp):
                to_us.receive(1, 60.0)
            assert to_us.receive(1, 60.0) == "made"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_message_that_never_unpickles_is_skipped(to_us: Received) -> None:
    with sender(to_us, 1) as there:
        for message in (dumps(Now()), dumps("next")):
            there.sendall(SIZE.pack(len(message)) + message)
        Now.error = ValueError("never")
        with pytest.raises(ValueError, match="never"):
            to_us.receive(1, 60.0)
        assert to_us.receive(1, 60.0) == "next"


def test_missing_silent_peer_is_noticed(to_us: Received) -> None:
    with pytest.raises(MemberDied) as died:
        to_us.receive(1, None)
    assert died.value.ranks == (1,)
    with pytest.raises(MemberLeft, match="rank 1, on another host, has left"):
        to_us.receive_any(None)


@pytest.mark.parametrize("leaves", [False, True])
def test_end_of_watched_peer_is_noticed(leaves: bool) -> None:
    """The peer has left, or its connections have ended."""
    here, there = two()
    found = ThreadPeer(Messages(0, 2, here.peer).receive_any, None)
    wait_until(lambda: bool(there._watchers))
    if not leaves:
        there._watchers.pop().close()
    there.close()
    with pytest.raises(MemberDied) as ended:
        found.result()
    assert type(ended.value) is (MemberLeft if leaves else MemberDied)
    here.close()


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
    seat = Membership(0, 0, 2, "group", "host").reached("127.0.0.1:1", SECRET, False)
    assert SECRET.decode() not in repr([seat, WAY])


def hosts_apart() -> tuple[str, str]:
    """Return the identity of this host, and of a container that shares its network but not its processes."""
    alone, user = 0x20000000, 0x10000000  # CLONE_NEWPID, CLONE_NEWUSER
    if ctypes.CDLL(None).unshare(alone | (user if os.geteuid() else 0)):
        return "", ""
    heard, says = os.pipe()
    if not (child := os.fork()):
        os.write(says, this_host().encode())
        os._exit(0)
    os.waitpid(child, 0)
    return this_host(), os.read(heard, 1000).decode()


def test_processes_in_different_namespaces_count_as_hosts() -> None:
    """In the containers of one pod, a process id belongs to another process or to none."""
    here, there = ProcessPeer(hosts_apart).result()
    if not here:
        pytest.skip("a process can't leave the namespace of its processes here")
    assert here == this_host()
    (boot, net, pid, *_), (boot_there, net_there, pid_there, *_) = here.split("/"), there.split("/")
    assert (boot, net) == (boot_there, net_there)
    assert pid != pid_there


def test_members_of_two_users_count_as_two_hosts() -> None:
    """No user can open the memory of another."""
    if os.geteuid():
        pytest.skip("only root can become another user: run it as root")
    at = free_address()

    def work(g: Any) -> Any:
        return g.allreduce(g.rank + 1), type(g).__name__

    def member(rank: int, user: int) -> Any:
        os.setresuid(user, user, user)
        with meet_at(at, SECRET, rank, 2, 60) as g:
            return work(g)

    raised(over_hosts(2, work))  # imports modules that the other user may not be allowed to read
    peers = [ProcessPeer(member, rank, user) for rank, user in ((0, 0), (1, 65534))]
    assert [peer.result() for peer in peers] == [(3, "LinkedGroup")] * 2


def test_close_ends_the_receive_of_another_thread(to_us: Received) -> None:
    found: list[BaseException] = []

    def receive() -> None:
        try:
            to_us.receive(1, None)
        except BaseException as error:
            found.append(error)

    with sender(to_us, 1) as there:
        there.sendall(b"the begin of a size"[:3])
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
def test_abandoned_messages_leave_no_thread_that_sends(lets_in: bool, tls: bool) -> None:
    """The peer never accepts the connection, or reads nothing."""
    if tls:
        pytest.importorskip("cryptography")
    way = Way(SECRET, "127.0.0.1", tls)
    with way.door({"rank": 1}) as silent:
        doors = [way.door({"rank": rank}) for rank in range(2)]
        addresses = [doors[0].address, doors[1].address if lets_in else silent.address]
        here, there = (RemotePeers(rank, door, addresses, way) for rank, door in enumerate(doors))
        for _ in range(20):  # more than its threads accept without a receiver
            here.peer(1).send(bytes(4 << 20), None)
        if lets_in:
            wait_until(lambda: there.peer(0).incoming().stats().inside == READ_AHEAD)
        else:
            wait_until(lambda: bool(select.select([silent], [], [], 0)[0]))
        here.close(wait=False)
        wait_until(lambda: not sending())
        there.close()

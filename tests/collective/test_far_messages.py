"""Messages between members on several hosts, as one member receives them that the test sends bytes to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import math
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from collective_members import SECRET, free_address, in_threads, over_hosts, raised
from peers import ProcessPeer, ThreadPeer
from waiting import wait_until

from flowchan import GroupError, MemberDied
from flowchan.collective import far_lanes
from flowchan.collective.at_address import meet_at
from flowchan.collective.far_lanes import SIZE, FarLanes, Way
from flowchan.collective.gathering import this_host
from flowchan.collective.seats import Seat
from flowchan.collective.values import dumps

WAY = Way(SECRET, "127.0.0.1")


@pytest.fixture
def lanes() -> Iterator[FarLanes]:
    """Those of rank 0. The others are gone."""
    made = FarLanes(0, WAY.door({"rank": 0}), ["", free_address(), free_address(), free_address()], WAY)
    yield made
    made.close()


def sender(lanes: FarLanes, rank: int) -> socket.socket:
    here, there = socket.socketpair()
    lanes.adopt(here, {"rank": rank})
    return there


def test_a_receive_that_was_late_in_mid_message_goes_on_with_it(lanes: FarLanes) -> None:
    message = dumps(x := bytes(range(256)) * 400)
    whole = SIZE.pack(len(message)) + message
    with sender(lanes, 1) as there:
        for start in range(0, len(whole), 50_000):
            with pytest.raises(TimeoutError, match="rank 1 has sent nothing to rank 0 in time"):
                lanes.receive(1, 0.001)
            with pytest.raises(TimeoutError):
                lanes.receive_any([1], 0.0, 0.0)
            there.sendall(whole[start : start + 50_000])
        assert lanes.receive(1, None) == x
        there.sendall(whole)
        assert lanes.receive_any([1], 60.0, 0.0) == (x, 1)


def opens_a_socket(frame: Any) -> bool:
    """Python's own ``accept`` forgets a connection for which it has no object yet."""
    while frame is not None and frame.f_code.co_name != "accept_now":
        frame = frame.f_back
    return frame is not None


def interrupted(after: int, call: Callable[[], Any]) -> Any:
    """What the call gives, or whether Ctrl-C has come: at so many of the points in it where that is raised,
    which are the begin of a function of Python, and the end of one of the system."""
    points = itertools.count()

    def look(frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_return") and not opens_a_socket(frame) and next(points) == after:
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        return call()
    except KeyboardInterrupt:
        return KeyboardInterrupt
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("any_source", [False, True])
def test_wherever_ctrl_c_comes_the_next_receive_goes_on(lanes: FarLanes, any_source: bool) -> None:
    """A message that is whole then may be lost, as it is between a call's return and its use."""

    def receive() -> Any:
        return lanes.receive_any([1], 60.0, math.inf)[0] if any_source else lanes.receive(1, 60.0)

    sent, lost = [b"first" * 1000, ["second"]], 0
    with sender(lanes, 1) as there:
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
    assert after > 20
    assert lost < 5


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # where one is planted in a del
@pytest.mark.parametrize("any_source", [False, True])
def test_wherever_ctrl_c_comes_who_has_dialled_is_let_in(any_source: bool) -> None:
    """The other one has sent all that it had once, and counts on it. A message that is whole may be lost, as
    it is between a call's return and its use. A wait for anybody has 3,000 such points: each run takes a
    quarter."""
    lost, step = 0, 4 if any_source else 1
    for after in itertools.count(random.randrange(step), step):
        with contextlib.ExitStack() as stack:
            doors = [WAY.door({"rank": rank}) for rank in (0, 1)]
            both = [FarLanes(rank, doors[rank], [door.address for door in doors], WAY) for rank in (0, 1)]
            for one in both:
                stack.callback(one.close, wait=False)
            mine, other = both

            def receive(mine: FarLanes = mine) -> Any:
                while any_source:
                    with contextlib.suppress(TimeoutError):
                        return mine.receive_any([1], 60.0, math.inf)[0]
                return mine.receive(1, 60.0)

            other.send("first", 0, None)
            other.send("second", 0, None)
            if (found := interrupted(after, receive)) is KeyboardInterrupt:
                then = receive()
                if then == "second":
                    lost += 1
                else:
                    assert (then, receive()) == ("first", "second"), after
            else:
                assert (found, receive()) == ("first", "second"), after
        if found is not KeyboardInterrupt:
            break
    assert lost < 5


class Now:
    """Can't be unpickled now, and can later."""

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
def test_what_can_not_be_unpickled_now_is_received_again(lanes: FarLanes, error: BaseException) -> None:
    with sender(lanes, 1) as there:
        there.sendall(SIZE.pack(len(message := dumps(Now()))) + message)
        Now.error = error
        with pytest.raises(type(error)):
            lanes.receive(1, 60.0)
        assert lanes.receive(1, 60.0) == "made"


def test_a_time_limit_that_a_handler_raises_costs_no_message(lanes: FarLanes) -> None:
    class TimeIsUp(Exception):
        pass

    def time_is_up(*_: Any) -> None:
        raise TimeIsUp

    def comes() -> Exception:
        signal.raise_signal(signal.SIGUSR1)
        return AssertionError("the handler has raised before this")

    before = signal.signal(signal.SIGUSR1, time_is_up)
    try:
        with sender(lanes, 1) as there:
            there.sendall(SIZE.pack(len(message := dumps(Now()))) + message)
            Now.error = comes
            with pytest.raises(TimeIsUp):
                lanes.receive(1, 60.0)
            assert lanes.receive(1, 60.0) == "made"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_can_never_be_unpickled_does_not_hold_up_what_follows(lanes: FarLanes) -> None:
    with sender(lanes, 1) as there:
        for message in (dumps(Now()), dumps("next")):
            there.sendall(SIZE.pack(len(message)) + message)
        Now.error = ValueError("never")
        with pytest.raises(ValueError, match="never"):
            lanes.receive(1, 60.0)
        assert lanes.receive(1, 60.0) == "next"


def test_looking_for_those_who_are_silent_takes_no_longer_than_the_caller_has(
    lanes: FarLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def dial(_: str, timeout: float) -> Any:
        tries.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(far_lanes, "dial", dial)
    for give_up, looks in ((time.monotonic(), 1), (time.monotonic() + 1000, 3)):
        tries.clear()
        lanes._next_look = 0.0
        with pytest.raises(TimeoutError):
            lanes.receive_any([1, 2, 3], 0.0, give_up)
        assert len(tries) == looks
        assert all(timeout <= (0.0 if looks == 1 else 1.0) for timeout in tries)


def test_who_asks_again_and_again_with_little_patience_dials_ever_later(
    lanes: FarLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    clock = itertools.count(0.0, 0.001)  # a moment passes between two looks at it

    def dial(*_: Any) -> Any:
        tries.append(next(clock))
        raise TimeoutError

    monkeypatch.setattr(far_lanes, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(far_lanes, "dial", dial)
    while len(tries) < 3:
        with pytest.raises(TimeoutError):
            lanes.receive(1, 0.005)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert all(pause > least for pause, least in zip(pauses, (0.19, 0.39), strict=True))


def test_who_asks_again_and_again_with_little_patience_learns_of_a_death(lanes: FarLanes) -> None:
    def is_known() -> bool:
        with contextlib.suppress(TimeoutError):
            lanes.receive(1, 0.001)
        return False

    with pytest.raises(MemberDied) as died:
        wait_until(is_known)
    assert died.value.ranks == (1,)


@pytest.mark.parametrize("where", [in_threads, over_hosts])
def test_several_threads_of_a_member_share_what_another_one_sends(where: Any) -> None:
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


def test_no_secret_is_shown() -> None:
    seat = Seat(0, 0, 2, "group", "host").reached("127.0.0.1:1", SECRET, False)
    assert SECRET.decode() not in repr([seat, WAY])


def hosts_apart() -> tuple[str, str]:
    """This host, and the same in a container that shares the network, but not the processes."""
    alone, user = 0x20000000, 0x10000000  # CLONE_NEWPID, CLONE_NEWUSER
    if ctypes.CDLL(None).unshare(alone | (user if os.geteuid() else 0)):
        return "", ""
    heard, says = os.pipe()
    if not (child := os.fork()):
        os.write(says, this_host().encode())
        os._exit(0)
    os.waitpid(child, 0)
    return this_host(), os.read(heard, 1000).decode()


def test_processes_that_do_not_see_each_other_are_on_different_hosts() -> None:
    """Containers of one pod: there a number is another process's, or none's."""
    here, there = ProcessPeer(hosts_apart).result()
    if not here:
        pytest.skip("a process can't leave the namespace of its processes here")
    assert here == this_host()
    (boot, net, pid, *_), (boot_there, net_there, pid_there, *_) = here.split("/"), there.split("/")
    assert (boot, net) == (boot_there, net_there)
    assert pid != pid_there


def test_members_of_two_users_of_one_machine_are_connected_as_two_hosts() -> None:
    """No user opens another one's memory."""
    if os.geteuid():
        pytest.skip("only root can become another user: run it as root")
    at = free_address()

    def work(g: Any) -> Any:
        return g.allreduce(g.rank + 1), type(g).__name__

    def member(rank: int, user: int) -> Any:
        os.setresuid(user, user, user)
        with meet_at(at, SECRET, rank, 2, 60) as g:
            return work(g)

    raised(over_hosts(2, work))  # imports here what the other user may not be allowed to read
    peers = [ProcessPeer(member, rank, user) for rank, user in ((0, 0), (1, 65534))]
    assert [peer.result() for peer in peers] == [(3, "LinkedGroup")] * 2


def test_who_closes_ends_the_receive_of_another_thread(lanes: FarLanes) -> None:
    found: list[BaseException] = []

    def receive() -> None:
        try:
            lanes.receive(1, None)
        except BaseException as error:
            found.append(error)

    with sender(lanes, 1) as there:
        there.sendall(b"the begin of a size"[:3])
        thread = threading.Thread(target=receive)
        thread.start()
        wait_until(lambda: lanes._in[1]._now.came == [3])
        lanes.close()
        thread.join()
    assert type(found[0]) is GroupError
    assert str(found[0]) == "receive was not done: this member has left"


def sending() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "flowchan-collective-send"]


@pytest.mark.parametrize("lets_in", [False, True])
@pytest.mark.parametrize("tls", [False, True])
def test_who_gives_up_leaves_no_thread_that_sends(lets_in: bool, tls: bool) -> None:
    """Whether the other one never lets it in, or takes nothing."""
    if tls:
        pytest.importorskip("cryptography")
    way = Way(SECRET, "127.0.0.1", tls)
    doors = [way.door({"rank": rank}) for rank in range(2)]
    here, there = (
        FarLanes(rank, door, [door.address for door in doors], way) for rank, door in enumerate(doors)
    )
    here.send(bytes(64 << 20), 1, None)
    if lets_in:
        there.adopt(*there.let_in([0], math.inf, "receive"))
        wait_until(lambda: select.select([there._in[0]], [], [], 0)[0])
    else:
        wait_until(lambda: select.select([there.door], [], [], 0)[0])
    here.close(wait=False)
    wait_until(lambda: not sending())
    there.close()

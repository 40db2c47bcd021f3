"""Test that an exception from a signal handler leaves a group's waiting call unchanged.

Even a ``TimeoutError`` counts neither as the call's own timeout nor as a connection error.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.group_members import SECRET, free_address

from flowchan import MemberDied, collective
from flowchan.collective.exchange import Connections, ExchangeStep, LeaderPeer
from flowchan.collective.rendezvous.address import meet_at


class TimeIsUp(TimeoutError):
    """The exception that the signal handler raises."""


def raises(*_: Any) -> None:
    raise TimeIsUp


@pytest.fixture
def interrupted() -> Iterator[Callable[..., None]]:
    """Return a function that makes a waiting call. The signal handler interrupts this call."""

    def run(call: Callable[..., Any], *arguments: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        call(*arguments)

    before = signal.signal(signal.SIGALRM, raises)
    yield run
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def with_members(
    hosts: str | None, others: Callable[[Any], Any]
) -> tuple[Any, list[Any], Callable[[], None]]:
    """Return rank 0 of a group, a list for the others' results, and a function that joins their threads."""
    size, found, at = len(hosts or "aa"), [None] * len(hosts or "aa"), free_address()
    local_members = collective.members(size) if hosts is None else None

    def member(rank: int) -> Any:
        return (
            local_members[rank]
            if local_members
            else meet_at(at, SECRET, rank, size, 60, host=(hosts or "")[rank])
        )

    def run(rank: int) -> None:
        with member(rank) as g:
            try:
                found[rank] = others(g)
            except MemberDied as error:
                found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()

    def wait() -> None:
        for thread in threads:
            thread.join()

    return member(0), found, wait


def after_what_was_started(g: Any) -> None:
    g.allreduce(1, wait=False)
    g.barrier()


@pytest.mark.each_value
@pytest.mark.parametrize("hosts", [None, "ab"], ids=["one host", "two hosts"])
@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.receive(1),
        lambda g: g.receive(1, timeout=60),
        lambda g: g.receive_any(),
        lambda g: g.receive_any(timeout=60),
        lambda g: g.allreduce(1),
        lambda g: g.allreduce(np.ones(2)),
        lambda g: g.split(0),
        after_what_was_started,
    ],
    ids=range(8),
)
def test_handler_exception_propagates_from_a_waiting_call(
    interrupted: Any, hosts: str | None, call: Callable[[Any], Any]
) -> None:
    over = threading.Event()
    g, _, wait = with_members(hosts, lambda _: over.wait())
    try:
        with pytest.raises(TimeIsUp):
            interrupted(call, g)
    finally:
        over.set()
        wait()
        g._abandon()


def test_other_members_raise_member_died_after_a_handler_exception(interrupted: Any) -> None:
    """The interrupted member and the member that gets the error are on one host."""
    over = threading.Event()

    def others(g: Any) -> Any:
        if g.rank == 2:
            return over.wait()
        return g.allreduce(np.ones(2))

    g, found, wait = with_members("aab", others)
    try:
        with pytest.raises(TimeIsUp):
            interrupted(g.allreduce, np.ones(2))
    finally:
        over.set()
        wait()
        g._abandon()
    assert isinstance(found[1], MemberDied)


@pytest.mark.parametrize("rank", [0, 1])
def test_handler_exception_propagates_from_a_rendezvous(interrupted: Any, rank: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = free_address() if rank == 0 else f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeIsUp):
            interrupted(lambda: collective.group(rank=rank, size=2, at=at, secret=SECRET))


def test_handler_exception_propagates_from_a_torch_backend(
    interrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from flowchan.collective.torch_algorithms import TorchAlgorithm

    monkeypatch.setattr(TorchAlgorithm, "_address", lambda _: "")
    monkeypatch.setattr(TorchAlgorithm, "_connect", lambda *_: signal.raise_signal(signal.SIGALRM))
    (g,) = collective.members(1)
    g.set_algorithm("allreduce", "gloo")
    with pytest.raises(TimeIsUp):
        g.allreduce(np.ones(2))
    g._abandon()


class Interrupted:
    """A connection that raises the signal inside one of its methods."""

    def __init__(self, sock: socket.socket, call: str) -> None:
        self._sock, self._call = sock, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            signal.raise_signal(signal.SIGALRM)
        return getattr(self._sock, name)


@pytest.mark.parametrize("kind", [TimeIsUp, BlockingIOError, ConnectionResetError])
@pytest.mark.parametrize("call", ["sendmsg", "recv_into"])
def test_handler_exception_is_not_treated_as_connection_error(
    interrupted: Any, call: str, kind: type[OSError]
) -> None:
    def handler(*_: Any) -> None:
        raise kind

    signal.signal(signal.SIGALRM, handler)
    local_members, remote_end = socket.socketpair()
    with local_members, remote_end:
        remote_end.send(b"x")
        sockets: Any = {1: Interrupted(local_members, call)}
        step = ExchangeStep(
            Connections(sockets, {0: 0, 1: 1}, 0),
            ("barrier", 1, 1),
            {1: LeaderPeer(("", 1, 1), [])},
            lambda _: None,
            None,
        )
        with pytest.raises(kind):
            step.run()

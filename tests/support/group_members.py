"""Run the members of a group as threads, as processes, or as if they were on several hosts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from flowchan import Channel, collective
from flowchan.collective.rendezvous.address import meet_at
from flowchan.errors import GroupError, MemberDied

Body = Callable[..., Any]


SECRET = b"only members know it"


def in_threads(size: int, body: Body, *arguments: Any) -> list[Any]:
    """Return the result or error of ``body(member, *arguments)`` in each of ``size`` threads."""
    members = collective.members(size)
    return _in_threads(members.__getitem__, size, body, arguments)


def over_hosts(size: int, body: Body, *arguments: Any) -> list[Any]:
    """Run members as ``in_threads`` does, but as if on two hosts in turn, or three if ``size`` is odd."""
    at, hosts = free_address(), 2 + size % 2

    def member(rank: int) -> collective.Group:
        return meet_at(at, SECRET, rank, size, 60, host=f"host {rank % hosts}")

    return _in_threads(member, size, body, arguments)


def raised(found: list[Any]) -> list[Any]:
    """Raise the first error in ``found``, or return ``found``."""
    for one in found:
        if isinstance(one, BaseException):
            traceback.print_exception(one)
            raise one
    return found


def refused(run: Callable[..., list[Any]], call: Callable[[Any], Any], said: str) -> None:
    """Check that both members get a ``ValueError`` with this text, and that the group stays usable."""

    def body(g: Any) -> Any:
        with pytest.raises(ValueError, match=said):
            call(g)
        return g.allreduce(1)

    assert run(2, body) == [2, 2]


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def _in_threads(
    member_of: Callable[[int], collective.Group], size: int, body: Body, arguments: tuple[Any, ...]
) -> list[Any]:
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        with member_of(rank) as member:
            try:
                found[rank] = body(member, *arguments)
            except BaseException as error:
                found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _child(member: collective.Group, answers: Channel[Any], body: Body, arguments: tuple[Any, ...]) -> None:
    with member:
        try:
            answer = body(member, *arguments)
        except BaseException as error:
            error.__traceback__ = None
            answer = error
        answers.put((member.rank, answer))


class _Children:
    """Processes that are members. Each puts its rank and its result or error into the answers."""

    children: list[Any]

    def __init__(self) -> None:
        self.answers: Channel[Any] = Channel(across="processes")

    def results(self, expected: int) -> dict[int, Any]:
        """Return the results or errors of ``expected`` members."""
        found = dict(self.answers.get() for _ in range(expected))
        for child in self.children:
            child.join()
            child.close()
        return found


class Processes(_Children):
    """Run ``body(member, *arguments)`` in ``size`` forked processes."""

    def __init__(self, size: int, body: Body, *arguments: Any, method: str = "fork") -> None:
        super().__init__()
        context = multiprocessing.get_context(method)
        self.children = [
            context.Process(target=_child, args=(one, self.answers, body, arguments))
            for one in collective.members(size)
        ]
        for child in self.children:
            child.start()


def in_processes(size: int, body: Body, *arguments: Any) -> list[Any]:
    found = Processes(size, body, *arguments).results(size)
    return [found[rank] for rank in range(size)]


class OverHosts(_Children):
    """Run ``body(member)`` in processes that claim to be on hosts. ``hosts`` lists the host of each rank."""

    def __init__(self, hosts: str, body: Body) -> None:
        super().__init__()
        at = free_address()

        def child(rank: int) -> None:
            _child(meet_at(at, SECRET, rank, len(hosts), 60, host=hosts[rank]), self.answers, body, ())

        context = multiprocessing.get_context("fork")
        self.children = [context.Process(target=child, args=(rank,)) for rank in range(len(hosts))]
        for one in self.children:
            one.start()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(g: Any) -> None:
    while True:
        g.barrier()


def shrunk(g: Any) -> tuple[int, int, int, list[int]]:
    """Work until a member dies, and then continue with the other members.

    Returns the new rank and size, the number of ranks in a sum, and the old ranks.
    """
    with pytest.raises(MemberDied):
        work(g)
    with g.shrink() as new:
        total = new.allreduce(1)
        with pytest.raises(GroupError):
            g.barrier()
        with pytest.raises(GroupError, match="was closed"):
            g.shrink()
        return new.rank, new.size, total, new.allgather(g.rank)

"""Members of a group, as threads of this process or as processes."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

from flowchan import Channel, collective

Body = Callable[..., Any]


def in_threads(size: int, body: Body, *arguments: Any) -> list[Any]:
    """What ``body(member, *arguments)`` returns or raises in each of ``size`` threads."""
    found: list[Any] = [None] * size

    def run(member: collective.Group) -> None:
        with member:
            try:
                found[member.rank] = body(member, *arguments)
            except BaseException as error:
                found[member.rank] = error

    threads = [threading.Thread(target=run, args=(one,)) for one in collective.members(size)]
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


class Processes:
    """``size`` processes that run ``body(member, *arguments)``, by fork."""

    def __init__(self, size: int, body: Body, *arguments: Any, method: str = "fork") -> None:
        context = multiprocessing.get_context(method)
        self.answers: Channel[Any] = Channel(across="processes")
        self.children = [
            context.Process(target=_child, args=(one, self.answers, body, arguments))
            for one in collective.members(size)
        ]
        for child in self.children:
            child.start()

    def results(self, expected: int) -> dict[int, Any]:
        """What this many of them have returned or raised."""
        found = dict(self.answers.get() for _ in range(expected))
        for child in self.children:
            child.join()
            child.close()
        return found


def in_processes(size: int, body: Body, *arguments: Any) -> list[Any]:
    found = Processes(size, body, *arguments).results(size)
    return [found[rank] for rank in range(size)]

"""Test agents that start late (R3).

The run waits for an agent that is queued, or whose node has yet to start. If an agent never connects, the
error lists likely causes.
"""

from __future__ import annotations

import dataclasses
import signal
import threading

import pytest

from flowchan import Graph, HostError
from flowchan.hosts import agent_handle
from flowchan.hosts.host_pool import pool_of
from flowchan.hosts.providers.local import Local
from flowchan.hosts.providers.provider import Launch, StartedAgent


class Queued:
    """An agent that stays queued until the tenth poll."""

    def __init__(self, patch: pytest.MonkeyPatch, launch: Launch) -> None:
        self._patch, self._launch = patch, launch
        self._looks = 0
        self._child: StartedAgent | None = None

    def waits(self) -> bool:
        self._looks += 1
        if self._looks == 10:
            self._patch.setattr(agent_handle, "START", 60)
            self._child = Local(1).start(0, self._launch)
        return self._looks <= 10

    def ended(self) -> str | None:
        return None if self._child is None else self._child.ended()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


@dataclasses.dataclass(frozen=True)
class Queue:
    patch: pytest.MonkeyPatch = dataclasses.field(compare=False)
    hosts: tuple[str, ...] = ("late-1",)
    cores: None = None

    def listen_at(self) -> str:
        return "127.0.0.1"

    def start(self, number: int, launch: Launch) -> Queued:
        return Queued(self.patch, launch)


def test_queued_agent_is_awaited_beyond_the_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_handle, "START", 0.2)  # four polls
    graph = Graph("late")
    result = graph.source(range(3)).map(str, on=pool_of("late", Queue(monkeypatch))).collect()
    assert graph.run()[result] == ["0", "1", "2"]


def test_agent_that_does_not_connect_is_reported_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_handle, "START", 0.2)
    monkeypatch.setattr(Queued, "waits", lambda self: False)
    graph = Graph("late")
    graph.source(range(3)).map(str, on=pool_of("late", Queue(monkeypatch)), restarts=0).collect()
    with pytest.raises(HostError, match=r"did not connect to 127\.0\.0\.1:\d+ within 0\.2 s; .* address="):
        graph.run()


def test_ctrl_c_stops_waiting_for_a_queued_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted start must not leave resources behind."""

    def interrupt(queued: Queued) -> bool:
        queued._looks += 1
        if queued._looks == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return True

    monkeypatch.setattr(Queued, "waits", interrupt)
    graph = Graph("late")
    graph.source(range(3)).map(str, on=pool_of("late", Queue(monkeypatch))).collect()
    with pytest.raises(KeyboardInterrupt):
        graph.run()

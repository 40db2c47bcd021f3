"""Test the handle of one incarnation of an agent, with a script of link events."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_until

from flowchan.hosts import agent_handle
from flowchan.hosts.agent_messages import Echo
from flowchan.hosts.agent_threads import AgentThreads


class BreaksMeanwhile:
    """A link that breaks just before its state is read, while the event for the break follows later."""

    def __init__(self) -> None:
        self.events: Any = iter([(), (), ("broken", "reset by peer"), ()])
        self.polls = 0

    def state(self) -> dict[str, Any]:
        self.polls += 1
        never = {"heard_ago": 0.0, "stuck_for": 0.0, "breaks_in_vain": 0}
        return {"connected": self.polls == 1, **never}

    def wait(self, seconds: float) -> tuple[Any, ...]:
        return next(self.events)  # type: ignore[no-any-return]

    def excuse(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def unconnected_agent(ended: str | None = None, **callbacks: Any) -> Iterator[agent_handle.AgentHandle]:
    """Yield the handle of an agent that a provider has started, and that has not connected.

    ``ended`` is the reason why the agent has ended. ``callbacks`` replace callbacks that do nothing.
    """
    started = SimpleNamespace(ended=lambda: ended, waits=lambda: False, kill=lambda: None, close=lambda: None)
    provider: Any = SimpleNamespace(hosts=("one",), start=lambda *_: started)
    all_callbacks = agent_handle.AgentCallbacks(*[lambda *_: None] * 8)._replace(**callbacks)
    threads = AgentThreads("test", lambda work: work())
    one = agent_handle.AgentHandle(provider, 0, 0, 10.0, all_callbacks, threads)
    one._started = started
    try:
        yield one
    finally:
        one.close(0)
        threads.close()


def test_agent_survives_a_recently_broken_connection():
    """After the break, the agent has ``peer_timeout`` seconds to connect again."""
    with unconnected_agent() as agent:
        agent.link.close()
        agent.link = BreaksMeanwhile()  # type: ignore[assignment]
        agent._give_up_at = 0.0  # the time to start has already expired
        agent.handle_events()
        for _ in range(2):  # the first check sees the break, and the second check its event
            assert agent.check(0.0) is not None
        assert agent.why == ""


def test_agent_that_never_connected_does_not_delay_program_exit():
    """An agent that is still starting has nothing to finish, so Ctrl-C ends the program at once."""
    with unconnected_agent() as agent:
        agent.leave()
        agent.close(math.inf)


def test_command_without_room_does_not_block_its_sender():
    """The thread that receives all agents' reports also sends commands, so no agent may block it."""
    commands = [Echo(number) for number in range(3000)]
    with unconnected_agent() as agent:
        for command in commands:
            agent.send(command)
        assert [agent._commands.get() for _ in commands] == commands


def test_blocked_reports_do_not_delay_fencing():
    """The supervisor may be busy, so the thread that receives reports may have to wait for the supervisor."""
    entered, may_go_on = threading.Event(), threading.Event()

    def ends(_: agent_handle.AgentHandle) -> bool:
        entered.set()
        may_go_on.wait()
        return False

    with unconnected_agent(ended="it has ended", ends=ends) as agent:
        agent._threads.reports.add(agent._ready)
        entered.wait()
        agent._threads.events.add(agent._ready)
        try:
            wait_until(lambda: agent.why == "it has ended", what=lambda: agent.why)
        finally:
            may_go_on.set()


@pytest.mark.parametrize(
    "output", ["", "no orders", "{}", "[1]", '{"secret": 5}', '{"secret": "00", "more": 1}']
)
def test_agent_started_by_hand_explains_how_agents_start(output: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "flowchan.hosts.agent"],
        input=output,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("an agent must be started by a run")
    assert "Traceback" not in ended.stderr

"""Test the handle of one incarnation of an agent, with a script of link events."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flowchan.hosts import agent_handle


class BreaksMeanwhile:
    """A link that breaks just after its state was checked, before the event for the break is read."""

    def __init__(self) -> None:
        self.events: Any = iter([(), ("broken", "reset by peer"), ("closed",)])
        self.polls = 0

    def state(self) -> dict[str, Any]:
        self.polls += 1
        never = {"heard_ago": 0.0, "stuck_for": 0.0, "breaks_in_vain": 0}
        return {"connected": self.polls == 1, **never}

    def wait(self, seconds: float) -> tuple[Any, ...]:
        return next(self.events)  # type: ignore[no-any-return]

    def close(self) -> None:
        pass


def test_agent_survives_a_recently_broken_connection(monkeypatch):
    """After the break, the agent has ``peer_timeout`` seconds to connect again."""
    monkeypatch.setattr(agent_handle, "START", 0.0)  # the time to start has already expired
    started = SimpleNamespace(ended=lambda: None, kill=lambda: None, close=lambda: None)
    provider: Any = SimpleNamespace(hosts=("one",), start=lambda *_: started)
    callbacks = agent_handle.AgentCallbacks(*[lambda *_: None] * 8)
    one = agent_handle.AgentHandle(provider, 0, 0, 10.0, callbacks)
    one.link.close()
    one.link = BreaksMeanwhile()  # type: ignore[assignment]
    try:
        one._watch(None)  # type: ignore[arg-type]
        assert one.why == ""
    finally:
        one.close(0)


def test_agent_that_never_connected_does_not_delay_program_exit():
    """The agent has nothing to finish, so Ctrl-C ends the program at once while agents are starting."""
    started = SimpleNamespace(ended=lambda: None, kill=lambda: None, close=lambda: None)
    provider: Any = SimpleNamespace(hosts=("one",), start=lambda *_: started)
    one = agent_handle.AgentHandle(provider, 0, 0, 10.0, agent_handle.AgentCallbacks(*[lambda *_: None] * 8))
    one._started = started
    one.leave()
    one.close(math.inf)


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

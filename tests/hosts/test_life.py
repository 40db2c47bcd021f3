"""One life of an agent, by what its link says."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flowchan.hosts import agent_handle


class BreaksMeanwhile:
    """A link that is connected when it is looked at and, though no word of it was heard, not any more just
    afterwards. Only after that the word comes."""

    def __init__(self) -> None:
        self.events: Any = iter([(), ("broken", "reset by peer"), ("closed",)])
        self.looks = 0

    def state(self) -> dict[str, Any]:
        self.looks += 1
        return {"connected": self.looks == 1, "heard_ago": 0.0}

    def wait(self, seconds: float) -> tuple[Any, ...]:
        return next(self.events)  # type: ignore[no-any-return]

    def close(self) -> None:
        pass


def test_recent_break_does_not_end_the_agent(monkeypatch):
    """It has its peer_timeout to dial again, from the break on."""
    monkeypatch.setattr(agent_handle, "START", 0.0)  # it is long since it was started
    started = SimpleNamespace(ended=lambda: None, kill=lambda: None, close=lambda: None)
    provider: Any = SimpleNamespace(hosts=("one",), start=lambda *_: started)
    heard = agent_handle.Heard(*[lambda *_: None] * 6)
    one = agent_handle.AgentHandle(provider, 0, 0, 10.0, heard)
    one.link.close()
    one.link = BreaksMeanwhile()  # type: ignore[assignment]
    try:
        one._watch(None)  # type: ignore[arg-type]
        assert one.why == ""
    finally:
        one.close(0)


def test_agent_that_has_not_connected_does_not_delay_the_end():
    """It has nothing to finish: after Ctrl-C while the agents start the program ends at once."""
    started = SimpleNamespace(ended=lambda: None, kill=lambda: None, close=lambda: None)
    provider: Any = SimpleNamespace(hosts=("one",), start=lambda *_: started)
    one = agent_handle.AgentHandle(provider, 0, 0, 10.0, agent_handle.Heard(*[lambda *_: None] * 6))
    one._started = started
    one.leave()
    one.close(math.inf)


@pytest.mark.parametrize(
    "said", ["", "no orders", "{}", "[1]", '{"secret": 5}', '{"secret": "00", "more": 1}']
)
def test_agent_started_by_hand_explains_how_agents_start(said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "flowchan.hosts.agent"],
        input=said,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("an agent gets its orders by its standard input")
    assert "Traceback" not in ended.stderr

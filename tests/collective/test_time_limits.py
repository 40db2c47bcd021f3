"""Test that a timeout covers all steps of a call, and that a call without a timeout never fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.group_members import in_threads, over_hosts, raised

from flowchan.collective import deadline

Calls = Callable[[Any, float], Any]
CALLS: dict[str, Calls] = {
    "gather": lambda g, t: g.gather(np.ones(3), timeout=t),
    "allgather": lambda g, t: g.allgather(np.ones(3).astype(">f8"), timeout=t),
    "alltoall": lambda g, t: g.alltoall([g.rank] * g.size, timeout=t),
    "scatter": lambda g, t: g.scatter([*range(g.size)] if g.rank == 0 else None, timeout=t),
    "split": lambda g, t: g.split(0, timeout=t).close(),
    "sendreceive": lambda g, t: g.sendreceive(1, to=1 - g.rank, source=1 - g.rank, timeout=t),
}
OVER_HOSTS: dict[str, Calls] = CALLS | {
    "allreduce": lambda g, t: g.allreduce(np.ones(3), timeout=t),
    "broadcast": lambda g, t: g.broadcast(np.ones(3), timeout=t),
    "barrier": lambda g, t: g.barrier(timeout=t),
}
STEPS = ("_exchange", "_allgather_into", "_alltoall", "_reduce", "_spread", "send", "receive", "swap")


def steps_of(g: Any, call: Calls) -> list[float]:
    """Return the timeouts that the steps of a call get if the call has 60 seconds."""
    lefts: list[float] = []

    def noting(step: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **more: Any) -> Any:
            lefts.extend(one for one in (*arguments, *more.values()) if isinstance(one, float))
            return step(*arguments, **more)

        return noted

    for one in (g, g._messages, getattr(g, "_node", None), getattr(g, "_links", None)):
        for name in STEPS:
            if hasattr(one, name):
                setattr(one, name, noting(getattr(one, name)))
    call(g, 60.0)
    return lefts


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock with a clock that advances whenever it is read."""
    ticks = itertools.count(0.0, 0.001)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: next(ticks)))


@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize("call", CALLS)
def test_all_steps_of_a_call_share_its_timeout(call: str) -> None:
    shared(in_threads(2, steps_of, CALLS[call]))


@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize("call", OVER_HOSTS)
def test_all_steps_of_a_call_across_hosts_share_its_timeout(call: str) -> None:
    shared(over_hosts(2, steps_of, OVER_HOSTS[call]))


def shared(found: list[Any]) -> None:
    """Check that all steps of each member share one timeout."""
    for lefts in raised(found):
        assert len(lefts) > 1
        assert lefts == sorted(lefts, reverse=True)
        assert lefts[-1] < lefts[0] <= 60


def test_timeout_includes_waiting_for_started_operations(run: Any) -> None:
    def body(g: Any) -> None:
        if g.rank == 0:
            g.receive(1)  # returns after the other member has given up
            g.barrier()
            return
        started = g.barrier(wait=False)
        with pytest.raises(
            TimeoutError, match="operations that were started with wait=False did not finish in"
        ):
            g.allreduce(np.ones(3), timeout=0.01)
        g.send("late", 0)
        started.wait()

    run(2, body)


def test_split_across_hosts_waits_without_a_time_limit() -> None:
    """Only connecting has a time limit; it starts when all members have agreed to connect."""

    def split(g: Any, _: float) -> None:
        g.split(0).close()

    assert raised(over_hosts(2, steps_of, split)) == [[], []]

"""Test deadlock detection over hosts.

If no worker can continue, the run ends with the reason, as on one machine. A remote worker that is working,
or waiting for an item on a slow wire, does not count as stuck.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosted import agents, workers_of
from support.network_proxy import Wire, wired
from support.waiting import wait_until
from support.worker_latch import Gate

from benchmarks.slow_connections import cut
from flowchan import Deadlock, Graph, In, Out, Run, RunError, StageError
from flowchan.hosts import local
from flowchan.hosts.hosts_part import HostsPart
from flowchan.run import supervisor
from flowchan.run.policy import deadlock
from flowchan.run.policy.deadlock import Waits

POOL = local(2)


pytestmark = pytest.mark.usefixtures("no_agent_stays")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Waits]:
    """Record the hosts' reports of waiting workers, and let supervisors poll without a pause."""
    found: list[Waits] = []
    real = HostsPart.waits

    def ask(self: HostsPart, alive: Any) -> Waits | None:
        waits = real(self, alive)
        if waits is not None:
            found.append(waits)
        return waits

    monkeypatch.setattr(HostsPart, "waits", ask)
    monkeypatch.setattr(supervisor, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(deadlock, "STILL", 0.001)
    return found


def same(item: Any) -> Any:
    return item


def deadlock_of(run: Run) -> tuple[StageError, str]:
    with pytest.raises(RunError) as caught:
        run.wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, StageError)
    assert isinstance(error.__cause__, Deadlock)
    return error, str(error.__cause__)


def goes_on(run: Run, looks: list[Waits]) -> bool:
    """Return whether the run still continues after enough polls to detect a deadlock."""
    so_far = len(looks)
    wait_until(lambda: len(looks) > so_far + 10 or run._supervisor.ended.is_set())
    return run.stats().state == "running"


# no worker can continue


def test_branches_on_two_hosts_that_deadlock_are_reported() -> None:
    graph = Graph("stuck")
    left, right = graph.source(range(300_000), on=POOL).tee(2, name="tee", capacity=1)
    left = left.map(same, on=POOL["local-1"], name="left", capacity=1)
    right = right.map(same, on=POOL["local-2"], name="right", capacity=1)
    left.batch(300_000, name="all").zip(right, name="pairs").sink(same, on=POOL)
    error, text = deadlock_of(graph.start())
    assert "no worker can continue" in str(error)
    assert "every worker is waiting, so no item can move on" in text
    assert "stream.buffer(n)" in text
    assert "'tee' waits to put into 'tee.1' (1 of 1)" in text
    assert "'right' on local-2 waits to put into 'right' (1 of 1)" in text
    assert "'pairs' waits for an item from 'all' (0 of 64)" in text


def read_left_only(left: Out[int], right: Out[int]) -> None:
    for number in itertools.count():
        left.put(number)


def ask_right_only(left: In[int], right: In[int], out: Out[int]) -> None:
    for number in right:
        out.put(number)


@pytest.mark.parametrize("questioner", ["local-1", "local-2"])
def test_stages_that_deadlock_on_hosts_are_reported(questioner: str) -> None:
    graph = Graph("stuck")
    left, right = graph.stage(read_left_only, name="giver", on=POOL["local-1"])
    graph.stage(ask_right_only, left, right, name="questioner", on=POOL[questioner]).sink(same)
    _, text = deadlock_of(graph.start())
    assert f"'questioner' on {questioner} waits for an item from 'giver.right' (0 of 64)" in text
    assert "'giver' on local-1 waits to put into 'giver.left' (64 of 64)" in text


def test_deadlock_of_readers_names_put_as_the_remedy() -> None:
    graph = Graph("loop")
    back = graph.feedback()
    out = graph.stage(pass_on, back, on=POOL["local-1"], name="first")
    back.feed(graph.stage(pass_on, out, on=POOL["local-2"], name="second"))
    _, text = deadlock_of(graph.start())
    assert (
        "no stage puts an item; one stage in the loop must put an item before it gets one, or return" in text
    )
    assert "stream.buffer" not in text


def pass_on(numbers: In[int], out: Out[int]) -> None:
    for number in numbers:
        out.put(number)


# a worker can continue


def test_slow_remote_worker_is_not_a_deadlock(looks: list[Waits]) -> None:
    """All other workers wait for this worker or for room."""
    gate = Gate()
    graph = Graph("working")
    result = graph.source(range(500)).map(gate.wait, on=POOL, workers=2).collect()
    run = graph.start()
    gate.wait_held(2)
    assert goes_on(run, looks)
    gate.open()
    assert run.wait()[result] == list(range(500))


def test_one_busy_worker_out_of_two_is_not_a_deadlock(looks: list[Waits]) -> None:
    """The other worker, its link and all local workers wait."""
    gate = Gate()
    graph = Graph("working")
    found: list[int] = []
    remote = graph.source([0]).map(gate.wait, on=POOL, workers=2)
    remote.map(same, on=POOL, workers=2).sink(found.append)
    run = graph.start()
    gate.wait_held(1)
    assert goes_on(run, looks)
    gate.open()
    run.wait()
    assert found == [0]


def sleeps(pid: int) -> bool:
    """Return whether all threads of a process sleep, so that none holds a channel's lock."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(") ")[2].startswith("S") for thread in threads)


def test_stopped_worker_with_an_item_is_not_a_deadlock(looks: list[Waits]) -> None:
    """The stopped worker was woken but cannot run until SIGCONT, while the others wait for it."""
    graph = Graph("stopped")
    numbers = graph.input(capacity=1)
    found: list[int] = []
    numbers.map(same, on=POOL["local-1"], restarts=0).sink(found.append)
    with graph.start() as run:
        run[numbers].put(0)
        wait_until(lambda: found == [0])
        ((worker,),) = map(workers_of, agents())
        wait_until(lambda: sleeps(worker.pid))
        os.kill(worker.pid, signal.SIGSTOP)
        wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
        run[numbers].put(1)
        run[numbers].close()
        assert goes_on(run, looks)
        os.kill(worker.pid, signal.SIGCONT)
    assert found == [0, 1]


def begin(fresh: In[int], back: In[int], out: Out[int], done: Out[int]) -> None:
    """Let each number circulate until it reaches 0."""
    for number in fresh:
        while number:
            out.put(number)
            number = back.get()
        done.put(number)


def test_item_on_a_slow_connection_is_not_a_deadlock(looks: list[Waits]) -> None:
    """The item is in transit most of the time, while all workers wait.

    The supervisor polls the hosts constantly.
    """
    assert round_and_round(Wire(delay=0.02), 20) == [0]
    assert len(looks) > 10
    assert not all(one.moves for one in looks)


def test_broken_connection_is_not_a_deadlock(looks: list[Waits]) -> None:
    def then(run: Run) -> None:
        cut()

    # repeat until a report says that no worker could continue
    while not looks or all(one.moves for one in looks):
        assert round_and_round(Wire(delay=0.005), 60, then) == [0]


def round_and_round(wire: Wire, times: int, then: Any = lambda run: None) -> Any:
    """Send one item over the wire ``times`` times, and call ``then`` each time."""
    with wired(2, wire) as pool:
        graph = Graph("round")
        back = graph.feedback()
        out, done = graph.stage(begin, graph.source([times]), back, on=pool["local-1"], name="begin")
        remote = out.map(lambda number: number - 1, on=pool["local-2"], name="far")

        def pass_by(number: int) -> int:
            then(run)
            return number

        back.feed(remote.map(pass_by, name="here"))
        result = done.collect()
        run = graph.start()
        return run.wait()[result]

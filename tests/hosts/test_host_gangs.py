"""Test gangs over hosts (R11): workers on any hosts become members of one group; the rendezvous is at the
driver.

``allreduce`` also distinguishes workers on different hosts.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gangs import few, in_step, kill_agent, kill_worker, once
from support.waiting import wait_until

from flowchan import Graph, In, MemberDied, Out, Reduced, RunError, worker
from flowchan.collective import Group
from flowchan.hosts import local
from flowchan.hosts.agent_handle import AgentHandle
from flowchan.hosts.agent_messages import Lacking, Recover
from flowchan.hosts.hosts_part import HostsPart
from flowchan.hosts.worker_ports import WorkerPorts
from flowchan.run.policy.events import WorkerId
from flowchan.viz import to_mermaid

ITEMS = 60


pytestmark = pytest.mark.usefixtures("no_agent_stays")


def add(a: int, b: int) -> int:
    return a + b


def test_each_remote_worker_is_a_member_of_one_group() -> None:
    """Members on one host share memory, and hosts are connected.

    This also holds for a subset of a pool's hosts.
    """

    def tell(group: Group, out: Out[tuple[Any, ...]]) -> None:
        me = worker()
        out.put((me.number, group.rank, group.size, group.name, group.allreduce(group.rank), me.host))

    for pool, hosts in ((local(2), 2), (local(2)["local-2"], 1)):
        graph = Graph("gang")
        reported = graph.stage(tell, on=pool, workers=3, name="tell").collect()
        found = sorted(graph.run()[reported])
        assert [one[:5] for one in found] == [(rank + 1, rank, 3, "tell", 3) for rank in range(3)]
        assert len({one[5] for one in found}) == hosts


def summed(numbers: In[int], group: Group, out: Out[int]) -> None:
    """Pass on numbers. The members synchronise after each number, until no member has a number left."""
    for number in numbers:
        group.allreduce_with(number, add)
        out.put(number)
    for _ in group.join(add):
        pass


def test_only_the_dead_workers_items_are_blamed_in_remote_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor itself ends the other workers, so their items are not blamed."""
    recovered: dict[int, bool] = {}
    usual = AgentHandle.send

    def send(self: AgentHandle, message: Any) -> None:
        if isinstance(message, Recover):
            recovered[message.worker.number] = message.blame
        usual(self, message)

    monkeypatch.setattr(AgentHandle, "send", send)

    def die_once(numbers: In[int], group: Group, out: Out[int]) -> None:
        if worker().number == 2 and worker().incarnation == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()  # no member of the first group gets past this barrier
        for number in numbers:
            out.put(number)

    graph = Graph("gang")
    options: dict[str, Any] = {"on": local(1), "workers": 3, "restartable": True}
    result = graph.stage(die_once, graph.source(range(9)), **options).collect()
    assert sorted(graph.run()[result]) == list(range(9))
    assert recovered == {1: False, 2: True, 3: False}


@pytest.mark.parametrize("tls", [False, True], ids=["", "tls"])
def test_gang_workers_that_share_a_stream_end_together(tls: bool) -> None:
    """At the end, no member waits for items that another member still has, on any host."""
    if tls:
        pytest.importorskip("cryptography")
    graph = Graph("gang")
    result = graph.stage(summed, graph.source(range(ITEMS)), on=local(2, tls=tls), workers=4).collect()
    assert sorted(graph.run()[result]) == list(range(ITEMS))


@pytest.mark.parametrize("options", [(), ("restartable",), ("restartable", "elastic")], ids="+".join)
@pytest.mark.parametrize("numbers", [functools.partial(range, 20), itertools.count], ids=["", "endless"])
def test_gang_ends_when_its_readers_are_gone(
    numbers: Callable[[], Iterable[int]], options: tuple[str, ...]
) -> None:
    """The members may notice the end in different rounds.

    Some members find that other members are missing before they learn the reason.
    """
    graph = Graph("gang")
    how: dict[str, Any] = dict.fromkeys(options, True)
    gang = graph.stage(in_step, graph.source(numbers), on=local(2), workers=3, **how)
    graph.stage(few, gang)
    graph.run()


class Mortal:
    """Stage whose first worker dies once ``may`` exists, before it joins the other worker."""

    def __init__(self, may: Path) -> None:
        if worker().number == 1 and not worker().incarnation:
            wait_until(may.exists)
            kill_worker()

    def __call__(self, items: In[int], group: Group, out: Out[int]) -> None:
        in_step(items, group, out)


def test_worker_that_starts_after_a_peer_died_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's host lacks a module and requests it by value.

    Before the module arrives, a peer dies, and the supervisor ends this worker, which has no process yet.
    """
    send, end, may = HostsPart._send_by_value, HostsPart.terminate, tmp_path / "may"
    late: list[tuple[Lacking, WorkerPorts]] = []

    def send_late(crew: HostsPart, reported: Lacking, line: WorkerPorts) -> None:
        if reported.worker.number == 2 and not may.exists():
            late.append((reported, line))
            may.touch()
        else:
            send(crew, reported, line)

    def end_early(crew: HostsPart, id: WorkerId, force: bool) -> None:
        end(crew, id, force)
        send(crew, *late.pop())

    monkeypatch.setattr(HostsPart, "_send_by_value", send_late)
    monkeypatch.setattr(HostsPart, "terminate", end_early)
    graph = Graph("gang")
    gang: dict[str, Any] = {"on": local(2), "workers": 2, "restartable": True}
    result = graph.stage(functools.partial(Mortal, may), graph.source(range(ITEMS)), **gang).collect()
    assert sorted(graph.run()[result]) == list(range(ITEMS))
    assert not late


def test_only_the_original_failure_of_a_gang_is_reported() -> None:
    def fail(group: Group, out: Out[int]) -> None:
        if group.rank == 1:
            raise ValueError("mine")
        group.barrier()

    graph = Graph("gang")
    graph.stage(fail, on=local(2), workers=3, name="fail").collect()
    with pytest.raises(RunError) as caught:
        graph.run()
    assert [type(error.__cause__) for error in caught.value.exceptions] == [ValueError]


class Unfinished:
    """A stage whose second worker raises before it has joined the other workers."""

    def __init__(self) -> None:
        if worker().number == 2:
            raise ValueError("not made")

    def __call__(self, group: Group, out: Out[int]) -> None:
        out.put(group.allreduce(1))


def test_worker_that_fails_before_joining_ends_the_gang() -> None:
    graph = Graph("gang")
    graph.stage(Unfinished, on=local(2), workers=3).collect()
    with pytest.raises(RunError) as caught:
        graph.run()
    assert [str(error.__cause__) for error in caught.value.exceptions] == ["not made"]


@pytest.mark.parametrize("deed", [kill_worker, kill_agent], ids=["worker", "agent"])
def test_death_restarts_the_gang_with_its_current_items(tmp_path: Path, deed: Callable[[], Any]) -> None:
    """Each item has one output, even if its host is lost."""

    def work(numbers: In[int], group: Group, out: Out[int]) -> None:
        for number in numbers:
            if number in (0, 11, 12, 40):
                once(tmp_path, number, deed)
            group.allreduce_with(number, add)
            out.put(number)
        for _ in group.join(add):
            pass

    graph = Graph("gang")
    numbers = graph.source(range(ITEMS), capacity=4)
    result = graph.stage(work, numbers, on=local(2), workers=4, restartable=True, name="work").collect()
    run = graph.start()
    assert Counter(run.wait()[result]) == Counter(range(ITEMS))


def test_worker_that_loses_its_agent_counts_as_dead(tmp_path: Path) -> None:
    """Through its channels, the worker learns that its agent is lost, and ends.

    The worker's peers treat its end as a death, so all workers restart.
    """

    def work(numbers: In[int], group: Group, out: Out[int]) -> None:
        if group.rank == 0:
            once(tmp_path, "lost", lambda: (os.kill(os.getppid(), signal.SIGKILL), list(numbers)))
            (tmp_path / "again").touch()
        group.barrier()
        for number in numbers:
            out.put(number)

    graph = Graph("gang")
    numbers = graph.input()
    result = graph.stage(work, numbers, on=local(2), workers=2, restartable=True, name="work").collect()
    with graph.start() as run:
        wait_until(lambda: (tmp_path / "again").exists() or run.state != "running")
        run[numbers].put(1)
        run[numbers].close()
    assert run.wait()[result] == [1]


def test_worker_that_raises_member_died_restarts_the_gang(tmp_path: Path) -> None:
    """The other members may learn that this worker has ended before they learn of the missing member."""

    def miss() -> None:
        raise MemberDied("one is missing")

    def work(numbers: In[int], group: Group, out: Out[int]) -> None:
        if group.rank == 0:
            once(tmp_path, "missed", miss)
        group.barrier()
        for number in numbers:
            out.put(number)

    graph = Graph("gang")
    result = graph.stage(
        work, graph.source(range(9)), on=local(2), workers=2, restartable=True, name="work"
    ).collect()
    assert sorted(graph.run()[result]) == list(range(9))


def cut(group: Any) -> None:
    """Cut the connections between the hosts."""
    for sock in group._links.sockets.values():
        sock.shutdown(socket.SHUT_RDWR)


def test_broken_connection_between_hosts_restarts_the_gang(tmp_path: Path) -> None:
    """No worker died, but none can continue."""

    def work(numbers: In[int], group: Group, out: Out[int]) -> None:
        for number in numbers:
            if number == 20:
                once(tmp_path, number, lambda: cut(group))
            group.allreduce_with(number, add)
            out.put(number)
        for _ in group.join(add):
            pass

    graph = Graph("gang")
    numbers = graph.source(range(ITEMS))
    result = graph.stage(work, numbers, on=local(2), workers=2, restartable=True, name="work").collect()
    run = graph.start()
    assert Counter(run.wait()[result]) == Counter(range(ITEMS))
    assert next(stage.restarts for stage in run.stats().stages if stage.name == "work") == 1


def some(numbers: Out[int]) -> None:
    """In worker n, put n numbers."""
    me = worker().number
    for k in range(me):
        numbers.put(10 * me + k)


def rounds(stream: Any) -> list[Reduced]:
    result = stream.collect()
    found: list[Reduced] = stream.graph.run()[result]
    return found


def test_each_round_has_one_item_per_remaining_worker() -> None:
    graph = Graph("rounds")
    numbers = graph.stage(some, on=local(2), workers=3)
    reduced = numbers.allreduce("sum")
    assert "each worker" in to_mermaid(graph)
    assert rounds(reduced) == [(10 + 20 + 30, 3, 0), (21 + 31, 2, 1), (32, 1, 2)]


def test_allreduce_combines_all_items_at_capacity_one() -> None:
    """A worker with an item may wait for room that only another worker's next item can free.

    The other worker must get its next item, or learn that the input has ended.
    """
    graph = Graph("shares")
    halves = graph.source(range(1, 301)).map(abs, on=local(2), workers=3, capacity=2)
    found = rounds(halves.allreduce(capacity=1))
    assert [one.round for one in found] == [*range(len(found))]
    assert sum(one.value for one in found) == sum(range(1, 301))
    assert sum(one.contributors for one in found) == 300


@pytest.mark.parametrize("deed", [kill_worker, kill_agent], ids=["worker", "agent"])
def test_allreduce_uses_each_output_in_one_round_despite_deaths(
    tmp_path: Path, deed: Callable[[], Any]
) -> None:
    """Only its replacement gets a dead worker's current items.

    Other workers' channels do not know which outputs were published.
    """

    def work(item: int) -> Iterator[str]:
        for number in range(3):
            if (item, number) in ((0, 0), (7, 1), (30, 2)):
                once(tmp_path, f"{item}.{number}", deed)
            yield f"{item}.{number} "

    graph = Graph("c11")
    numbers = graph.source(range(ITEMS), capacity=4)
    found = rounds(numbers.flat_map(work, on=local(2), workers=3, capacity=4).allreduce("sum", capacity=1))
    given = [output for one in found for output in one.value.split()]
    assert Counter(given) == Counter(f"{item}.{number}" for item in range(ITEMS) for number in range(3))
    assert [one.round for one in found] == list(range(len(found)))

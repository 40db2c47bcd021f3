"""Test R11 for gangs: stages with a function that has a parameter ``group: Group``.

The workers of a gang start together and are the members of one group.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from runs import everywhere
from support.gangs import few, in_step

from flowchan import (
    Channel,
    Closed,
    Graph,
    GraphError,
    In,
    MemberDied,
    MemberLeft,
    Out,
    RunError,
    WorkerDied,
    worker,
)
from flowchan.collective import Group
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.policy.events import WorkerId
from flowchan.run.worker.gang_membership import GangMembership, Memberships
from flowchan.run.worker.opening import Ports


def add(a: int, b: int) -> int:
    return a + b


def summed(numbers: In[int], group: Group, out: Out[tuple[int, int]]) -> None:
    """Put the sums of one item from each worker that has items left, until no worker has any."""
    for number in numbers:
        _, n = group.allreduce_with(number, add)
        out.put((number, n))
    for _ in group.join(add):
        pass


def lonely(numbers: In[int]) -> None: ...


@everywhere
def test_each_worker_is_a_member_of_one_group(on: Any) -> None:
    def tell(group: Group, out: Out[tuple[Any, ...]]) -> None:
        out.put((worker().number, group.rank, group.size, group.name, group.allreduce(group.rank)))

    graph = Graph("gang")
    reported = graph.stage(tell, on=on, workers=3, name="tell").collect()
    assert sorted(graph.run()[reported]) == [(rank + 1, rank, 3, "tell", 3) for rank in range(3)]


@pytest.mark.usefixtures("_method")
def test_gang_starts_under_every_start_method() -> None:
    graph = Graph("gang")
    result = graph.stage(summed, graph.source(range(5)), on="process", workers=2).collect()
    assert sorted(number for number, _ in graph.run()[result]) == list(range(5))


@everywhere
def test_gang_workers_that_share_a_stream_end_together(on: Any) -> None:
    graph = Graph("gang")
    result = graph.stage(summed, graph.source(range(50)), on=on, workers=3).collect()
    assert sorted(number for number, _ in graph.run()[result]) == list(range(50))


@everywhere
@pytest.mark.parametrize("numbers", [functools.partial(range, 20), itertools.count], ids=["", "endless"])
def test_gang_ends_when_its_outputs_have_no_reader(on: Any, numbers: Callable[[], Iterable[int]]) -> None:
    """The workers may notice this in different rounds."""
    for _ in range(5):
        graph = Graph("gang")
        graph.stage(few, graph.stage(in_step, graph.source(numbers), on=on, workers=3))
        graph.run()


def test_only_the_dead_worker_of_a_gang_blames_its_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test R11: the supervisor terminates the other workers, so their items are not blamed."""
    recovered: dict[int, bool] = {}
    usual = RunPorts.recover

    def recover(self: RunPorts, id: WorkerId, blame: bool, alone: bool = False) -> None:
        recovered[id.number] = blame
        usual(self, id, blame, alone)

    monkeypatch.setattr(RunPorts, "recover", recover)

    def die_once(numbers: In[int], group: Group, out: Out[int]) -> None:
        if worker().number == 2 and worker().incarnation == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()  # no member of the first group gets past this barrier
        for number in numbers:
            out.put(number)

    graph = Graph("gang")
    options: dict[str, Any] = {"on": "process", "workers": 3, "restartable": True}
    result = graph.stage(die_once, graph.source(range(9)), **options).collect()
    assert sorted(graph.run()[result]) == list(range(9))
    assert recovered == {1: False, 2: True, 3: False}


@everywhere
def test_only_one_workers_failure_is_reported_for_a_gang(on: Any) -> None:
    def fail(group: Group, out: Out[int]) -> None:
        if group.rank == 1:
            raise ValueError("mine")
        group.barrier()

    graph = Graph("gang")
    graph.stage(fail, on=on, workers=3, name="fail").collect()
    with pytest.raises(RunError) as caught:
        graph.run()
    assert [type(error.__cause__) for error in caught.value.exceptions] == [ValueError]


def test_worker_without_readers_counts_as_dead_for_its_group() -> None:
    """The worker's agent may have died together with all readers, so the worker does not end cleanly."""
    channel: Channel[int] = Channel(1)
    ports = Ports({}, {"out": channel.writer()}, None)
    channel.close()
    first, second = Group._make_all(2, "gang")
    one = GangMembership(WorkerId("gang", 1), Memberships(first), lambda _: None, ports)
    other = threading.Thread(target=one.enter)
    other.start()
    with second:
        other.join()
        with pytest.raises(Closed) as caught:
            ports.outputs["out"].put(1)
        one.close(caught.value)
        with pytest.raises(MemberDied) as missed:
            second.allreduce_with(1, operator.add)
    assert not isinstance(missed.value, MemberLeft)


def test_death_in_a_gang_with_state_ends_the_run() -> None:
    def die(group: Group, out: Out[int]) -> None:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()

    graph = Graph("gang")
    graph.stage(die, on="process", workers=3, name="die").collect()
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert isinstance(error.__cause__, WorkerDied)
    assert "not declared restartable" in str(error)


def test_wrong_declarations_are_refused_with_the_allowed_values() -> None:
    async def late(numbers: In[int], group: Group) -> None: ...

    graph = Graph("wrong")
    graph.stage(late, graph.source([1]), name="late")
    graph.stage(summed, graph.source([1]), group=3, name="given").collect()
    graph.stage(summed, graph.source([1]), elastic=True, name="threads").collect()
    found = {(problem.stage, problem.rule) for problem in graph.check()}
    assert found == {("late", "gang"), ("given", "ports"), ("threads", "gang")}
    with pytest.raises(ValueError, match="elastic=True requires a gang"):
        graph.stage(lonely, graph.source([1]), elastic=True)
    with pytest.raises(GraphError, match="which the run passes"):
        graph.run()

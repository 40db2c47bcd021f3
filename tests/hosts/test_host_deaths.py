"""Test that deaths on hosts do not lose or repeat items, and that the report lists them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosted import agents, wait_ended, workers_of
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, HostError, RunError, RunStats, WorkerDied, worker
from flowchan.hosts import local
from flowchan.hosts.agent_handle import AgentHandle
from flowchan.hosts.host_pool import pool_of
from flowchan.hosts.providers.local import Local
from flowchan.hosts.providers.provider import Launch
from flowchan.run.worker.port_release import PortRelease

ITEMS = 300


pytestmark = pytest.mark.usefixtures("no_agent_stays")


def once(folder: Path, at: int, deed: Callable[[], Any]) -> Callable[[int], int]:
    """Return a function for ``map`` that returns its item, and calls ``deed`` on the first attempt at item
    ``at``."""

    def work(item: int) -> int:
        done = folder / f"{at}"
        if item == at and not done.exists():
            done.touch()
            deed()
        return item

    return work


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_agent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def both(pool: Any, work: Callable[[int], int], **options: Any) -> tuple[Any, RunStats, str]:
    """Return the results of ``work`` over ITEMS items, and the run's statistics and report."""
    graph = Graph("deaths")
    result = graph.source(range(ITEMS)).map(work, on=pool, workers=4, name="work", **options).collect()
    run = graph.start()
    found, report = run.wait()[result], run.report()
    assert f"{ITEMS} = {ITEMS} out" in report
    return found, run.stats(), report


@pytest.mark.parametrize("ordered", [True, False])
def test_killed_worker_is_replaced_on_its_host(tmp_path: Path, ordered: bool) -> None:
    found, stats, _ = both(local(2), once(tmp_path, 50, kill_worker), ordered=ordered)
    assert (found if ordered else sorted(found)) == list(range(ITEMS))
    assert next(stage.restarts for stage in stats.stages if stage.name == "work") == 1
    assert [host.agents for host in stats.hosts] == [1, 1]


@pytest.mark.parametrize("deed", [kill_worker, kill_agent], ids=["worker", "agent"])
def test_worker_killed_after_reporting_its_end_counts_as_ended(deed: Callable[[], Any]) -> None:
    """The worker has already reported that it is done. If its agent dies too, the worker restarts and finds
    no items."""

    def work(item: int) -> int:
        if not worker().incarnation:
            PortRelease.close = lambda self: deed()  # type: ignore[method-assign]
        return item

    graph = Graph("ends")
    result = graph.source(range(ITEMS)).map(work, on=local(1)).collect()
    assert graph.run()[result] == list(range(ITEMS))


@pytest.mark.parametrize("ordered", [True, False])
def test_killed_agent_is_replaced_with_its_workers(tmp_path: Path, ordered: bool) -> None:
    found, stats, report = both(local(2), once(tmp_path, 50, kill_agent), ordered=ordered)
    assert (found if ordered else sorted(found)) == list(range(ITEMS))
    assert sorted(host.agents for host in stats.hosts) == [1, 2]
    (killed,) = (host for host in stats.hosts if host.agents == 2)
    (death,) = killed.deaths
    assert "SIGKILL" in death
    assert f"host {killed.name}: " in report
    assert next(stage.restarts for stage in stats.stages if stage.name == "work") == 0


def test_workers_of_a_killed_agent_die_with_their_agent() -> None:
    gate = Gate()
    graph = Graph("orphans")
    result = graph.source(range(4)).map(gate.wait, on=local(1), workers=3).collect()
    run = graph.start()
    gate.wait_held(3)
    (agent,) = agents()
    workers = workers_of(agent)
    assert len(workers) == 3
    agent.kill()
    wait_ended(agent, *workers)
    gate.wait_held(3)
    gate.open()
    assert run.wait()[result] == [0, 1, 2, 3]


def test_dead_agents_are_released_during_the_run() -> None:
    """The link of a dead agent holds descriptors, which a run of several days must not keep."""

    def lives() -> int:
        gc.collect()
        return sum(isinstance(one, AgentHandle) for one in gc.get_objects())

    gate, kills = Gate(), 4
    graph = Graph("lasting")
    # With a lower max_deaths, an item that many dying workers have held would count as failed.
    result = graph.source(range(2)).map(gate.wait, on=local(1), max_deaths=kills + 1).collect()
    run = graph.start()

    def is_at_work(agent: int) -> bool:
        (host,) = run.stats().hosts or (None,)
        return host is not None and (host.agents, host.state) == (agent, "connected") and len(agents()) == 1

    for number in range(1, kills + 1):
        wait_until(lambda number=number: is_at_work(number))
        gate.wait_held(1)
        agents()[0].kill()
    wait_until(lambda: lives() <= 2, what=lives)
    gate.open()
    assert run.wait()[result] == [0, 1]


@dataclass(frozen=True)
class StartsOnce(Local):
    """A provider whose hosts start one agent each and then refuse."""

    folder: Path = Path()

    def start(self, number: int, launch: Launch) -> Any:
        mark = self.folder / self.hosts[number]
        if mark.exists():
            raise HostError("no other agent can start", self.hosts[number])
        mark.touch()
        return super().start(number, launch)


def test_workers_move_to_another_host_when_their_own_is_lost(tmp_path: Path) -> None:
    found, stats, report = both(pool_of("test", StartsOnce(2, tmp_path)), once(tmp_path, 50, kill_agent))
    assert found == list(range(ITEMS))
    assert [host.state for host in stats.hosts].count("ended") == 1
    assert "no other agent can start" in report


def test_run_that_lost_all_hosts_ends_with_the_reason(tmp_path: Path) -> None:
    def work(item: int) -> int:
        if item == 5:
            kill_agent()
        return item

    with pytest.raises(RunError) as caught:
        both(pool_of("test", StartsOnce(1, tmp_path)), work)
    assert "no host is left for worker" in str(caught.value.exceptions[0])
    assert "no other agent can start" in str(caught.value.exceptions[0])


def test_stage_without_restarts_fails_when_its_agent_is_killed() -> None:
    graph = Graph("unique")
    graph.source(range(9)).map(lambda _: kill_agent(), on=local(1), restarts=0, name="work").sink(abs)
    with pytest.raises(RunError) as caught:
        graph.run()
    error = caught.value.exceptions[0]
    assert isinstance(error.__cause__, WorkerDied)
    assert "local-1" in str(error)
    assert "restarts were used" in str(error)


def test_worker_that_dies_on_every_try_ends_the_run() -> None:
    graph = Graph("poison")
    graph.source(range(9)).map(lambda _: kill_worker(), on=local(1), restarts=1, name="work").sink(abs)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert "killed by SIGKILL" in str(caught.value.exceptions[0])
    assert "local-1" in str(caught.value.exceptions[0])


def test_item_that_kills_its_workers_is_blamed() -> None:
    def work(item: int) -> int:
        if item == 3:
            kill_worker()
        return item

    graph = Graph("blamed")
    done = graph.source(range(9)).map(work, on=local(1), max_deaths=2, name="work")
    errors, good = done.errors.collect(), done.collect()
    found = graph.run()
    assert found[good] == [0, 1, 2, 4, 5, 6, 7, 8]
    (failed,) = found[errors]
    assert failed.item == 3
    assert isinstance(failed.error, WorkerDied)


def test_silent_agent_is_fenced_and_replaced(tmp_path: Path) -> None:
    """The agent is stopped with a signal, so its connection stays open."""

    def stop_agent() -> None:
        os.kill(os.getppid(), signal.SIGSTOP)
        signal.pause()

    found, stats, _ = both(local(2, peer_timeout=1), once(tmp_path, 50, stop_agent))
    assert found == list(range(ITEMS))
    (death,) = (death for host in stats.hosts for death in host.deaths)
    assert "it sent nothing" in death


def test_restartable_source_resumes_after_its_published_items(tmp_path: Path) -> None:
    def numbers() -> Iterator[int]:
        for number in range(ITEMS):
            yield number
            if number == 200:
                once(tmp_path, 200, kill_agent)(200)

    graph = Graph("source")
    result = graph.source(numbers, on=local(1), restartable=True).collect()
    assert graph.run()[result] == list(range(ITEMS))


@pytest.mark.parametrize("deed", [kill_worker, kill_agent], ids=["worker", "agent"])
def test_published_outputs_of_a_retried_item_are_not_repeated(
    tmp_path: Path, deed: Callable[[], Any]
) -> None:
    def work(item: int) -> Iterator[tuple[int, int]]:
        for number in range(item % 7):
            if number == 4:
                once(tmp_path, 60, deed)(item)
            yield item, number

    graph = Graph("many")
    result = graph.source(range(120)).flat_map(work, on=local(2), workers=3).collect()
    assert graph.run()[result] == [(item, number) for item in range(120) for number in range(item % 7)]

"""Test that a run over hosts releases all agents, workers and other resources, no matter how it ends."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosted import agents, wait_ended, workers_of
from support.scripts import script, start
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, HostError, In, Out, RunError
from flowchan.hosts import hosts_part, local
from flowchan.hosts.host_pool import pool_of
from flowchan.hosts.providers.local import Local
from flowchan.hosts.providers.provider import Launch
from flowchan.transport import versions


@pytest.fixture(autouse=True)
def all_ended() -> Iterator[list[psutil.Process]]:
    """Yield a list of processes, and check after the test that all of them have ended."""
    seen: list[psutil.Process] = []
    yield seen
    assert not agents()
    wait_ended(*seen)


def all_processes() -> list[psutil.Process]:
    return [one for agent in agents() for one in (agent, *workers_of(agent))]


def test_stop_finishes_items_in_flight_on_hosts() -> None:
    given = []

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            given.append(number)
            yield number

    graph = Graph("stopped")
    result = graph.source(numbers).map(abs, on=local(2), workers=2, name="far").collect()
    run = graph.start()
    wait_until(lambda: run._ports.channels["far"].stats().items_in > 10)
    run.stop()
    found = run.wait()[result]
    assert found == given[: len(found)]
    assert len(given) - len(found) <= 1  # one fork server, two agents and two workers
    assert run.stats().state == "stopped"


def test_abort_ends_workers_that_would_run_forever(all_ended: list[psutil.Process]) -> None:
    gate = Gate()
    graph = Graph("aborted")
    graph.source(itertools.count).map(gate.wait, on=local(2), workers=2).sink(abs)
    run = graph.start()
    gate.wait_held(2)
    all_ended += all_processes()
    assert len(all_ended) == 4
    run.abort()
    run.wait()
    assert run.stats().state == "aborted"


def test_exception_in_the_with_block_ends_all_processes(all_ended: list[psutil.Process]) -> None:
    gate = Gate()
    graph = Graph("left")
    graph.source(itertools.count).map(gate.wait, on=local(2), workers=2).sink(abs)

    def meanwhile() -> None:
        gate.wait_held(2)
        all_ended.extend(all_processes())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), graph.start():
        meanwhile()


def test_failure_on_this_host_ends_remote_workers(all_ended: list[psutil.Process]) -> None:
    gate = Gate()

    def fail(_: int) -> None:
        gate.wait_held(2)
        all_ended.extend(all_processes())
        raise ValueError("here")

    graph = Graph("failed")
    first, second = graph.source(range(9)).tee(2)
    first.map(gate.wait, on=local(2), workers=2).sink(abs)
    second.sink(fail)
    with pytest.raises(RunError, match="failed"):
        graph.run()


def test_stage_on_hosts_ends_when_its_readers_stop() -> None:
    graph = Graph("enough")
    result = graph.source(itertools.count).map(abs, on=local(2), workers=2).take(5).collect()
    run = graph.start()
    assert run.wait()[result] == [0, 1, 2, 3, 4]
    assert "MISSING" not in run.report()
    assert [host.breaks for host in run.stats().hosts] == [0, 0]


def test_stage_that_returns_early_ends_earlier_stages() -> None:
    def three(numbers: In[int], out: Out[int]) -> None:
        for _ in range(3):
            out.put(numbers.get())

    graph = Graph("three")
    numbers = graph.source(itertools.count)
    result = graph.stage(three, numbers, on=local(1), name="three").collect()
    assert graph.run()[result] == [0, 1, 2]


@pytest.mark.parametrize("whose", ["out", "numbers"])
def test_channel_aborted_by_a_worker_ends_the_run(whose: str) -> None:
    def abort(numbers: In[int], out: Out[int]) -> None:
        for number in numbers:
            if number == 3:
                {"out": out, "numbers": numbers}[whose].channel.abort(OSError("the disk is gone"))
            out.put(number)

    graph = Graph("aborting")
    graph.stage(abort, graph.source(itertools.count), on=local(1), name="abort").sink(abs)
    with pytest.raises(RunError) as caught:
        graph.run()
    error = caught.value.exceptions[0]
    assert "the disk is gone" in str(error)
    assert "local-1" in str(error)


def test_ctrl_c_stops_the_run_and_returns_finished_results(
    tmp_path: Path, all_ended: list[psutil.Process]
) -> None:
    text = """
        import itertools, os, pathlib, sys
        from flowchan import Graph, Interrupted
        from flowchan.hosts import local

        folder = pathlib.Path(sys.argv[1])

        def show(item):
            if item == 100:
                (folder / "going").touch()
            return item

        graph = Graph("interrupted")
        result = graph.source(itertools.count).map(show, on=local(2), workers=2).collect()
        try:
            graph.run()
        except Interrupted as interrupt:
            found = interrupt.results[result]
            print(found == list(range(len(found))) and len(found) > 100)
    """
    with start(script(tmp_path, text), tmp_path) as process:
        wait_until((tmp_path / "going").exists)
        all_ended += psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (out, process.returncode) == ("True\n", 0), err
    assert err.count("flowchan: stopping") == 1


def test_agents_end_when_the_driver_is_killed(tmp_path: Path, all_ended: list[psutil.Process]) -> None:
    text = """
        import itertools, os, pathlib, sys, threading
        from flowchan import Graph
        from flowchan.hosts import local

        folder = pathlib.Path(sys.argv[1])

        def hold(item):
            (folder / f"held {os.getpid()}").touch()
            threading.Event().wait()

        graph = Graph("killed")
        graph.source(itertools.count).map(hold, on=local(2), workers=2).sink(abs)
        graph.run()
    """
    with start(script(tmp_path, text), tmp_path) as process:
        wait_until(lambda: len([*tmp_path.glob("held *")]) == 2)
        all_ended += psutil.Process(process.pid).children(recursive=True)
        assert len(all_ended) == 5  # one fork server, two agents, two workers
        process.kill()


def test_version_mismatch_is_reported_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "versions", lambda: {"python": "3.99", "flowchan": "0.0.1"})
    graph = Graph("mismatched")
    graph.source([1]).map(abs, on=local(1)).sink(abs)
    with pytest.raises(HostError) as caught:
        graph.run()
    assert caught.value.host == "local-1"
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in str(caught.value)
    assert "Python 3.99 and flowchan 0.0.1" in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Faulty(Local):
    """A provider whose agents end at once."""

    def start(self, number: int, launch: Launch) -> Any:
        return super().start(number, Launch(("-c", "raise SystemExit(7)"), launch.stdin))


def test_unusable_host_is_reported_at_the_start() -> None:
    graph = Graph("unusable")
    graph.source(itertools.count).map(abs, on=pool_of("test", Faulty(2))).sink(abs)
    with pytest.raises(HostError, match=r"host 'local-1' can't be used: .*code 7") as caught:
        graph.run()
    assert caught.value.host == "local-1"


@dataclass(frozen=True)
class Refusing(Local):
    """A provider that cannot start an agent."""

    def start(self, number: int, launch: Launch) -> Any:
        raise HostError("the program that starts agents is not installed here", self.hosts[number])


def test_provider_that_cannot_start_agents_is_reported_at_the_start() -> None:
    graph = Graph("unusable")
    graph.source(itertools.count).map(abs, on=pool_of("test", Refusing(2))).sink(abs)
    with pytest.raises(HostError, match="not installed here"):
        graph.run()


def test_remote_worker_finishes_its_threads_after_the_run(tmp_path: Path) -> None:
    """The end of the run does not kill the worker: like a local worker, it may finish its threads."""

    def at_the_end() -> None:
        threading.main_thread().join()
        (tmp_path / "done").write_text(str(sum(range(5_000_000))))

    def work(item: int) -> int:
        threading.Thread(target=at_the_end).start()
        return item

    graph = Graph("finishing")
    result = graph.source([1]).map(work, on=local(1)).collect()
    assert graph.run()[result] == [1]
    assert (tmp_path / "done").read_text()


def filled(size: int) -> bytes:
    return bytes(size)


def test_output_larger_than_the_drivers_memory_fails_in_its_stage() -> None:
    graph = Graph("large")
    graph.source([5_000_000]).map(filled, on=local(1), name="far").sink(len)
    with pytest.raises(RunError) as caught:
        graph.run(memory=4_000_000)
    message = str(caught.value.exceptions[0].__cause__ or caught.value.exceptions[0])
    assert "'far'" in message
    assert "item must have at most max_bytes=4000000" in message


def test_item_larger_than_the_hosts_memory_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the agents' limit on the size of an item
    monkeypatch.setattr(hosts_part, "most_bytes", lambda: 1_000_000)
    graph = Graph("large")
    graph.source([b"", bytes(2_000_000)]).map(len, on=local(1)).sink(abs)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert "half of the memory of host 'local-1', got 2" in str(caught.value.exceptions[0])

"""Test how workers are assigned to hosts: round-robin by cores, by hand, and by calibrated speeds."""

from __future__ import annotations

import functools
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.waiting import WAIT_LIMIT_S

from flowchan import Graph, HostError, hosts, pipelines, worker
from flowchan.hosts import capacity, core_speed
from flowchan.hosts.host_pool import Pool, pool_of
from flowchan.hosts.providers import local as local_provider
from flowchan.hosts.providers.local import Local
from flowchan.hosts.providers.provider import Launch
from flowchan.hosts.providers.slurm import slurm
from flowchan.run.policy.plan import plan

THREE = hosts.ssh({"a": 8, "b": 16, "c": 4})


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the cores and speeds that other tests have recorded."""
    monkeypatch.setattr(capacity, "_reported", {})
    monkeypatch.setattr(capacity, "_speeds", {})


def counts(pool: Pool, workers: int) -> list[int]:
    dealt = pool.dealt(workers)
    assert len(dealt) == workers
    return [dealt.count(host) for host in pool.hosts]


def planned(pool: Pool, workers: int) -> list[int]:
    """Return how many workers of one stage each host of a pool gets."""
    graph = Graph("dealt")
    graph.source(range(3)).map(abs, on=pool, workers=workers).sink(abs)
    names = [one.host for one in plan(graph, 0, 0).workers if one.host]
    return [names.count(host) for host in pool.hosts]


# --- cores ---


def test_dealt_takes_turns_until_all_cores_are_used(caplog: pytest.LogCaptureFixture) -> None:
    """Check the example of lua---parallel's ``sfork``: 16 workers on hosts with 8, 16 and 4 cores."""
    assert THREE.dealt(7) == ("a", "b", "c", "a", "b", "c", "a")
    assert counts(THREE, 16) == [6, 6, 4]
    assert counts(THREE, 28) == [8, 16, 4]
    assert not caplog.records


def test_dealt_warns_once_and_continues_beyond_the_cores(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flowchan.hosts"):
        dealt = THREE.dealt(33)
    assert dealt[28:] == ("a", "b", "c", "a", "b")
    assert [record.getMessage() for record in caplog.records] == [
        "ssh({'a': 8, 'b': 16, 'c': 4}) has 28 cores in total, but gets 33 workers; the workers share cores"
    ]


def test_dealt_uses_the_selected_hosts_and_their_shares() -> None:
    assert THREE["c", "a"].dealt(3) == ("c", "a", "c")
    assert counts(THREE[{"a": 1, "b": 3}], 8) == [2, 6]


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (1.0, TypeError), (True, TypeError)])
def test_dealt_refuses_an_invalid_count(count: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="count must be"):
        THREE.dealt(count)


def test_local_agents_divide_the_cores_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_provider, "local_cores", lambda: 8)
    assert counts(hosts.local(3), 8) == [3, 3, 2]
    monkeypatch.setattr(local_provider, "local_cores", lambda: 1)
    assert Local(3).cores == (1, 1, 1)


def test_ray_agents_have_the_cores_that_they_reserve() -> None:
    assert counts(hosts.ray(2), 2) == [1, 1]
    assert hosts.ray(2, resources={"CPU": 4.5}).provider.cores == (4, 4)
    assert hosts.ray(2, resources={"CPU": 0.5}).provider.cores == (1, 1)


@pytest.mark.parametrize(
    ("listed", "cores"),
    [
        ("8(x2),4", (8, 8, 4)), ("16,8(x2)", (16, 8, 8)), ("4(x3)", (4, 4, 4)),
        ("4(x2)", None), ("", None), ("none", None), ("4(x3),", None),
    ],
)  # fmt: skip
def test_slurm_knows_the_cores_of_each_node(
    monkeypatch: pytest.MonkeyPatch, listed: str, cores: tuple[int, ...] | None
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", listed)
    monkeypatch.setattr("flowchan.hosts.providers.slurm._names", lambda nodes: ("n1", "n2", "n3"))
    assert slurm().cores == cores


def test_dealt_raises_with_a_remedy_without_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for call in (lambda: hosts.slurm().dealt(2), hosts.slurm().calibrate):
        with pytest.raises(HostError, match="start it with 'sbatch' or within 'salloc'"):
            call()


# --- hosts that report their cores ---


@dataclass(frozen=True)
class Asked(Local):
    """Provider that does not know the cores of its hosts.

    ``programs`` replaces the probes of some hosts. Each start of an agent or probe adds a line to the file
    ``starts``.
    """

    folder: Path = Path()
    programs: tuple[tuple[int, str], ...] = ()

    @property
    def cores(self) -> None:  # type: ignore[override]
        return None

    def starts(self) -> list[str]:
        file = self.folder / "starts"
        return file.read_text().split() if file.exists() else []

    def start(self, number: int, launch: Launch) -> Any:
        with open(self.folder / "starts", "a") as file:
            file.write(f"{self.hosts[number]}\n")
        program = dict(self.programs).get(number)
        if program is not None and launch.arguments[-1].endswith("probe"):
            launch = Launch(("-c", program), launch.stdin)
        return super().start(number, launch)


PROBE = """
from flowchan.hosts import probe
probe.local_cores = lambda: {cores}
probe.rounds_per_core = lambda cores: {rate} if cores == {cores} else 0.0
probe.main()
"""


def asked(folder: Path, *hosts: tuple[int, float]) -> Pool:
    """Return a pool whose hosts report these cores and rates."""
    programs = tuple(
        (number, PROBE.format(cores=cores, rate=rate)) for number, (cores, rate) in enumerate(hosts)
    )
    return pool_of("asked", Asked(len(hosts), folder, programs))


def test_dealt_asks_each_host_once_for_its_cores(tmp_path: Path) -> None:
    pool = asked(tmp_path, (8, 1.0), (16, 1.0), (4, 1.0))
    assert counts(pool["local-1", "local-3"], 6) == [3, 3]
    assert counts(pool, 16) == [6, 6, 4]
    assert counts(pool, 16) == [6, 6, 4]
    assert sorted(pool.provider.starts()) == ["local-1", "local-2", "local-3"]  # type: ignore[attr-defined]


def test_dealt_uses_the_cores_that_agents_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of("asked", Asked(1, tmp_path))
    graph = Graph("reported")
    result = graph.source([1]).map(abs, on=pool).collect()
    assert graph.run()[result] == [1]
    assert capacity.known_cores(pool.provider) == {"local-1": len(os.sched_getaffinity(0))}
    pool.dealt(2)
    assert pool.provider.starts() == ["local-1"]  # type: ignore[attr-defined]


def test_dealt_names_a_host_that_cannot_report_its_cores(tmp_path: Path) -> None:
    pool = pool_of("asked", Asked(2, tmp_path, ((1, "raise SystemExit(7)"),)))
    with pytest.raises(HostError, match="the agent local-2 exited with code 7") as raised:
        pool.dealt(2)
    assert raised.value.host == "local-2"


# --- hosts chosen by hand ---


def test_each_worker_runs_on_its_assigned_host() -> None:
    pool = hosts.local(3)
    chosen = ["local-3", "local-1", "local-1", "local-2"]

    def where(barrier: Any, number: int) -> tuple[int, str]:
        barrier.wait()  # all calls overlap, so no worker can run two of them
        return worker().number, worker().host

    barrier = pipelines.Barrier(4, across="hosts")
    found = dict(pipelines.map(4, where, barrier, on=pool.assigned(chosen)).join())
    assert found == dict(enumerate(chosen, 1))


def test_assigned_hosts_repeat_for_additional_workers() -> None:
    pool = hosts.local(3).assigned(["local-3", "local-3", "local-1"])
    assert planned(pool, 7) == [2, 0, 5]
    assert pool.dealt(4) == ("local-3", "local-3", "local-1", "local-3")
    assert pool.hosts == ("local-1", "local-2", "local-3")
    assert pickle.loads(pickle.dumps(pool)) == pool != hosts.local(3)


def test_assigned_hosts_of_different_stages_are_independent() -> None:
    pool = hosts.local(2)
    graph = Graph("two")
    first = graph.source(range(3)).map(abs, on=pool.assigned(["local-1"]), workers=2, name="first")
    first.map(abs, on=pool.assigned(["local-2", "local-1"]), workers=2, name="second").sink(abs)
    found = [(one.id.stage, one.host) for one in plan(graph, 0, 0).workers if one.host]
    assert found == [
        ("first", "local-1"), ("first", "local-1"), ("second", "local-2"), ("second", "local-1"),
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [[], ["local-1", "gpu1"]])
def test_assigned_host_must_belong_to_the_pool(wrong: list[str]) -> None:
    with pytest.raises(KeyError, match="its hosts are local-1, local-2"):
        hosts.local(2).assigned(wrong)


@pytest.mark.parametrize("wrong", [{"local-1": 3}, "local-1", None, 2])
def test_assigned_refuses_values_that_are_not_lists(wrong: Any) -> None:
    with pytest.raises(TypeError, match="hosts must be a list of names, one for each worker"):
        hosts.local(2).assigned(wrong)


# --- speeds ---


def test_calibrate_returns_speeds_relative_to_the_fastest_host(tmp_path: Path) -> None:
    pool = asked(tmp_path, (8, 50.0), (8, 100.0), (4, 33.3), (4, 0.1))
    assert pool.speeds == {}
    speeds = {"local-1": 0.5, "local-2": 1.0, "local-3": 0.33, "local-4": 0.01}
    assert pool.calibrate() == speeds
    assert pool.speeds == speeds
    assert asked(tmp_path, (8, 50.0), (8, 100.0), (4, 33.3), (4, 0.1))["local-3"].speeds == {"local-3": 0.33}
    assert pool_of("asked", Asked(4, tmp_path)).speeds == {}  # a different provider


def test_calibrated_stage_gets_workers_by_cores_and_speed(tmp_path: Path) -> None:
    pool = asked(tmp_path, (8, 50.0), (8, 100.0), (4, 100.0))
    assert planned(pool, 9) == [3, 3, 3]
    pool.calibrate()
    assert planned(pool, 16) == [4, 8, 4]
    assert planned(pool[{"local-1": 1, "local-2": 1}], 16) == [8, 8]  # shares override speeds


def test_calibrated_slow_host_gets_a_worker_every_second_turn(tmp_path: Path) -> None:
    pool = asked(tmp_path, (8, 50.0), (8, 100.0))
    pool.calibrate()
    assert pool.dealt(6) == ("local-2", "local-1", "local-2", "local-2", "local-1", "local-2")
    assert counts(pool, 12) == [4, 8]
    assert counts(pool, 16) == [8, 8]


def test_calibrate_measures_all_local_agents_at_once() -> None:
    speeds = hosts.local(2).calibrate()
    assert list(speeds) == ["local-1", "local-2"]
    assert max(speeds.values()) == 1.0
    assert min(speeds.values()) > 0


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(7)", "the agent local-2 exited with code 7"),
        (
            PROBE.replace("if cores", "if __import__('os')._exit(0)").format(cores=1, rate=1.0),
            "local-2 did not answer during the measurement",
        ),
    ],
    ids=["ends", "ends later"],
)
def test_calibrate_names_a_host_that_does_not_answer(tmp_path: Path, program: str, message: str) -> None:
    """The pool keeps the speeds of earlier calibrations."""
    good = PROBE.format(cores=1, rate=1.0)
    pool = pool_of("asked", Asked(2, tmp_path, ((0, good), (1, program))))
    capacity.keep_speeds(pool.provider, {"local-1": 1.0, "local-2": 0.5})
    with pytest.raises(HostError, match=message) as raised:
        pool.calibrate(timeout=WAIT_LIMIT_S)
    assert raised.value.host == "local-2"
    assert pool.speeds == {"local-1": 1.0, "local-2": 0.5}


def test_calibrate_gives_up_after_its_timeout(tmp_path: Path) -> None:
    silent = "import signal; signal.pause()"
    pool = pool_of("asked", Asked(1, tmp_path, ((0, silent),)))
    with pytest.raises(HostError, match=r"local-1 did not connect to 127\.0\.0\.1:\d+ within 0.5 s"):
        pool.calibrate(timeout=0.5)


@pytest.mark.parametrize(("timeout", "error"), [(0, ValueError), ("3", TypeError)])
def test_calibrate_refuses_an_invalid_timeout(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"local\(1\)\.calibrate: timeout must be"):
        hosts.local(1).calibrate(timeout=timeout)


def test_benchmark_keeps_each_core_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process does some work, and all of them have exited afterwards."""

    def note(then: Callable[[], int]) -> int:
        (tmp_path / f"{os.getpid()}").touch()
        return then()

    monkeypatch.setattr(core_speed, "one_round", functools.partial(note, core_speed.one_round))
    assert core_speed.rounds_per_core(3, interval=0.1) > 0
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert list(running(pids)) == []


def running(pids: list[int]) -> Iterator[int]:
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            yield pid

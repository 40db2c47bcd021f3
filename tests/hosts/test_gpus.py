"""Test that each worker of a stage with ``gpus=n`` has exclusive use of n GPUs on its machine."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.worker_latch import Gate

from flowchan import Graph, HostError, RunError, worker
from flowchan.hosts import local
from flowchan.run.policy.events import WorkerId
from flowchan.run.worker.gpus import Gpus, present

pytestmark = pytest.mark.usefixtures("no_agent_stays")


@pytest.fixture(autouse=True)
def _three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow this program and its children to use three devices."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,7")


def seen(_: Any = None) -> tuple[str, int, str]:
    info = worker()
    return info.host, info.number, os.environ["CUDA_VISIBLE_DEVICES"]


everywhere = pytest.mark.parametrize("on", ["process", local(1)], ids=str)


@everywhere
def test_each_worker_sees_its_own_devices(on: Any) -> None:
    gate = Gate()

    def held(_: int) -> tuple[str, int, str]:
        gate.wait()
        return seen()

    graph = Graph("gpus")
    first = graph.source(range(2)).map(held, on=on, workers=2, gpus=1)
    other = graph.source(range(2), name="others").map(seen, on=on, gpus=1, name="second")
    none = graph.source(range(2), name="rest").map(seen, on=on, name="none")
    results = first.collect(), other.collect(), none.collect()
    run = graph.start()
    gate.wait_held(2)
    gate.open()
    found = run.wait()
    devices = sorted(device for _, _, device in (*found[results[0]], found[results[1]][0]))
    assert devices == ["4", "5", "7"]
    assert {device for _, _, device in found[results[2]]} == {"4, 5,7"}


def test_gpus_of_a_worker_are_counted_per_host() -> None:
    graph = Graph("gpus")
    found = graph.source(range(100)).map(seen, on=local(2), workers=2, gpus=2).collect()
    workers = {worker: (host, devices) for host, worker, devices in graph.run()[found]}
    assert set(workers.values()) <= {("local-1", "4,5"), ("local-2", "4,5")}
    assert len(set(workers.values())) == len(workers)


@everywhere
def test_replacement_gets_the_devices_of_the_dead_worker(on: Any, tmp_path: Path) -> None:
    def once(item: int) -> tuple[str, int, str]:
        if item == 3 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return seen()

    graph = Graph("gpus")
    found = graph.source(range(8)).map(once, on=on, gpus=3).collect()
    assert {device for _, _, device in graph.run()[found]} == {"4,5,7"}


@everywhere
def test_workers_share_a_gpu(on: Any) -> None:
    gate = Gate()

    def held(_: int) -> tuple[str, int, str]:
        gate.wait()
        return seen()

    graph = Graph("shares")
    whole = graph.source(range(1), name="whole").map(held, on=on, gpus=1, name="one").collect()
    halves = graph.source(range(4)).map(held, on=on, workers=4, gpus=0.5, name="half").collect()
    run = graph.start()
    gate.wait_held(5)
    gate.open()
    found = run.wait()
    assert sorted(device for _, _, device in (*found[whole], *found[halves])) == ["4", "5", "5", "7", "7"]


@pytest.mark.parametrize("share", [0.1, 1 / 3, 0.5, 0.7])
def test_shares_fill_a_gpu_before_the_next(share: float) -> None:
    gpus, each = Gpus(), int(1 / share + 1e-6)
    ids = [WorkerId("far", number) for number in range(3 * each)]
    assert [gpus.take(id, share) for id in ids] == ["4"] * each + ["5"] * each + ["7"] * each
    left = f"{round(1 - each * share, 6):g}"
    message = f"99 needs {share:g} of a GPU, but only {left} of a GPU on this host is free"
    with pytest.raises(HostError, match=message):
        gpus.take(WorkerId("far", 99), share)
    for id in ids[each : 2 * each]:
        assert gpus.take(id, share) == "5"
        gpus.give_back(id)
    assert gpus.take(WorkerId("far", 99), 1) == "5"


def test_whole_gpu_is_not_taken_from_sharers() -> None:
    gpus = Gpus()
    assert [gpus.take(WorkerId("far", number), 0.5) for number in range(1)] == ["4"]
    assert gpus.take(WorkerId("near", 0), 2) == "5,7"
    with pytest.raises(HostError, match=r"near 1 needs 1 GPU, but only 0 of 3 GPUs on this host are free"):
        gpus.take(WorkerId("near", 1), 1)


@pytest.mark.parametrize("gpus", [1.5, 1.0, 0.0, -0.5, float("nan")])
def test_share_of_a_gpu_must_be_between_0_and_1(gpus: float) -> None:
    message = rf"map: gpus must be an int of at least 0, or a share between 0 and 1, got {gpus}"
    with pytest.raises(ValueError, match=message):
        Graph("gpus").source(range(8)).map(seen, on="process", gpus=gpus)


def test_machine_with_insufficient_gpus_is_reported_on_one_line() -> None:
    graph = Graph("gpus")
    graph.source(range(8)).map(seen, on="process", workers=2, gpus=2, name="far").sink(print)
    with pytest.raises(
        HostError, match=r"worker far 2 needs 2 GPUs, but only 1 of 3 GPUs on this host are free"
    ):
        graph.run()


def test_host_with_insufficient_gpus_is_named() -> None:
    graph = Graph("gpus")
    graph.source(range(8)).map(seen, on=local(2), workers=7, gpus=1, name="far").sink(print)
    with pytest.raises(RunError) as caught:
        graph.run()
    for error in caught.value.exceptions:  # either host may be the one with too many workers
        assert re.search("host 'local-[12]'", str(error))
        assert re.search(
            "worker far [1-7] needs 1 GPU, but only 0 of 3 GPUs on this host are free", str(error)
        )


def test_threads_share_the_devices_of_the_program() -> None:
    graph = Graph("gpus")
    with pytest.raises(ValueError, match="map: gpus=1 requires on='process' or a pool"):
        graph.source(range(8)).map(seen, gpus=1)
    with pytest.raises(ValueError, match="gpus must be at least 0, got -1"):
        graph.source(range(8)).map(seen, on="process", gpus=-1)


@pytest.mark.parametrize(
    ("listed", "those"), [("", []), ("-1", []), ("0,-1,2", ["0"]), ("GPU-1a,GPU-b", ["GPU-1a", "GPU-b"])]
)
def test_visible_gpus_come_from_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, listed: str, those: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert present() == those


def test_visible_gpus_come_from_nvidia_smi_without_environment_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert present() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-one\necho GPU-two\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert present() == ["GPU-one", "GPU-two"]

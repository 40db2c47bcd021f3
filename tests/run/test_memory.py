"""Test the memory budget of a run.

The channels of a run have equal shares of it. If an item is larger than the share, it passes alone.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Gate, everywhere
from support.waiting import wait_until

from flowchan import Deadlock, Graph, RunError, _core
from flowchan.run.crew import memory
from flowchan.run.observe import cgroups

KB, MB = 1000, 1_000_000


def rows(number: int) -> list[bytes]:
    """Return a thousand rows of 1 KB."""
    return [number.to_bytes(8, "big") * 125 for _ in range(1000)]


def same(item: Any) -> Any:
    return item


@everywhere
def test_channels_share_the_memory_budget_of_a_run(on: Any) -> None:
    gate = Gate()

    def hold(item: Any) -> None:
        gate.wait()

    graph = Graph("batches")
    graph.source(range(20), on=on).map(rows, on=on, name="rows").map(same, on=on, name="same").sink(
        hold, on=on
    )
    run = graph.start(memory=9 * MB)
    gate.wait_held()
    wait_until(
        lambda: all(edge.inside == 2 and edge.short_of_bytes for edge in run.stats().edges[1:]),
        what=run.explain,
    )
    stats = run.stats()  # a third list of items, with its overhead, would exceed 3 MB
    assert stats.memory == 9 * MB
    assert {edge.share for edge in stats.edges} == {3 * MB}
    assert all(edge.bytes <= edge.share for edge in stats.edges)
    assert re.search(r"\(2 of 64; 2\.\d MB of its share of the run's memory, 3\.0 MB\)", run.explain())
    gate.open()
    run.wait()
    assert all(stage.items_in in (0, 20) for stage in run.stats().stages)
    assert "channels hold up to 9.0 MB" in run.report()


@everywhere
def test_item_larger_than_its_channels_budget_passes_alone(on: Any) -> None:
    graph = Graph("large")
    found = graph.source(range(8), on=on).map(rows, on=on).map(len, on=on, workers=2).collect()
    assert graph.run(memory=3 * MB)[found] == [1000] * 8


@everywhere
def test_small_items_fill_the_whole_capacity(on: Any) -> None:
    gate = Gate()

    def hold(item: Any) -> None:
        gate.wait()

    graph = Graph("small")
    graph.source(range(1000), on=on, capacity=64).sink(hold, on=on)
    run = graph.start(memory=10 * MB)
    gate.wait_held()
    # A stage wakes its writer only when a quarter of the capacity is free, so at least 48 of the 64 items
    # stay inside.
    wait_until(lambda: run.stats().edges[0].inside >= 48)
    assert not run.stats().edges[0].short_of_bytes
    gate.open()
    run.wait()


@pytest.mark.usefixtures("checks")
def test_deadlock_caused_by_the_memory_budget_is_described() -> None:
    """The zip needs a batch of 20 items from one branch, but the other branch has room for fewer items."""
    graph = Graph("stuck")
    left, right = graph.source(range(60)).map(rows).tee(2, name="tee")
    left.batch(20).zip(right).sink(same)
    run = graph.start(memory=24 * MB)
    with pytest.raises(RunError) as caught:
        run.wait()
    cause = caught.value.exceptions[0].__cause__
    assert isinstance(cause, Deadlock)
    assert "give the run more memory (`graph.run(memory=…)`)" in str(cause)
    assert "of its share of the run's memory" in str(cause)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4 GiB", True])
def test_memory_budget_must_be_a_number_of_bytes(wrong: Any) -> None:
    graph = Graph("wrong")
    graph.source([1]).sink(same)
    with pytest.raises((TypeError, ValueError), match="memory must be"):
        graph.run(memory=wrong)


# --- the default budget ---


def test_default_memory_budget_is_half_of_the_available_memory() -> None:
    graph = Graph("default")
    graph.source([1]).sink(same)
    run = graph.start()
    run.wait()
    assert run.stats().memory == memory.available() // 2
    assert 0 < memory.available() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/user/job", {"user/job/memory.max": "max", "user/memory.max": "5000000"}, 5_000_000),
        ("0::/gone/in/container", {"memory.max": "7000000"}, 7_000_000),
        ("4:memory:/docker/1", {"memory/memory.limit_in_bytes": "6000000"}, 6_000_000),
        ("3:cpu:/docker/1", {"cpu/memory.max": "1"}, None),
        ("0::/../outside", {"memory.max": "max"}, None),
    ],
)
def test_memory_limits_of_control_groups_are_respected(
    line: str, files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "mine").write_text(line)
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", tmp_path / "mine")
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    before = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.available() == (before if limit is None else limit)


@pytest.mark.parametrize(
    ("line", "files", "kills"),
    [
        ("0::/mine", {"mine/memory.events": "oom 9\noom_kill 2\n", "vmstat": "oom_kill 7\n"}, 2),
        ("0::/not/mounted", {"memory.events": "oom_kill 3\n"}, 3),
        ("4:memory:/mine", {"memory/mine/memory.oom_control": "under_oom 0\noom_kill 4\n"}, 4),
        ("4:cpu:/mine", {"vmstat": "nr_free_pages 1\noom_kill 5\n"}, 5),
        ("0::/", {}, 0),
    ],
)
def test_out_of_memory_kills_by_the_kernel_are_counted(
    line: str, files: dict[str, str], kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {**files, "mine_": line}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", tmp_path / "mine_")
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "VMSTAT", tmp_path / "vmstat")
    assert memory.oom_kills() == kills


@pytest.mark.parametrize("kills", [0, 1])
def test_worker_killed_for_lack_of_memory_is_reported(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel killed only the first process for lack of memory. The second death has another reason."""
    counted = tmp_path / "vmstat"
    counted.write_text("oom_kill 5\n")
    monkeypatch.setattr(memory, "group_files", lambda *_: [])
    monkeypatch.setattr(memory, "VMSTAT", counted)

    def die(item: int) -> None:
        counted.write_text(f"oom_kill {5 + kills}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    graph = Graph("greedy")
    mapped = graph.source([1]).map(die, on="process", max_deaths=2, name="greedy")
    failed = mapped.errors.collect()
    mapped.sink(same)
    (failure,) = graph.run()[failed]
    assert str(failure.error).count("likely for lack of memory") == kills
    assert "killed by SIGKILL" in str(failure.error)


# --- the size of an item ---


@dataclass
class Sample:
    image: np.ndarray
    label: str


class Slotted:
    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class ReportsItsEnd:
    nbytes = 12_345_678


@pytest.mark.parametrize(
    ("item", "least", "most"),
    [
        (7, 1, 100),
        ((1, 2.0, None), 1, 200),
        (b"x" * MB, MB, MB + 100),
        ("x" * MB, MB, MB + 100),
        (bytearray(MB), MB, MB + 100),
        (np.zeros((1000, 125)), MB, MB + 100),
        (memoryview(bytes(MB)), MB, MB + 100),
        ([bytes(KB) for _ in range(20_000)], 20 * MB, 22 * MB),
        ([(number, bytes(KB)) for number in range(1000)], MB, 1.3 * MB),
        ({number: bytes(KB) for number in range(1000)}, MB, 1.3 * MB),
        ([{"image": np.zeros(125), "label": "cat"} for _ in range(1000)], MB, 1.9 * MB),
        (Sample(np.zeros(125_000), "cat"), MB, MB + 1000),
        ([Sample(np.zeros(125_000), "cat") for _ in range(50)], 50 * MB, 51 * MB),
        (Slotted(bytes(MB)), MB, MB + 1000),
        ({bytes([number]) * KB for number in range(10)}, 10 * KB, 12 * KB),
        (ReportsItsEnd(), 12_345_678, 12_345_678),
        (np, 0, 0),
        (Sample, 0, 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_size_of_an_item_is_estimated(item: Any, least: float, most: float) -> None:
    assert least <= _core._size_of(item) <= most


def test_item_that_contains_itself_has_a_size() -> None:
    item: list[Any] = [bytes(KB)]
    item.append(item)
    assert _core._size_of(item) >= KB

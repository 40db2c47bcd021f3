"""Test cgroup limits: the number of cores, and the memory for additional processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowchan.run.crew import memory
from flowchan.run.observe import cgroups

MIB = 2**20
MOST_CORES = cgroups.most_cores.__wrapped__  # bypasses the cache


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that represents the cgroup root. This process is in ``job``."""
    (tmp_path / "own").write_text("0::/job")
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(cgroups, "most_cores", MOST_CORES)
    return tmp_path


@pytest.mark.parametrize(
    ("own", "parent", "cores"),
    [
        ("max 100000", "max 100000", None), ("200000 100000", "max 100000", 2), ("150000 100000", "", 1),
        ("50000 100000", "", 1), ("800000 100000", "300000 100000", 3), ("", "", None),
    ],
)  # fmt: skip
def test_cores_are_the_smallest_limit_of_nested_cgroups(
    group: Path, own: str, parent: str, cores: int | None
) -> None:
    (group / "job" / "cpu.max").write_text(own)
    (group / "cpu.max").write_text(parent)
    assert MOST_CORES() == cores


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", None)])
def test_cores_of_cgroup_v1_are_quota_divided_by_period(group: Path, quota: str, cores: int | None) -> None:
    (group / "own").write_text("4:cpu,cpuacct:/job")
    (group / "cpu" / "job").mkdir(parents=True)
    (group / "cpu" / "job" / "cpu.cfs_quota_us").write_text(quota)
    (group / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000")
    assert MOST_CORES() == cores


@pytest.mark.parametrize(("limit", "cores"), [("100000 100000", 1), ("6400000 100000", 4), ("max", 4)])
def test_local_cores_respect_affinity_and_cgroup_limit(
    group: Path, monkeypatch: pytest.MonkeyPatch, limit: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    (group / "job" / "cpu.max").write_text(limit)
    assert cgroups.local_cores() == cores


def test_one_tenth_of_memory_is_kept_free(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 500.0 * MIB)
    monkeypatch.setattr(memory, "available", lambda: 1000 * MIB)
    assert memory.free_for_processes() == 400 * MIB


def test_free_memory_of_cgroup_includes_reclaimable_file_cache(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10**12)
    (group / "job" / "memory.max").write_text(str(100 * MIB))
    (group / "job" / "memory.current").write_text(str(80 * MIB))
    (group / "job" / "memory.stat").write_text(f"anon 5\ninactive_file {30 * MIB}\n")
    assert memory.free_for_processes() == 50 * MIB - 10 * MIB


def test_free_memory_of_cgroup_v1_is_limit_minus_usage(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10**12)
    (group / "own").write_text("4:memory:/job")
    (group / "memory" / "job").mkdir(parents=True)
    (group / "memory" / "job" / "memory.limit_in_bytes").write_text(str(100 * MIB))
    (group / "memory" / "job" / "memory.usage_in_bytes").write_text(str(60 * MIB))
    (group / "memory" / "job" / "memory.stat").write_text(f"total_inactive_file {10 * MIB}\n")
    assert memory.free_for_processes() == 50 * MIB - 10 * MIB


def test_resident_memory_is_known_for_live_processes_only() -> None:
    assert memory.resident(os.getpid()) > MIB
    assert memory.resident(2**22 + 1) == 0

"""Test Slurm providers outside an allocation: they are values, and using one raises an error that names the
remedy."""

from __future__ import annotations

import pickle

import pytest

import flowchan.hosts
from flowchan import Graph, GraphError
from flowchan.check.rules import check
from flowchan.errors import HostError
from flowchan.hosts.providers.slurm import slurm
from flowchan.viz import to_mermaid


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def test_provider_is_compared_and_pickled_by_value():
    assert slurm() == slurm() != slurm(address="10.0.0.1")
    assert pickle.loads(pickle.dumps(slurm())) == slurm()
    assert hash(slurm()) == hash(slurm())
    assert repr(slurm()) == "slurm()"
    assert repr(slurm(address="10.0.0.1")) == "slurm(address='10.0.0.1')"


def test_given_address_is_used():
    assert slurm(address="10.0.0.1").listen_at() == "10.0.0.1"


def test_slurm_provider_outside_an_allocation_raises_with_the_remedy():
    for use in (lambda: slurm().hosts, slurm().listen_at):
        with pytest.raises(
            HostError,
            match=r"not running in a Slurm allocation \(SLURM_JOB_ID is not set\).*'sbatch'.*'salloc'",
        ):
            use()


def test_missing_slurm_commands_are_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", f"nowhere[1-2]{tmp_path.name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="scontrol can't be started here: No such file or directory"):
        slurm().hosts  # noqa: B018


def test_graph_outside_an_allocation_is_drawn_but_cannot_run():
    graph = Graph("declared")
    pool = flowchan.hosts.slurm()
    assert repr(pool) == "slurm()"
    graph.source(range(3)).map(abs, on=pool, name="far").sink(abs, on=pool["node1"])
    assert "hosts of slurm()" in to_mermaid(graph)
    remote, _ = check(graph)
    assert (remote.rule, remote.stage) == ("hosts", "far")
    with pytest.raises(
        GraphError, match=r"not running in a Slurm allocation .*start it with 'sbatch' or within 'salloc'"
    ):
        graph.run()

"""Test that diagrams show a parameter server as one cylinder."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from flowchan import Graph
from flowchan.pipelines import ParameterServer
from flowchan.viz import to_dot, to_mermaid


def declared(shards: int) -> Graph:
    graph = Graph("training")
    tensors = {"w": np.zeros(2), "b": np.zeros(2)}
    client = ParameterServer(tensors, shards=shards, graph=graph, name="parameters").client()
    graph.source([1, 2]).map(
        lambda n: client.push({"w": np.full(2, float(n))}).wait(), name="train"
    ).collect()
    return graph


@pytest.mark.parametrize("shards", [1, 2])
def test_dot_shows_parameter_server_as_cylinder_with_legend(shards: int) -> None:
    dot = to_dot(declared(shards))
    (line,) = [line for line in dot.splitlines() if "shape=cylinder" in line]
    assert "<B>parameters</B>" in line
    assert "tensors of all clients" in line
    assert ("<B>\N{MULTIPLICATION SIGN}2</B>" in line) == (shards == 2)
    assert ">parameter server<" in dot
    assert "parameters pushes" not in dot
    assert "parameters order" not in dot


def test_mermaid_shows_parameter_server_as_cylinder() -> None:
    assert '[("parameters<br/>tensors of all clients")]:::server_processes' in to_mermaid(declared(1))


def test_report_and_stats_list_the_parameter_server() -> None:
    with declared(1).start() as run:
        run.wait()
    assert "parameters" in {stage.name for stage in run.stats().stages}
    assert "parameters" in str(run.report())


def test_graph_keeps_its_server_after_the_program_drops_the_server() -> None:
    graph = declared(1)
    gc.collect()
    assert list(graph.run().values()) == [[1, 2]]

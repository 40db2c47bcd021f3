"""Test ``Graph.to_networkx``, which converts a declared graph to a networkx graph."""

from __future__ import annotations

import io

import pytest
from support.optional_packages import optional

from flowchan import Graph, GraphError, In, Out

networkx = optional("networkx")


def halve(number: int) -> float:
    return number / 2


def diamond() -> Graph:
    """Declare a graph with a short and a long path from ``numbers`` to ``both``."""
    graph = Graph("diamond")
    left, right = graph.source(range(8), name="numbers").tee(2)
    left = left.map(halve, on="process", workers=2, capacity=5).map(round)
    left.zip(right, name="both").collect(name="pairs")
    return graph


def steer(fresh: In[int], again: In[int], work: Out[int], done: Out[int]) -> None:
    raise AssertionError("a stage has started")


def looped() -> Graph:
    graph = Graph("looped")
    again = graph.feedback("again")
    work, done = graph.stage(steer, graph.source(range(3), name="numbers"), again)
    again.feed(work.map(abs))
    done.collect(name="results")
    return graph


def test_nodes_are_the_stages_with_their_settings() -> None:
    nodes = diamond().to_networkx().nodes(data=True)
    assert list(nodes) == [
        ("numbers", nodes["numbers"]),
        ("tee", nodes["tee"]),
        ("halve", nodes["halve"]),
        ("round", nodes["round"]),
        ("both", nodes["both"]),
        ("pairs", nodes["pairs"]),
    ]
    where = nodes["halve"].pop("where")
    assert nodes["halve"] == {"operator": "map", "workers": 2, "placement": "process"}
    file, line = where.rsplit(":", 1)
    assert file == __file__
    assert int(line) > 0
    assert nodes["pairs"]["operator"] == "collect"


def test_edges_are_the_channels_with_their_settings() -> None:
    joined = diamond().to_networkx()
    assert isinstance(joined, networkx.MultiDiGraph)
    assert joined.name == "diamond"
    assert joined.edges["halve", "round", "halve"] == {
        "name": "halve",
        "transport": "processes",
        "capacity": 5,
        "item": "float",
        "feedback": False,
        "errors": False,
        "writer_port": "out",
        "reader_port": "items",
    }
    assert joined.edges["numbers", "tee", "numbers"]["transport"] == "threads"
    assert joined.edges["numbers", "tee", "numbers"]["item"] == "int"
    assert joined.edges["round", "both", "round"]["transport"] == "threads"


def test_nodes_and_edges_match_stages_and_read_channels() -> None:
    for graph in (diamond(), looped()):
        joined = graph.to_networkx()
        assert list(joined) == [stage.name for stage in graph.stages]
        read = [(edge.writer, edge.reader, edge.name) for edge in graph.edges if edge.reader is not None]
        assert sorted(joined.edges(keys=True)) == sorted(read)


def test_channels_for_each_worker_are_parallel_edges() -> None:
    def add_up(orders: In[int]) -> None:
        raise AssertionError("a stage has started")

    graph = Graph()
    orders = graph.source([(1, 1)], name="orders")
    graph.stage(add_up, orders, workers=3, per_worker="orders")
    joined = graph.to_networkx()
    assert set(joined["orders"]["add_up"]) == {"orders to 1", "orders to 2", "orders to 3"}


def test_error_stream_is_an_edge_marked_as_errors() -> None:
    graph = Graph()
    halves = graph.source(range(3)).map(halve)
    halves.errors.sink(print, name="failures")
    halves.sink(print)
    joined = graph.to_networkx()
    assert joined.edges["halve", "failures", "halve.errors"]["errors"]
    assert not joined.edges["halve", "print", "halve"]["errors"]


def test_algorithms_of_networkx_apply_to_the_graph() -> None:
    joined = diamond().to_networkx()
    assert networkx.dag_longest_path(joined) == ["numbers", "tee", "halve", "round", "both", "pairs"]
    assert networkx.descendants(joined, "halve") == {"round", "both", "pairs"}
    assert networkx.ancestors(joined, "both") == {"numbers", "tee", "halve", "round"}


def test_graph_without_its_feedback_edges_has_no_cycle() -> None:
    joined = looped().to_networkx()
    assert not networkx.is_directed_acyclic_graph(joined)
    back = [(writer, reader) for writer, reader, feedback in joined.edges(data="feedback") if feedback]
    assert back == [("abs", "steer")]
    joined.remove_edges_from(back)
    assert networkx.is_directed_acyclic_graph(joined)


def test_graphml_file_keeps_all_attributes() -> None:
    joined = looped().to_networkx()
    file = io.BytesIO()
    networkx.write_graphml(joined, file)
    file.seek(0)
    again = networkx.read_graphml(file, force_multigraph=True)
    assert dict(again.nodes(data=True)) == dict(joined.nodes(data=True))
    assert {edge[2]: edge[3] for edge in again.edges(keys=True, data=True)} == {
        edge[2]: edge[3] for edge in joined.edges(keys=True, data=True)
    }


def test_sources_and_stages_do_not_start() -> None:
    def numbers() -> list[int]:
        raise AssertionError("the source has started")

    graph = Graph()
    graph.source(numbers).sink(print)
    assert list(graph.to_networkx()) == ["numbers", "print"]


def test_changes_of_the_copy_do_not_change_the_graph() -> None:
    graph = diamond()
    graph.to_networkx().remove_node("halve")
    assert "halve" in graph.to_networkx()


def test_graph_with_other_problems_is_converted() -> None:
    graph = Graph()
    graph.source(range(3), name="numbers")
    assert [problem.rule for problem in graph.check()] == ["unread"]
    assert list(graph.to_networkx()) == ["numbers"]
    assert not graph.to_networkx().edges


def test_stages_with_equal_names_raise_graph_error() -> None:
    graph = Graph()
    graph.source(range(3), name="same").sink(print, name="same")
    with pytest.raises(GraphError, match="the name 'same' is already used") as caught:
        graph.to_networkx()
    assert {problem.rule for problem in caught.value.problems} == {"duplicate"}

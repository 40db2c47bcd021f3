"""Convert a declared graph to a networkx graph.

All attributes are strings, ints and bools, because every file format of networkx can store these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowchan.declare.annotations import type_name

if TYPE_CHECKING:
    import networkx

    from flowchan.declare.blueprint import Blueprint
    from flowchan.declare.values import Edge, Stage


def to_networkx(blueprint: Blueprint) -> networkx.MultiDiGraph:
    """Return a graph with stages as nodes and channels as edges. Stage names must be unique."""
    import networkx  # imported late, because this takes longer than importing all of flowchan

    joined = networkx.MultiDiGraph(name=blueprint.name)
    joined.add_nodes_from((stage.name, _node(stage)) for stage in blueprint.stages)
    joined.add_edges_from(
        (edge.writer, edge.reader, edge.name, _channel(edge))
        for edge in blueprint.edges
        if edge.reader is not None
    )
    return joined


def _node(stage: Stage) -> dict[str, Any]:
    return {
        "operator": stage.kind,
        "workers": stage.worker_count,
        "placement": str(stage.placement),
        "where": str(stage.where),
    }


def _channel(edge: Edge) -> dict[str, Any]:
    return {
        "name": edge.name,
        "transport": str(edge.transport),
        "capacity": edge.capacity,
        "item": "" if edge.item is None or edge.item is Any else type_name(edge.item),
        "feedback": edge.feedback,
        "errors": edge.errors,
        "writer_port": edge.writer_port,
        "reader_port": edge.reader_port,
    }

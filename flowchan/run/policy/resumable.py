"""Decide whether runs of a graph can be resumed (R14), and whether a file belongs to the graph."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from flowchan.declare.blueprint import Blueprint
from flowchan.declare.values import Stage
from flowchan.errors import GraphError, Problem
from flowchan.run.policy.lineage import FinishedItems


def refuse_unless_resumable(graph: Blueprint) -> None:
    """Raise ``GraphError`` if stages prevent runs of ``graph`` from being resumed; name all these stages."""
    problems = [
        Problem("resume", stage.name, stage.where, f"resume= does not support {reason}")
        for stage in graph.stages
        if (reason := _reason_against(graph, stage))
    ]
    if problems:
        raise GraphError(graph.name, problems)


def _reason_against(graph: Blueprint, stage: Stage) -> str:
    """Explain why runs with a stage cannot be resumed, with a remedy. Return "" if they can be."""
    if stage.operator.outside:
        return "an input, because a later run cannot read its items again; use source()"
    if stage.operator.routes:
        return ""  # report the keyed stage instead, which the user has declared
    if stage.operator.resumable and "key" in stage.options:
        return (
            f"a {stage.kind} with key=, because a run starts without the states of earlier runs; do this "
            "step in another graph"
        )
    if not stage.operator.resumable:
        return (
            f"a {stage.kind}, because its outputs do not show which source items they come from; save the "
            "items in a sink(), and do this step in another graph"
        )
    if stage.operator.gathers and any(
        edge.writer == stage.name and edge.reader is not None for edge in graph.edges
    ):
        return (
            f"a {stage.kind} that another stage reads, because its list depends on all source items; save "
            "the items in a sink(), and read them in another graph"
        )
    if stage.placement.is_remote:
        return "a stage on hosts; use on='process' or on='thread'"
    return ""


def sources(graph: Blueprint) -> dict[str, int]:
    """Return the index of each source among the graph's sources."""
    names = (stage.name for stage in graph.stages if stage.operator.begins)
    return {name: index for index, name in enumerate(names)}


def shape_digest(graph: Blueprint) -> bytes:
    """Return a digest of the names and operators of all stages and of the streams that they read."""
    import hashlib  # imported late, because it loads OpenSSL

    shape = [
        [stage.name, stage.kind, [[port, str(origin)] for port, origin in stage.read]]
        for stage in graph.stages
    ]
    return hashlib.sha256(json.dumps(shape).encode()).digest()


def finished_by_stage(graph: Blueprint, bits: bytes) -> dict[str, FinishedItems]:
    """Check that each source still has its finished items, and return these items.

    Raise ``GraphError`` if a source is shorter than its last finished item requires.
    """
    indexes = sources(graph)
    found = {name: FinishedItems(index, len(indexes), bits) for name, index in indexes.items()}
    problems = list(_shortened_sources(graph, found))
    if problems:
        raise GraphError(graph.name, problems)
    return found


def _shortened_sources(graph: Blueprint, found: Mapping[str, FinishedItems]) -> Iterator[Problem]:
    for stage in graph.stages:
        if stage.operator.begins and stage.operator.expects is not None:
            length = stage.operator.expects(stage.options, [])
            if length is not None and length < (least := found[stage.name].length()):
                message = (
                    f"the source must have at least the {least:,} items of earlier runs, got {length:,}; "
                    "restore the items, or resume from another path"
                )
                yield Problem("resume", stage.name, stage.where, message)

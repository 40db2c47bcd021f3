"""Whether a declared graph can run: every problem at once, in the order of declaration, before anything is
started.

| rule | what it means |
|---|---|
| empty | nothing is declared, or no stage begins the graph |
| duplicate | two stages, or two channels, have one name |
| foreign | a stage reads a stream of another graph, or one that no stage writes |
| cycle | stages wait for each other in a loop without a declared feedback |
| loop | a feedback that nothing feeds, or that another operator than ``stage`` reads |
| unread | nobody reads an output |
| read-twice | several stages read one stream |
| ports | streams and arguments do not fit the function's parameters |
| type | the items are not what the reader's annotation asks for |
| async | an ``async def`` function in a stage that takes none |
| pickle | something cannot be sent to a stage's process |
| hosts | the hosts of a stage are still to be given, or can't be known here |
| gang | the workers of a stage can't form a group as they are declared |
| daemon | worker processes are asked for in a daemonic process, which may start none |
| spent | a source has an iterator that is at its end, or that an earlier run has read |
| capacity | a capacity is not an int of at least 1 |
| memory | the channels between processes need more memory than is free |
| system | this system refuses what channels between processes are made of |
| limit | more workers share a channel than it has ports, or selects among more than ``select`` takes |
"""

from __future__ import annotations

import errno
import graphlib
import inspect
import math
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from flowchan import _core
from flowchan.channel.channel import Channel, In
from flowchan.check.pickling import pickle_problems
from flowchan.check.types import port_problems, type_problems
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.callables import is_async
from flowchan.declare.operators import OPERATORS
from flowchan.declare.values import Edge, Origin, Stage
from flowchan.errors import GraphError, Problem
from flowchan.items.arguments import is_whole

MEMINFO = Path("/proc/meminfo")
_BYTES_PER_ITEM = 64
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOENT)
_BYTES_PER_CHANNEL = 64 * 1024
# of a channel between processes: its table has some places more, for processes without a port
_MOST_PORTS = 4096
_MOST_SELECTED = 128  # operations of one select, which is what Linux can wait for at once

Found = Iterator[tuple[int, Problem]]
"""Problems, each with the index of its stage in the graph (-1: the graph as a whole)."""


def check(graph: Blueprint) -> tuple[Problem, ...]:
    """Everything that is wrong with the graph, in the order of declaration; empty if it can run. Starts
    nothing and raises nothing because of the graph."""
    stages = graph.stages
    found: list[tuple[int, Problem]] = []
    for rule in _RULES:
        found.extend(rule(graph, stages))
    count = Counter(stage.name for stage in stages)
    items = {  # what a name given twice means is not certain
        Origin(stage.name, output.port): output
        for stage in stages
        if count[stage.name] == 1
        for output in stage.all_outputs
    }
    for index, stage in enumerate(stages):
        for problems in (port_problems(stage), type_problems(stage, items), pickle_problems(stage)):
            found.extend((index, problem) for problem in problems)
    return tuple(problem for _, problem in sorted(found, key=itemgetter(0)))


def raise_for(graph: Blueprint) -> None:
    """``GraphError`` with all problems, if :func:`check` finds any."""
    problems = check(graph)
    if problems:
        raise GraphError(graph.name, problems)


def _empty(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    if not stages:
        yield (
            -1,
            Problem(
                "empty", "", graph.where, f"graph {graph.name!r} has no stages; begin it with graph.source(…)"
            ),
        )
    elif not any(stage.begins for stage in stages):
        message = (
            f"graph {graph.name!r} has no source: each stage waits for another; begin it with graph.source(…)"
        )
        yield -1, Problem("empty", "", graph.where, message)


def _duplicates(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    first: dict[str, Stage] = {}
    channels: dict[str, Stage] = {}
    for index, stage in enumerate(stages):
        owner = first.setdefault(stage.name, stage)
        if owner is not stage:
            message = (
                f"the name {stage.name!r} is taken by the {owner.kind} at {owner.where}; give another name="
            )
            yield index, Problem("duplicate", stage.name, stage.where, message)
            continue
        names = [name for output in stage.all_outputs for _, name in stage.channels(output)]
        for name in names:
            owner = channels.setdefault(name, stage)
            if owner is not stage:
                message = (
                    f"its channel {name!r} is named like one of stage {owner.name!r} "
                    f"at {owner.where}; "
                    "give one of the stages another name="
                )
                yield index, Problem("duplicate", stage.name, stage.where, message)


def _foreign(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    written = {Origin(stage.name, output.port) for stage in stages for output in stage.all_outputs}
    for index, stage in enumerate(stages):
        for origin in stage.inputs:
            stranger = graph._strangers.get(origin)
            if stranger is not None:
                message = (
                    f"reads stream {stranger.name!r} of another graph, {stranger.graph!r} declared at "
                    f"{stranger.where}; declare both ends in one graph"
                )
                yield index, Problem("foreign", stage.name, stage.where, message)
            elif origin not in written and origin not in graph._loops:
                message = f"reads stream {str(origin)!r}, but no stage of graph {graph.name!r} writes it"
                yield index, Problem("foreign", stage.name, stage.where, message)


def _cycles(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """One problem per knot of stages that wait for each other. A name given twice joins stages which are not
    joined, so such names are left out; they have a problem of their own."""
    count = Counter(stage.name for stage in stages)
    indexes = {stage.name: index for index, stage in enumerate(stages) if count[stage.name] == 1}
    edges = [
        (origin.stage, stage.name)
        for stage in stages
        for port, origin in stage.read
        if stage.name in indexes and origin.stage in indexes and port not in stage.feedback
    ]
    if not _goes_in_circles(edges):
        return
    import networkx  # takes longer to import than all of flowchan

    joined = networkx.DiGraph(edges)
    for knot in networkx.strongly_connected_components(joined):
        start = min(knot, key=indexes.__getitem__)
        if len(knot) == 1 and not joined.has_edge(start, start):
            continue
        loop = [writer for writer, _ in networkx.find_cycle(joined.subgraph(knot), start)]
        turn = loop.index(min(loop, key=indexes.__getitem__))
        loop = [*loop[turn:], *loop[: turn + 1]]
        stage = stages[indexes[loop[0]]]
        message = (
            f"the stages wait for each other in a loop: {' → '.join(loop)}; break it at one of "
            "them, or declare which of "
            "them leads back: graph.feedback()"
        )
        yield indexes[stage.name], Problem("cycle", stage.name, stage.where, message)


def _goes_in_circles(edges: list[tuple[str, str]]) -> bool:
    order = graphlib.TopologicalSorter[str]()
    for writer, reader in edges:
        order.add(reader, writer)
    try:
        order.prepare()
    except graphlib.CycleError:
        return True
    return False


def _loops(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Each feedback is fed, and who reads it can end by itself."""
    for origin, loop in graph._loops.items():
        if loop.fed_by is None:
            message = f"nothing feeds {loop.name!r}; close the loop with .feed(stream)"
            indexes = [index for index, stage in enumerate(stages) if origin in stage.inputs]
            index = indexes[0] if indexes else -1
            yield index, Problem("loop", stages[index].name if indexes else "", loop.where, message)
    for index, stage in enumerate(stages):
        if stage.feedback and not stage.operator.ends_loops:
            message = (
                f"{stage.kind} reads a feedback, and would wait for its own end; let a "
                "graph.stage read it, which "
                "returns when its work is done"
            )
            yield index, Problem("loop", stage.name, stage.where, message)


def _readers(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Each output has exactly one reader; a result may have none. Who reads a name given twice is not
    certain."""
    count = Counter(stage.name for stage in stages)
    readers: dict[Origin, list[Stage]] = {}
    for stage in stages:
        for origin in stage.inputs:
            readers.setdefault(origin, []).append(stage)
    for index, stage in enumerate(stages):
        for output in stage.all_outputs if count[stage.name] == 1 else ():
            reading = readers.get(Origin(stage.name, output.port), [])
            if not reading and output is not stage.errors and not stage.operator.result:
                message = (
                    f"nobody reads its output {output.name!r}; end it with .sink(function), "
                    "or with .collect() "
                    "to have the items as a result"
                )
                yield index, Problem("unread", stage.name, stage.where, message)
            if len(reading) > 1:
                who = " and ".join(f"{reader.name!r} ({reader.where})" for reader in reading)
                message = (
                    f"its output {output.name!r} is read {len(reading)} times, by {who}; a "
                    "stream has one reader: "
                    f"give each its own with .tee({len(reading)})"
                )
                yield index, Problem("read-twice", stage.name, stage.where, message)


def _capacities(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    for index, stage in enumerate(stages):
        for output in stage.all_outputs:
            if not _is_capacity(output.capacity):
                message = f"capacity of {output.name!r} must be an int of at least 1, not {output.capacity!r}"
                yield index, Problem("capacity", stage.name, stage.where, message)


def _memory(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """A lower bound, reserved when the run begins; items that are larger need more."""
    shared = [edge for edge in graph.edges if edge.transport.copies and _is_capacity(edge.capacity)]
    if not shared:
        return
    needed, free = sum(map(_bytes_of, shared)), _free_memory()
    if needed > free:
        largest = max(shared, key=_bytes_of)
        index = next(index for index, stage in enumerate(stages) if stage.name == largest.writer)
        message = (
            f"the {len(shared)} channels between processes need at least {needed:,} bytes, "
            f"but {free:,} are free; "
            f"the largest is {largest.name!r} with capacity={largest.capacity:,}: lower it"
        )
        yield index, Problem("memory", largest.writer, largest.where, message)


def _free_memory() -> float:
    """In bytes; infinite where the kernel does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return math.inf
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), math.inf)


def _system(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    shared = next((edge for edge in graph.edges if edge.transport.copies), None)
    if shared is None:
        return
    try:
        _core.Channel(capacity=1, processes=True, max_bytes=4096, name="")
    except OSError as error:
        if error.errno in _REFUSED:
            index = next(index for index, stage in enumerate(stages) if stage.name == shared.writer)
            yield index, Problem("system", shared.writer, shared.where, str(error.strerror))


def _limits(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    writing = {stage.name: stage.worker_count for stage in stages}
    reading = {stage.name: 1 if stage.operator.worker_per_input else stage.workers for stage in stages}
    indexes = {stage.name: index for index, stage in enumerate(stages)}
    for edge in graph.edges:
        readers = 1 if edge.to_worker else reading.get(edge.reader or "", 0)
        ports = (1 if edge.worker else writing.get(edge.writer, 0)) + readers
        if edge.transport.copies and ports > _MOST_PORTS:
            message = (
                f"its channel {edge.name!r} is written and read by {ports:,} workers; between "
                "processes a channel has "
                f"{_MOST_PORTS:,} ports: lower workers=, or merge in steps"
            )
            yield indexes[edge.writer], Problem("limit", edge.writer, edge.where, message)
    for index, stage in enumerate(stages):
        ports = len(stage.inputs) + len(stage.outputs)
        names = getattr(getattr(stage.function, "__code__", None), "co_names", ())
        if stage.operator.calls == "ports" and ports > _MOST_SELECTED and "select" in names:
            message = (
                f"its function calls select and has {ports} ports, but select takes "
                f"{_MOST_SELECTED} operations; merge "
                "some of the streams before"
            )
            yield index, Problem("limit", stage.name, stage.where, message)


def _asyncs(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    for index, stage in enumerate(stages):
        if not is_async(stage.function):
            continue
        if not stage.operator.async_body:
            others = ", ".join(
                sorted(operator.name for operator in OPERATORS.values() if operator.async_body)
            )
            message = f"{stage.kind} takes no async function; {others} do"
            yield index, Problem("async", stage.name, stage.where, message)


def _spent(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """A process iterates over a copy of its iterator, so only those of threads are read; a channel says
    itself when it is at its end."""
    for index, stage in enumerate(stages):
        items = stage.options.get("iterable")
        if stage.placement.apart or not isinstance(items, Iterator) or isinstance(items, Channel | In):
            continue
        if inspect.isgenerator(items) and inspect.getgeneratorstate(items) == inspect.GEN_CLOSED:
            how = "is at its end already, so there would be no items"
        elif stage.name in graph._started and iter(items) is items:
            how = "was read by an earlier run, and can't begin anew"
        else:
            continue
        message = (
            f"its {type(items).__name__} {how}; give a callable that makes a new one for each run: "
            "graph.source(function, *arguments)"
        )
        yield index, Problem("spent", stage.name, stage.where, message)


def _daemonic(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    process = multiprocessing.current_process()
    if process.daemon:
        for index, stage in enumerate(stages):
            if stage.placement.apart:
                message = (
                    f"process {process.name!r} is daemonic, and Python lets it start no "
                    "processes; start it with "
                    "daemon=False, or let the stage run on='thread'"
                )
                yield index, Problem("daemon", stage.name, stage.where, message)


def _hosts(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    for index, stage in enumerate(stages):
        if stage.placement.missing:
            yield index, Problem("hosts", stage.name, stage.where, stage.placement.missing)
        elif stage.placement.nowhere:
            message = (
                "nobody has said which hosts it runs on; give them with `flowchan run FILE --hosts local:2`, "
                "or declare it with on=pool"
            )
            yield index, Problem("hosts", stage.name, stage.where, message)


def _gangs(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    for index, stage in enumerate(stages):
        if stage.gang is not None and is_async(stage.function):
            message = "its workers form a group, whose operations wait: an async function can't call them"
            yield index, Problem("gang", stage.name, stage.where, message)
        if stage.gang is not None and stage.gang.elastic and not stage.placement.apart:
            message = "elastic=True is for processes: no thread dies by itself; say on='process' or on=pool"
            yield index, Problem("gang", stage.name, stage.where, message)


def _addressed(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Streams whose items go to the worker that the sender names."""
    indexes = {stage.name: index for index, stage in enumerate(stages)}
    for edge in graph.edges:
        if edge.errors and edge.to_worker == 1 and edge.reader is not None:
            message = (
                f"its per_worker input {edge.reader_port!r} reads the errors stream of {edge.writer!r}, "
                "whose items name no worker; put a map between them that gives pairs (worker, item)"
            )
            yield indexes[edge.reader], Problem("ports", edge.reader, edge.where, message)


def _bytes_of(edge: Edge) -> int:
    return edge.capacity * _BYTES_PER_ITEM + _BYTES_PER_CHANNEL


def _is_capacity(value: object) -> bool:
    return is_whole(value) and value >= 1


_RULES = (
    _empty,
    _duplicates,
    _foreign,
    _cycles,
    _loops,
    _readers,
    _capacities,
    _memory,
    _limits,
    _system,
    _asyncs,
    _spent,
    _daemonic,
    _hosts,
    _gangs,
    _addressed,
)

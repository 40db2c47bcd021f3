"""Find all problems of a declared graph before anything starts, in declaration order.

| rule | meaning |
|---|---|
| empty | the graph has no stage, or no stage at which it begins |
| duplicate | two stages or two channels have the same name |
| foreign | a stage reads a stream from another graph, or a stream that no stage writes |
| cycle | stages wait for each other in a loop without a declared feedback stream |
| loop | no stage feeds a feedback stream, or an operator other than ``stage`` reads it |
| unread | no stage reads an output |
| read-twice | several stages read one stream |
| ports | streams and arguments do not match the function's parameters |
| type | the item type does not match the reader's annotation |
| async | a stage has an ``async def`` function but does not support it |
| pickle | part of a stage cannot be sent to a worker process |
| hosts | the hosts of a stage are not given, or cannot be known here |
| gang | the workers of a stage cannot form a group as declared |
| daemon | a daemonic process declares worker processes, which it is not allowed to start |
| spent | a source has an iterator that is exhausted, or that an earlier run has read |
| capacity | a capacity is not an int of at least 1 |
| memory | the channels between processes need more memory than is free |
| workers | a stage whose number of workers cannot change has ``workers="auto"`` |
| system | the system refuses a resource that channels between processes need |
| limit | a channel has more workers than ports, or a ``select`` has too many operations |
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

from flowchan import _core
from flowchan.channel.channel import Channel, In
from flowchan.check.pickling import pickle_problems
from flowchan.check.types import port_problems, type_problems
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.callables import is_async
from flowchan.declare.fixed_workers import auto_refusal, fixed_workers
from flowchan.declare.operators import OPERATORS
from flowchan.declare.values import Edge, Origin, Stage
from flowchan.errors import GraphError, Problem
from flowchan.items.arguments import is_whole
from flowchan.native import is_compiled

MEMINFO = "/proc/meminfo"
_BYTES_PER_ITEM = 64
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOENT)
_BYTES_PER_CHANNEL = 64 * 1024
# Maximum number of ports of a channel between processes. The channel's table has 256 more entries, for
# processes without a port.
_MOST_PORTS = 4096
_MOST_SELECTED = 128  # maximum number of operations in one select; Linux cannot wait for more

Found = Iterator[tuple[int, Problem]]
"""Problems, each with the index of its stage in the graph. The index -1 stands for the whole graph."""


def check(graph: Blueprint) -> tuple[Problem, ...]:
    """Return all problems of the graph in declaration order, or an empty tuple if it can run.

    The check starts no stage, and never raises an exception, whatever the graph is.
    """
    stages = graph.stages
    found: list[tuple[int, Problem]] = []
    for rule in _RULES:
        found.extend(rule(graph, stages))
    count = Counter(stage.name for stage in stages)
    items = {  # omit duplicate names, because they do not identify a stage
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
    """Raise ``GraphError`` with all problems that :func:`check` finds, if any."""
    problems = check(graph)
    if problems:
        raise GraphError(graph.name, problems)


def _empty(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    if not stages:
        yield (
            -1,
            Problem(
                "empty", "", graph.where, f"graph {graph.name!r} has no stages; begin with graph.source(…)"
            ),
        )
    elif not any(stage.begins for stage in stages):
        message = (
            f"graph {graph.name!r} has no source, so every stage waits for another; begin with "
            "graph.source(…)"
        )
        yield -1, Problem("empty", "", graph.where, message)


def duplicates(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Check that the names of stages and channels are unique."""
    first: dict[str, Stage] = {}
    channels: dict[str, Stage] = {}
    for index, stage in enumerate(stages):
        owner = first.setdefault(stage.name, stage)
        if owner is not stage:
            message = (
                f"the name {stage.name!r} is already used by the {owner.kind} at {owner.where}; pass another "
                "name="
            )
            yield index, Problem("duplicate", stage.name, stage.where, message)
            continue
        names = [name for output in stage.all_outputs for _, name in stage.channels(output)]
        for name in names:
            owner = channels.setdefault(name, stage)
            if owner is not stage:
                message = (
                    f"its channel {name!r} has the same name as a channel of stage {owner.name!r} at "
                    f"{owner.where}; pass another name= to one of the stages"
                )
                yield index, Problem("duplicate", stage.name, stage.where, message)


def _foreign(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    written = {Origin(stage.name, output.port) for stage in stages for output in stage.all_outputs}
    for index, stage in enumerate(stages):
        for origin in stage.inputs:
            foreign = graph._foreign_streams.get(origin)
            if foreign is not None:
                message = (
                    f"reads stream {foreign.name!r} from another graph, {foreign.graph!r}, declared at "
                    f"{foreign.where}; declare both stages in one graph"
                )
                yield index, Problem("foreign", stage.name, stage.where, message)
            elif origin not in written and origin not in graph._loops:
                message = f"reads stream {str(origin)!r}, but no stage of graph {graph.name!r} writes it"
                yield index, Problem("foreign", stage.name, stage.where, message)


def _cycles(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Yield a problem for each set of stages that would wait for each other without end.

    Stages with duplicate names are skipped, because another rule reports them. Edges refer to stages by name,
    so stages with the same name would appear connected.
    """
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
    import networkx  # imported late, because this takes longer than importing all of flowchan

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
            f"the stages wait for each other in a loop: {' → '.join(loop)}; break the loop, "
            "or declare it with graph.feedback()"
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
    """Check that each feedback has a writer, and a reader that can end before the feedback ends."""
    for origin, loop in graph._loops.items():
        if loop.fed_by is None:
            message = f"nothing feeds {loop.name!r}; close the loop with .feed(stream)"
            indexes = [index for index, stage in enumerate(stages) if origin in stage.inputs]
            index = indexes[0] if indexes else -1
            yield index, Problem("loop", stages[index].name if indexes else "", loop.where, message)
    for index, stage in enumerate(stages):
        if stage.feedback and not stage.operator.ends_loops:
            message = (
                f"{stage.kind} reads a feedback stream, so it would wait for itself to end; use graph.stage "
                "with a function that returns when its work is done"
            )
            yield index, Problem("loop", stage.name, stage.where, message)


def _readers(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Check that each output has exactly one reader. A result may have none.

    Stages with duplicate names are skipped, because it is unclear which of them another stage reads.
    """
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
                    f"no stage reads its output {output.name!r}; end it with .sink(function), or with "
                    ".collect() to return the items as a result"
                )
                yield index, Problem("unread", stage.name, stage.where, message)
            if len(reading) > 1:
                readers_text = " and ".join(f"{reader.name!r} ({reader.where})" for reader in reading)
                message = (
                    f"its output {output.name!r} has {len(reading)} readers, {readers_text}, but a stream "
                    f"can have only one; give each reader its own stream with .tee({len(reading)})"
                )
                yield index, Problem("read-twice", stage.name, stage.where, message)


def _capacities(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    for index, stage in enumerate(stages):
        for output in stage.all_outputs:
            if not _is_capacity(output.capacity):
                message = f"capacity of {output.name!r} must be an int of at least 1, got {output.capacity!r}"
                yield index, Problem("capacity", stage.name, stage.where, message)


def _memory(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Check that there is enough free memory for the amount that a run reserves at its start.

    Large items need more memory during the run.
    """
    shared = [edge for edge in graph.edges if edge.transport.copies and _is_capacity(edge.capacity)]
    if not shared:
        return
    needed, free = sum(map(_bytes_of, shared)), free_memory()
    if needed > free:
        largest = max(shared, key=_bytes_of)
        index = next(index for index, stage in enumerate(stages) if stage.name == largest.writer)
        message = (
            f"the {len(shared)} channels between processes need at least {needed:,} bytes, but only "
            f"{free:,} are free; lower the capacity of the largest, {largest.name!r} with "
            f"capacity={largest.capacity:,}"
        )
        yield index, Problem("memory", largest.writer, largest.where, message)


def free_memory() -> float:
    """Return the free memory in bytes, or infinity if the kernel does not report it."""
    try:
        with open(MEMINFO, encoding="utf-8") as file:
            lines = file.readlines()
    except OSError:
        return math.inf
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), math.inf)


def _system(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    shared = next((edge for edge in graph.edges if edge.transport.copies), None)
    # Without the native module, the graph can only run on another machine, so do not check this machine.
    if shared is None or not is_compiled():
        return
    try:
        _core.Channel(capacity=1, processes=True, max_bytes=4096, name="")
    except OSError as error:
        if error.errno in _REFUSED:
            index = next(index for index, stage in enumerate(stages) if stage.name == shared.writer)
            yield index, Problem("system", shared.writer, shared.where, str(error.strerror))


def _most_workers(stage: Stage) -> int:
    return stage.worker_count if stage.auto is None else stage.auto.most or 1


def _limits(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    writing = {stage.name: _most_workers(stage) for stage in stages}
    reading = {stage.name: 1 if stage.operator.worker_per_input else _most_workers(stage) for stage in stages}
    indexes = {stage.name: index for index, stage in enumerate(stages)}
    for edge in graph.edges:
        readers = 1 if edge.to_worker else reading.get(edge.reader or "", 0)
        ports = (1 if edge.worker else writing.get(edge.writer, 0)) + readers
        if edge.transport.copies and ports > _MOST_PORTS:
            message = (
                f"its channel {edge.name!r} has {ports:,} workers as readers and writers, but a channel "
                f"between processes has {_MOST_PORTS:,} ports; use fewer workers=, or merge in several steps"
            )
            yield indexes[edge.writer], Problem("limit", edge.writer, edge.where, message)
    for index, stage in enumerate(stages):
        ports = len(stage.inputs) + len(stage.outputs)
        names = getattr(getattr(stage.function, "__code__", None), "co_names", ())
        if stage.operator.calls == "ports" and ports > _MOST_SELECTED and "select" in names:
            message = (
                f"its function calls select and has {ports} ports, but select accepts at most "
                f"{_MOST_SELECTED} operations; merge some of the streams first"
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
            message = f"{stage.kind} does not accept an async function; {others} do"
            yield index, Problem("async", stage.name, stage.where, message)


def _spent(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Check that no source on a thread has an iterator that is already used up.

    A source in a worker process iterates over a copy, so the original is not used up. Channels are skipped,
    because they report their own end.
    """
    for index, stage in enumerate(stages):
        items = stage.options.get("iterable")
        if stage.placement.own_process or not isinstance(items, Iterator) or isinstance(items, Channel | In):
            continue
        if inspect.isgenerator(items) and inspect.getgeneratorstate(items) == inspect.GEN_CLOSED:
            how = "is already at its end, so there would be no items"
        elif stage.name in graph._started and iter(items) is items:
            how = "was read by an earlier run and can't start again"
        else:
            continue
        message = (
            f"its {type(items).__name__} {how}; pass a callable that creates a new one for each run: "
            "graph.source(function, *arguments)"
        )
        yield index, Problem("spent", stage.name, stage.where, message)


def _daemonic(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    process = multiprocessing.current_process()
    if process.daemon:
        for index, stage in enumerate(stages):
            if stage.placement.own_process:
                message = (
                    f"process {process.name!r} is daemonic, so it cannot start processes; start it with "
                    "daemon=False, or use on='thread'"
                )
                yield index, Problem("daemon", stage.name, stage.where, message)


def _hosts(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    for index, stage in enumerate(stages):
        if stage.placement.missing:
            yield index, Problem("hosts", stage.name, stage.where, stage.placement.missing)
        elif stage.placement.nowhere:
            message = (
                "no hosts were given for on='hosts'; use `flowchan run FILE --hosts local:2`, or declare "
                "the stage with on=pool"
            )
            yield index, Problem("hosts", stage.name, stage.where, message)


def _broadcasts(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Check that all workers can read the broadcast values."""
    for index, stage in enumerate(stages):
        if graph._broadcasts and stage.placement.is_remote:
            message = (
                "it runs on hosts, but the graph has a broadcast value, which only workers on this machine "
                "can read; use on='thread' or on='process', or send the value to the stage as items"
            )
            yield index, Problem("hosts", stage.name, stage.where, message)
    if any(stage.placement.own_process for stage in stages):
        for value in graph._broadcasts:
            try:
                value._check()
            except Exception as error:
                message = f"{value!r} can't be sent to a process: {error}; use on='thread' for all stages"
                yield -1, Problem("pickle", "", graph.where, message)


def _gangs(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    for index, stage in enumerate(stages):
        if stage.gang is not None and is_async(stage.function):
            message = (
                "its workers form a group, whose operations block, so it can't be an async function; use a "
                "synchronous function"
            )
            yield index, Problem("gang", stage.name, stage.where, message)
        if stage.gang is not None and stage.gang.elastic and not stage.placement.own_process:
            message = (
                "elastic=True needs processes, because a thread cannot die alone; use on='process' or on=pool"
            )
            yield index, Problem("gang", stage.name, stage.where, message)


def _addressed(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Check the ``per_worker`` streams, whose writers choose a worker for each item."""
    indexes = {stage.name: index for index, stage in enumerate(stages)}
    for edge in graph.edges:
        if edge.errors and edge.to_worker == 1 and edge.reader is not None:
            message = (
                f"its per_worker input {edge.reader_port!r} reads the errors stream of "
                f"{edge.writer!r}, whose items do not name a worker; add a map between them that returns "
                "pairs (worker, item)"
            )
            yield indexes[edge.reader], Problem("ports", edge.reader, edge.where, message)


def _bytes_of(edge: Edge) -> int:
    return edge.capacity * _BYTES_PER_ITEM + _BYTES_PER_CHANNEL


def _is_capacity(value: object) -> bool:
    return is_whole(value) and value >= 1


def _autos(graph: Blueprint, stages: tuple[Stage, ...]) -> Found:
    """Report ``auto`` stages that need a fixed number of workers because of a reader declared later."""
    for index, stage in enumerate(stages):
        if stage.auto is not None and (why := fixed_workers(stage)):
            yield index, Problem("workers", stage.name, stage.where, auto_refusal(stage, why))


_RULES = (
    _empty,
    duplicates,
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
    _broadcasts,
    _gangs,
    _addressed,
    _autos,
)

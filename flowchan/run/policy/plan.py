"""From a declared graph to what one run consists of, as data: which channels there will be, and which workers
with which ports. Nothing is opened here; ``opening`` does that, for one machine."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flowchan.declare.blueprint import Blueprint
from flowchan.declare.callables import is_async
from flowchan.declare.placements import Placement
from flowchan.declare.values import UNLIMITED_RESTARTS, DefaultNumber, Edge, Stage
from flowchan.run.policy.events import WorkerId

Taken = Counter[tuple[Any, str]]
"""How many workers each host has so far: of all, and of those dealt by the same shares."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker to start: of which stage, with which ports. ``inputs`` and ``outputs`` say which channel
    each port belongs to, ``errors`` to which one its failed items go. ``host`` is the name of the host on
    which it runs, empty for this machine."""

    id: WorkerId
    stage: Stage
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    errors: str | None = None
    host: str = ""

    @property
    def is_task(self) -> bool:
        """Whether it is a task of its stage's event loop, beside the stage's other workers on one thread."""
        return is_async(self.stage.function) and not self.stage.placement.apart

    @property
    def gathers(self) -> bool:
        """Whether it collects for the program alone: it starts when the program waits for the results."""
        return self.stage.operator.gathers and not self.outputs

    def channels(self) -> Iterator[str]:
        """The names of all channels that it has a port of."""
        yield from self.inputs.values()
        yield from self.outputs.values()
        if self.errors is not None:
            yield self.errors


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one run consists of. Its channels, one for each of ``edges``, share ``memory`` bytes.
    ``inputs`` are the channels that the user fills, by stage name: one, or one for each worker of its reader;
    all that its workers draw at random begins
    with ``seed``."""

    graph: Blueprint
    edges: tuple[Edge, ...]
    workers: tuple[PlannedWorker, ...]
    inputs: Mapping[str, tuple[str, ...]]
    seed: int
    memory: int

    @property
    def share(self) -> int:
        """How many bytes of the run's memory each channel may take."""
        return max(1, self.memory // max(1, len(self.edges)))

    def limits(self) -> dict[str, int]:
        """How many dead workers of each stage may be replaced: a stage with state of its own can't be, unless
        it says so; a thread does not die."""
        return {
            stage.name: stage.restarts if stage.restartable or stage.operator.per_item else 0
            for stage in self.graph.stages
            if stage.placement.apart
        }

    @property
    def explicit(self) -> frozenset[str]:
        """The names of the stages whose limit of restarts the user has set."""
        return frozenset(
            stage.name
            for stage in self.graph.stages
            if not isinstance(stage.restarts, DefaultNumber) and stage.restarts < UNLIMITED_RESTARTS
        )

    def worker(self, id: WorkerId) -> PlannedWorker:
        """The worker of that name. One that its stage has got in addition has the same channels as the
        others."""
        first = next(worker for worker in self.workers if worker.id.stage == id.stage)
        return next((one for one in self.workers if one.id == id), dataclasses.replace(first, id=id))

    def is_fixed(self, stage: Stage) -> str:
        """Why the number of a stage's workers can't change while the graph runs; empty: it can."""
        if not stage.operator.per_item:
            return f"a {stage.kind}"
        if is_async(stage.function):
            return f"a {stage.kind} with an async def function"
        if stage.placement.is_remote:
            return f"a {stage.kind} on hosts"
        if stage.gpus:
            return f"a {stage.kind} with gpus={stage.gpus} for each worker"
        return f"a {stage.kind} whose workers are told apart" if stage.output_per_worker else ""

    @property
    def elastic(self) -> frozenset[str]:
        """The names of the gangs that go on while a worker is replaced. A thread does not die."""
        stages = (stage for stage in self.graph.stages if stage.placement.apart)
        return frozenset(stage.name for stage in stages if stage.gang is not None and stage.gang.elastic)

    def between(self) -> Iterator[tuple[set[str], set[str]]]:
        """The channels into and out of each stage that only passes on what it gets: it has no use for its
        inputs when nobody wants its outputs. What a stage with ports of its own does is its own affair."""
        into: dict[str, set[str]] = {}
        out: dict[str, set[str]] = {}
        for worker in self.workers:
            if worker.stage.operator.calls != "ports":
                into.setdefault(worker.id.stage, set()).update(worker.inputs.values())
                out.setdefault(worker.id.stage, set()).update(worker.outputs.values())
        yield from ((into[stage], out[stage]) for stage in into if into[stage] and out[stage])

    @property
    def sources(self) -> frozenset[str]:
        """The names of the stages that begin the graph."""
        return frozenset(stage.name for stage in self.graph.stages if stage.begins)

    @property
    def ends(self) -> frozenset[str]:
        """The names of the stages whose output nobody reads: what the user waits for."""
        read = {edge.writer for edge in self.edges if edge.reader is not None}
        return frozenset(stage.name for stage in self.graph.stages if stage.name not in read)


def plan(graph: Blueprint, seed: int, memory: int) -> Plan:
    """What a run of ``graph`` will consist of."""
    edges = tuple(edge for edge in graph.edges if edge.reader is not None)
    workers: list[PlannedWorker] = []
    inputs: dict[str, tuple[str, ...]] = {}
    taken: Taken = Counter()
    for stage in graph.stages:
        if stage.operator.outside:
            inputs[stage.name] = tuple(edge.name for edge in edges if edge.writer == stage.name)
        else:
            workers += _hosted(_workers(stage, edges), stage.placement, taken)
    return Plan(graph, edges, tuple(workers), inputs, seed, memory)


def _hosted(workers: Iterator[PlannedWorker], placement: Placement, taken: Taken) -> Iterator[PlannedWorker]:
    """Gives each worker of a stage to that of its hosts which has the fewest, the first of several. With
    shares the workers of such a placement count alone, so that others' change nothing of its shares."""
    counted = (placement.hosts, placement.shares) if placement.shares else None
    shares = dict(zip(placement.hosts, placement.shares, strict=True)) if placement.shares else {}
    for worker in workers:
        if placement.hosts:
            host = min(
                placement.hosts, key=lambda name: Fraction(taken[counted, name] + 1, shares.get(name, 1))
            )
            taken.update({(None, host), (counted, host)})
            worker = dataclasses.replace(worker, host=host)
        yield worker


def _workers(stage: Stage, edges: tuple[Edge, ...]) -> Iterator[PlannedWorker]:
    for number in range(1, stage.worker_count + 1):
        mine = [edge for edge in edges if edge.writer == stage.name and edge.worker in (0, number)]
        outputs = {
            edge.writing_end: edge.name
            for output in stage.outputs
            for edge in mine
            if edge.writer_port == output.port
        }
        errors = next((edge.name for edge in mine if edge.errors), None)
        inputs = _inputs(stage, number, edges)
        yield PlannedWorker(WorkerId(stage.name, number), stage, inputs, outputs, errors)


def _inputs(stage: Stage, number: int, edges: tuple[Edge, ...]) -> dict[str, str]:
    """The channels of a worker's input ports: of all that its stage has, or of one where each has its own."""
    mine = stage.input_ports[number - 1 : number] if stage.operator.worker_per_input else stage.input_ports
    read = [edge for edge in edges if edge.reader == stage.name and edge.to_worker in (0, number)]
    return {edge.reading_end: edge.name for port in mine for edge in read if edge.reader_port == port}

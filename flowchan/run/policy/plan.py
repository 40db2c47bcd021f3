"""Plan a run: translate a declared graph into channels, workers and ports, as plain data.

This module opens nothing. ``opening`` opens the channels and ports of a plan on one machine.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowchan.declare.blueprint import Blueprint
from flowchan.declare.callables import class_with_state, is_async
from flowchan.declare.placements import Placement
from flowchan.declare.values import UNLIMITED_RESTARTS, DefaultNumber, Edge, Stage
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.lineage import NOTHING_FINISHED, FinishedItems

Taken = Counter[tuple[Any, str]]
"""Number of workers assigned to each host, in total and for each placement with shares."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker to start.

    ``inputs``, ``outputs`` and ``errors`` map ports to channel names. ``host`` is empty for this machine.
    """

    id: WorkerId
    stage: Stage
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    errors: str | None = None
    host: str = ""

    @property
    def is_task(self) -> bool:
        """Return whether the worker is a task in an event loop, which all workers of its stage share."""
        return is_async(self.stage.function) and not self.stage.placement.own_process

    @property
    def gathers(self) -> bool:
        """Return whether the worker only collects results for the program.

        Such a worker starts when the program begins to read the results.
        """
        return self.stage.operator.gathers and not self.outputs

    def channels(self) -> Iterator[str]:
        """Yield the names of the channels of all its ports."""
        yield from self.inputs.values()
        yield from self.outputs.values()
        if self.errors is not None:
            yield self.errors


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one run.

    ``edges`` are the channels, which together may use ``memory`` bytes. ``inputs`` maps each input stage to
    the channels that the user fills: one, or one per worker of the reader. All random numbers of the workers
    derive from ``seed``. If the run can be resumed, ``finished`` contains the items of each source that
    earlier runs have finished. ``samples_items`` is true if the run follows a few items of each source
    through the graph.
    """

    graph: Blueprint
    edges: tuple[Edge, ...]
    workers: tuple[PlannedWorker, ...]
    inputs: Mapping[str, tuple[str, ...]]
    seed: int
    memory: int
    finished: Mapping[str, FinishedItems] | None = None
    samples_items: bool = False

    @property
    def share(self) -> int:
        """Return the number of bytes that each channel may use."""
        return max(1, self.memory // max(1, len(self.edges)))

    def finished_at(self, stage: str) -> FinishedItems | None:
        """Return the finished items of a source; other stages have none.

        Return ``None`` if the run cannot be resumed.
        """
        return None if self.finished is None else self.finished.get(stage, NOTHING_FINISHED)

    def limits(self) -> dict[str, int]:
        """Return the maximum number of restarts of each stage.

        A stage that keeps state has no restarts unless it is restartable. Stages on threads are omitted,
        because threads do not die.
        """
        return {
            stage.name: stage.restarts if stage.restartable or stage.operator.per_item else 0
            for stage in self.graph.stages
            if stage.placement.own_process
        }

    @property
    def explicit(self) -> frozenset[str]:
        """Return the names of the stages for which the user has set the number of restarts."""
        return frozenset(
            stage.name
            for stage in self.graph.stages
            if not isinstance(stage.restarts, DefaultNumber) and stage.restarts < UNLIMITED_RESTARTS
        )

    @property
    def stateful(self) -> dict[str, str]:
        """Return, by stage, the class names of callable objects that may hold state.

        A worker that dies loses its state. Stages with ports are omitted: they are restartable only if the
        user has declared that they keep no state.
        """
        classes = {
            stage.name: class_with_state(stage.function)
            for stage in self.graph.stages
            if stage.placement.own_process and stage.operator.per_item
        }
        return {stage: name for stage, name in classes.items() if name}

    def worker(self, id: WorkerId) -> PlannedWorker:
        """Return the planned worker with this ID.

        A worker added during the run gets the same channels as the stage's other workers.
        """
        first = next(worker for worker in self.workers if worker.id.stage == id.stage)
        return next((one for one in self.workers if one.id == id), dataclasses.replace(first, id=id))

    @property
    def elastic(self) -> frozenset[str]:
        """Return the stages with elastic gangs, which continue while a worker is being replaced.

        Gangs of threads are omitted, because threads do not die.
        """
        stages = (stage for stage in self.graph.stages if stage.placement.own_process)
        return frozenset(stage.name for stage in stages if stage.gang is not None and stage.gang.elastic)

    def between(self) -> Iterator[tuple[set[str], set[str]]]:
        """Yield the input and output channels of each stage whose only effect is to turn inputs into outputs.

        When the outputs of such a stage have no readers, the stage needs no more inputs. Stages with ports
        are omitted, because they decide on their own when to end.
        """
        into: dict[str, set[str]] = {}
        out: dict[str, set[str]] = {}
        for worker in self.workers:
            if worker.stage.operator.calls != "ports":
                into.setdefault(worker.id.stage, set()).update(worker.inputs.values())
                out.setdefault(worker.id.stage, set()).update(worker.outputs.values())
        yield from ((into[stage], out[stage]) for stage in into if into[stage] and out[stage])

    def queues(self) -> tuple[str, ...]:
        """Return the channels whose items can be discarded without any effect on other items.

        Channels with results or failures are excluded, and so are all channels that lead to a worker with
        several inputs, such as ``zip``. If items were missing there, the worker would combine items that do
        not match.
        """
        kept = {worker.id.stage for worker in self.workers if len(worker.inputs) > 1}
        before = len(kept) - 1
        while before < len(kept):
            before = len(kept)
            kept |= {edge.writer for edge in self.edges if edge.reader in kept}
        kept |= {worker.id.stage for worker in self.workers if worker.gathers}
        return tuple(edge.name for edge in self.edges if edge.reader not in kept and not edge.errors)

    @property
    def sources(self) -> frozenset[str]:
        """Return the names of the stages where the graph begins."""
        return frozenset(stage.name for stage in self.graph.stages if stage.begins and not stage.service)

    @property
    def ends(self) -> frozenset[str]:
        """Return the names of the stages that no stage reads. The run is complete when they have ended."""
        read = {edge.writer for edge in self.edges if edge.reader is not None}
        return frozenset(
            stage.name for stage in self.graph.stages if stage.name not in read and not stage.service
        )

    @property
    def services(self) -> frozenset[str]:
        """Return the names of the stages that serve others and end last."""
        return frozenset(stage.name for stage in self.graph.stages if stage.service)


def plan(
    graph: Blueprint,
    seed: int,
    memory: int,
    finished: Mapping[str, FinishedItems] | None = None,
    samples_items: bool = False,
) -> Plan:
    """Plan a run of ``graph``."""
    edges = tuple(edge for edge in graph.edges if edge.reader is not None)
    workers: list[PlannedWorker] = []
    inputs: dict[str, tuple[str, ...]] = {}
    taken: Taken = Counter()
    for stage in graph.stages:
        if stage.operator.outside and stage.service:
            pass  # requests come from outside the run
        elif stage.operator.outside:
            inputs[stage.name] = tuple(edge.name for edge in edges if edge.writer == stage.name)
        else:
            workers += _on_hosts(_workers(stage, edges), stage.placement, taken)
    return Plan(graph, edges, tuple(workers), inputs, seed, memory, finished, samples_items)


def _on_hosts(
    workers: Iterator[PlannedWorker], placement: Placement, taken: Taken
) -> Iterator[PlannedWorker]:
    """Assign each worker of a stage to the host that has the fewest workers relative to its weight.

    If several hosts are equal, choose the first. A placement with shares counts only its own workers, so
    other placements do not affect it. If the placement lists the host of each worker, follow this list, and
    begin again after its end.
    """
    if not placement.hosts:
        yield from workers
        return
    from fractions import Fraction  # imported late, because most programs use no hosts

    counted = (placement.hosts, placement.shares) if placement.shares else None
    weights = placement.weights()

    def load(host: str) -> Fraction:
        return Fraction(taken[counted, host] + 1, weights.get(host, 1))

    least = [(load(host), place, host) for place, host in enumerate(placement.hosts)]
    heapq.heapify(least)  # a heap, because searching all hosts for each worker would be slow
    for worker in workers:
        _, place, host = least[0]
        if placement.by_worker:
            host = placement.by_worker[(worker.id.number - 1) % len(placement.by_worker)]
        taken.update({(None, host), (counted, host)})
        heapq.heapreplace(least, (load(host), place, host))
        yield dataclasses.replace(worker, host=host)


def _workers(stage: Stage, edges: tuple[Edge, ...]) -> Iterator[PlannedWorker]:
    for number in range(1, stage.worker_count + 1):
        own = [edge for edge in edges if edge.writer == stage.name and edge.worker in (0, number)]
        outputs = {
            edge.writing_end: edge.name
            for output in stage.outputs
            for edge in own
            if edge.writer_port == output.port
        }
        errors = next((edge.name for edge in own if edge.errors), None)
        inputs = _inputs(stage, number, edges)
        yield PlannedWorker(WorkerId(stage.name, number), stage, inputs, outputs, errors)


def _inputs(stage: Stage, number: int, edges: tuple[Edge, ...]) -> dict[str, str]:
    """Return the channels of a worker's input ports.

    If the operator has one worker per input, each worker gets only its own input port.
    """
    own = stage.input_ports[number - 1 : number] if stage.operator.worker_per_input else stage.input_ports
    read = [edge for edge in edges if edge.reader == stage.name and edge.to_worker in (0, number)]
    return {edge.reading_end: edge.name for port in own for edge in read if edge.reader_port == port}

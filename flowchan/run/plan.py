"""From a declared graph to the channels, ports and workers of one run. Everything is made here before
anything starts, so that a channel knows all its writers and readers from the beginning and can't close too
early."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flowchan.channel.channel import Channel, In, Out, most_bytes
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.values import Link, Stage, is_async
from flowchan.run.events import WorkerId
from flowchan.run.worker import Ports, Recipe

_Reading = dict[tuple[str | None, str | None], Channel[Any]]
_Writing = dict[tuple[str, str], Channel[Any]]

PER_ITEM = frozenset({"map", "flat_map", "filter", "partition", "sink"})
"""Verbs that keep nothing from one item to the next, so that another worker can take the next one up."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker to start: where, with which recipe and ports."""

    id: WorkerId
    stage: Stage
    ports: Ports

    @property
    def is_task(self) -> bool:
        """Whether it is a task of its stage's event loop, beside the stage's other workers."""
        return is_async(self.stage.function)

    @property
    def gathers(self) -> bool:
        """Whether it gathers items for the user and nobody else: then it waits until the user does not take
        them."""
        return self.stage.kind == "collect" and not self.ports.outputs

    @property
    def recipe(self) -> Recipe:
        return Recipe.of(self.stage)


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one run consists of. Its channels share ``memory`` bytes. ``inputs`` are the writing ends that
    the user holds, by stage name; all that its workers draw by chance begins with ``seed``."""

    graph: Blueprint
    links: tuple[Link, ...]
    channels: dict[str, Channel[Any]]
    workers: tuple[PlannedWorker, ...]
    inputs: dict[str, Out[Any]]
    seed: int
    memory: int

    def limits(self) -> dict[str, int]:
        """How many dead workers of each stage may be replaced: a stage with state of its own can't be, unless
        it says so; a thread does not die."""
        return {
            stage.name: stage.restarts if stage.restartable or stage.kind in PER_ITEM else 0
            for stage in self.graph.stages
            if stage.on == "process"
        }

    def open_again(self, worker: PlannedWorker) -> Ports:
        """New ports like those of ``worker``, to be opened before its own are closed."""
        return _open(worker.stage, tuple(worker.ports.inputs), *_ends(self.links, self.channels))

    @property
    def sources(self) -> frozenset[str]:
        """The names of the stages that begin the graph."""
        return frozenset(stage.name for stage in self.graph.stages if stage.begins)

    @property
    def ends(self) -> frozenset[str]:
        """The names of the stages whose output nobody reads: what the user waits for."""
        read = {link.writer for link in self.links if link.reader is not None}
        return frozenset(stage.name for stage in self.graph.stages if stage.name not in read)

    @property
    def uses_processes(self) -> bool:
        return any(worker.stage.on == "process" for worker in self.workers)


def plan(graph: Blueprint, seed: int, memory: int) -> Plan:
    """Makes the channels of ``graph`` and every port of every worker. Each channel gets the same share of
    ``memory`` bytes. Raises ``OSError`` when there is no memory."""
    links = tuple(link for link in graph.links if link.reader is not None)
    channels: dict[str, Channel[Any]] = {}
    for link in links:
        most = min(memory, most_bytes()) if link.medium == "processes" else None
        channel: Channel[Any] = Channel(link.capacity, across=link.medium, max_bytes=most)
        channel._name = link.name
        channel._share = max(1, memory // len(links))
        channels[link.name] = channel
    reading, writing = _ends(links, channels)
    workers: list[PlannedWorker] = []
    inputs: dict[str, Out[Any]] = {}
    for stage in graph.stages:
        if stage.kind == "input":
            inputs[stage.name] = writing[stage.name, "out"].writer()
            continue
        for number, ports in enumerate(_input_ports(stage), 1):
            workers.append(
                PlannedWorker(WorkerId(stage.name, number), stage, _open(stage, ports, reading, writing))
            )
    return Plan(graph, links, channels, tuple(workers), inputs, seed, memory)


def _ends(links: tuple[Link, ...], channels: dict[str, Channel[Any]]) -> tuple[_Reading, _Writing]:
    """The channels by who reads them and by who writes them."""
    reading = {(link.reader, link.reader_port): channels[link.name] for link in links}
    return reading, {(link.writer, link.writer_port): channels[link.name] for link in links}


def _input_ports(stage: Stage) -> Iterable[tuple[str, ...]]:
    """The input ports of each worker: all of them, but one each for the workers of a merge."""
    if stage.kind == "merge":
        return [(port,) for port in stage.input_ports]
    return [stage.input_ports] * stage.workers


def _open(
    stage: Stage,
    input_ports: tuple[str, ...],
    reading: _Reading,
    writing: _Writing,
) -> Ports:
    def supervised(port: Any) -> Any:
        port._supervise()
        return port

    errors = writing.get((stage.name, stage.errors.port)) if stage.errors is not None else None
    inputs: dict[str, In[Any]] = {
        name: supervised(reading[stage.name, name].reader()) for name in input_ports
    }
    outputs: dict[str, Out[Any]] = {
        output.port: supervised(writing[stage.name, output.port].writer())
        for output in stage.outputs
        if (stage.name, output.port) in writing
    }
    return Ports(inputs, outputs, None if errors is None else supervised(errors.writer()))

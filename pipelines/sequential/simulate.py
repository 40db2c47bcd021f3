"""Simulate the waiting times and the memory use of schedules, without a model.

This module does not use torch.

Each worker runs its steps in order. Before a step, it receives the step's inputs from other workers. After
``F``, it sends the output to the worker of the next part. After ``B`` or ``I``, it sends the gradient to the
worker of the previous part. Outputs and gradients use separate channels, which keep their order and hold
``capacity`` messages each. A sender waits while its channel is full. A worker reads only the channel from
which it needs a message, and stores messages that arrive early.

Workers that read and write channels in a fixed order, and block, form a Kahn process network. Whether the
workers deadlock depends on that order and on the capacity, but not on durations. A single simulation
therefore shows whether they can deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flowchan.pipelines.sequential.engine.schedule import Op, Step
from flowchan.pipelines.sequential.timeline import Timeline, TimelineEvent


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a simulation. Times start at 0, in the unit of ``forward`` and ``backward``.

    ``events`` are grouped by worker, in order. ``peaks`` lists the maximum number of micro-batches that each
    worker held at once, counted once per part. A worker holds a micro-batch from the forward pass until the
    end of the backward pass.
    """

    events: tuple[tuple[TimelineEvent, ...], ...]
    peaks: tuple[int, ...]

    def held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the peak memory of each worker if a micro-batch in part p takes ``sizes[p]``."""
        return tuple(_peak(events, sizes) for events in self.events)

    @property
    def makespan(self) -> float:
        """Time from the start of the first step to the end of the last step."""
        return max((event.end for events in self.events for event in events), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Fraction of the makespan during which each worker is idle."""
        return tuple(1 - _busy(events) / self.makespan if events else 1.0 for events in self.events)

    @property
    def bubble(self) -> float:
        """Fraction of the time during which workers are idle, averaged over all workers."""
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else 0.0

    def timeline(self, title: str = "simulated", unit: float = 1e-3) -> Timeline:
        """Return the events as a timeline; ``unit`` is the length of a time unit in seconds."""
        events = (event for events in self.events for event in events)
        return Timeline(
            (event._replace(begin=event.begin * unit, end=event.end * unit) for event in events), title
        )

    def staircase(self) -> str:
        """Return the result as text, with one line per worker and one column per time unit.

        ``F0`` marks the start of a step, ``-`` its continuation, and ``.`` an idle unit. Raises
        ``ValueError`` if the steps do not start and end on whole units.
        """
        several = any(len({event.part for event in events}) > 1 for events in self.events)
        lines = []
        for worker, events in enumerate(self.events):
            cells = ["."] * round(self.makespan)
            for event in events:
                begin, end = round(event.begin), round(event.end)
                if (begin, end) != (event.begin, event.end):
                    raise ValueError(
                        f"staircase: steps must start and end on whole units of time, got {event.begin} "
                        f"to {event.end}"
                    )
                name = f"{event.op}{event.chunk}"
                cells[begin:end] = [f"{event.part}:{name}" if several else name, *["-"] * (end - begin - 1)]
            lines.append((str(worker), cells))
        width = max((len(cell) for _, cells in lines for cell in cells), default=0)
        first = max((len(name) for name, _ in lines), default=0)
        return "\n".join(
            f"{name:>{first}}  {' '.join(cell.ljust(width) for cell in cells)}".rstrip()
            for name, cells in lines
        )


Times = float | Sequence[float]
"""Duration of a step, either one for all parts or one per part."""


def simulate(
    plan: Sequence[Iterable[Step]],
    forward: Times = 1.0,
    backward: Times = 2.0,
    capacity: int | None = None,
    weights: Times | None = None,
) -> Simulated:
    """Simulate workers that each run the steps ``plan[worker]`` in order.

    Args:
        plan: The steps of each worker. A list may contain only forward steps.
        forward: Time of a forward step, either one for all parts or one per part.
        backward: Time of a backward step, either one for all parts or one per part.
        capacity: Number of messages that fit into a channel between two workers; ``None``: no limit.
        weights: Fraction of the ``backward`` time for the gradients of the weights (default: half).

    Returns:
        The events and the peak memory of all workers.

    Raises:
        ValueError: A step occurs twice, a part is on two workers, ``B`` precedes ``F``, the workers deadlock,
            or a time or ``capacity`` is not positive. After a deadlock, the message lists the step that each
            worker is waiting for.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"simulate: capacity must be at least 1, or None for no limit, got {capacity!r}")
    lists = [list(steps) for steps in plan]
    parts = max((step.part for steps in lists for step in steps), default=-1) + 1
    network = _Network(lists, _durations(parts, forward, backward, weights), capacity)
    going = dict(enumerate(network.workers))
    while going:
        before, waits = network.moves, []
        for number, worker in list(going.items()):
            try:
                waits.append(next(worker))
            except StopIteration:
                del going[number]
        if going and network.moves == before:
            raise ValueError(f"simulate: deadlock: {'; '.join(waits)}")
    return Simulated(
        tuple(map(tuple, network.events)), tuple(int(_peak(events)) for events in network.events)
    )


def _durations(parts: int, forward: Times, backward: Times, weights: Times | None) -> dict[Op, list[float]]:
    """Return the duration of each kind of step, for each part."""
    found: dict[str, list[float]] = {}
    if weights is None:
        weights = [one / 2 for one in backward] if isinstance(backward, Sequence) else backward / 2
    for name, given in (("forward", forward), ("backward", backward), ("weights", weights)):
        times = list(given) if isinstance(given, Sequence) else [given] * max(parts, 1)
        if len(times) < parts:
            raise ValueError(f"simulate: {name} must have a time for each of {parts} parts, got {given!r}")
        for one in times:
            if not 0 < one < math.inf:
                raise ValueError(f"simulate: {name} must be a time greater than 0, got {one!r}")
        found[name] = times
    rest = [whole - own for whole, own in zip(found["backward"], found["weights"], strict=False)]
    if not all(one > 0 for one in rest):
        raise ValueError(f"simulate: weights must be less than backward={backward!r}, got {weights!r}")
    return {"F": found["forward"], "B": found["backward"], "I": rest, "W": found["weights"]}


@dataclass(slots=True)
class _Link:
    """Messages from one worker to another, in order, with the times of sending and receiving.

    ``kept`` contains the messages that have been received.
    """

    capacity: int | None
    sent: list[tuple[Step, float]] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    kept: set[Step] = field(default_factory=set)

    def full(self) -> bool:
        return self.capacity is not None and len(self.sent) - len(self.taken) >= self.capacity

    def empty(self) -> bool:
        return len(self.taken) == len(self.sent)

    def put(self, message: Step, now: float) -> float:
        """Send a message. Return the time of sending: ``now``, or the time when the channel had room."""
        if self.capacity is not None and len(self.sent) >= self.capacity:
            now = max(now, self.taken[len(self.sent) - self.capacity])
        self.sent.append((message, now))
        return now

    def take(self, now: float) -> float:
        """Receive the next message, and return the time: ``now``, or when the message arrived."""
        message, sent = self.sent[len(self.taken)]
        self.taken.append(max(now, sent))
        self.kept.add(message)
        return self.taken[-1]


class _Network:
    """Workers and the channels between them. A worker is a coroutine that yields operations to wait for.

    ``moves`` counts completed operations, to detect a deadlock.
    """

    def __init__(
        self, lists: list[list[Step]], durations: dict[Op, list[float]], capacity: int | None
    ) -> None:
        self.moves = 0
        self.events: list[list[TimelineEvent]] = [[] for _ in lists]
        self.workers = [self._work(worker, steps) for worker, steps in enumerate(lists)]
        self._durations = durations
        self._capacity = capacity
        self._owners = _owners(lists)
        self._last = max(self._owners, default=0)
        self._links: dict[tuple[int, int, Op], _Link] = {}

    def _work(self, worker: int, steps: list[Step]) -> Iterator[str]:
        now = 0.0
        done: set[Step] = set()
        for step in steps:
            if not done.isdisjoint(_done_by(step)):
                raise ValueError(f"simulate: worker {worker} must do each step once, got {step} twice")
            for needed in self._needs(step):
                now = yield from self._receive(worker, step, needed, done, now)
            begin, now = now, now + self._durations[step.op][step.part]
            self.events[worker].append(TimelineEvent(worker, step.part, step.op, 0, step.chunk, begin, now))
            done.update(_done_by(step))
            self.moves += 1
            now = yield from self._send(worker, step, now)

    def _needs(self, step: Step) -> Iterator[Step]:
        if step.op == "F" and step.part > 0:
            yield replace(step, part=step.part - 1)
        if step.op in "BI":
            yield replace(step, op="F")
            if step.part < self._last:
                yield replace(step, op="I", part=step.part + 1)
        if step.op == "W":
            yield replace(step, op="I")

    def _receive(
        self, worker: int, step: Step, needed: Step, done: set[Step], now: float
    ) -> Generator[str, None, float]:
        """Return the time at which ``worker`` received ``needed``, an input of ``step``."""
        name = replace(needed, op="B") if (step.op, needed.op) == ("B", "I") else needed
        owner = self._owners.get(needed.part)
        if owner is None:
            raise ValueError(
                f"simulate: worker {worker} needs {name} for {step}, but no worker has part {needed.part}"
            )
        if owner == worker:
            if needed not in done:
                raise ValueError(f"simulate: worker {worker} must do {name} before {step}")
            return now
        link = self._link(owner, worker, needed.op)
        while needed not in link.kept:
            if link.empty():
                yield f"worker {worker} waits before {step} for {name} from worker {owner}"
            else:
                now = link.take(now)
                self.moves += 1
        return now

    def _send(self, worker: int, step: Step, now: float) -> Generator[str, None, float]:
        """Send the result of ``step`` to the next worker, and return the time of sending."""
        receiver = self._owners.get(step.part + 1 if step.op == "F" else step.part - 1, worker)
        if receiver == worker or step.op == "W":
            return now
        # Send B as I, because the receiver waits for the gradients of the inputs in both cases.
        message = replace(step, op="I") if step.op == "B" else step
        link = self._link(worker, receiver, message.op)
        while link.full():
            yield f"worker {worker} waits after {step} for room in its channel to worker {receiver}"
        self.moves += 1
        return link.put(message, now)

    def _link(self, sender: int, receiver: int, op: Op) -> _Link:
        return self._links.setdefault((sender, receiver, op), _Link(self._capacity))


def _done_by(step: Step) -> list[Step]:
    """Return both halves of a backward pass. For any other step, return the step."""
    return [replace(step, op="I"), replace(step, op="W")] if step.op == "B" else [step]


def _owners(lists: list[list[Step]]) -> dict[int, int]:
    """Return the worker of each part, by part number."""
    owners: dict[int, int] = {}
    for worker, steps in enumerate(lists):
        for step in steps:
            if owners.setdefault(step.part, worker) != worker:
                raise ValueError(
                    f"simulate: part {step.part} must be on one worker, got {owners[step.part]} and {worker}"
                )
    return owners


def _busy(events: Iterable[TimelineEvent]) -> float:
    return sum(event.end - event.begin for event in events)


def _peak(events: Iterable[TimelineEvent], sizes: Sequence[float] | None = None) -> float:
    """Return the largest number of micro-batches that wait for their backward pass at the same time.

    If ``sizes`` is given, each micro-batch counts with the size of its part.
    """
    held = highest = 0.0
    for event in events:
        size = 1 if sizes is None else sizes[event.part or 0]
        held += {"F": size, "I": 0.0}.get(event.op, -size)
        highest = max(highest, held)
    return highest

"""What a schedule costs, without running it: how long the workers wait, and how much they hold. No torch
here.

Every worker does its steps in order. Before a step it takes what it needs of another worker; after it, it
hands on what the next one needs: the output of ``F`` to the worker of the next part, the gradient of ``B``
or ``I`` to the worker of the part before. Outputs and gradients go over links of their own, in order and with
room for ``capacity`` messages each. A worker waits for room in a full link. It takes messages only from the
link that it needs one of, and keeps what came too early.

Workers that read blockingly and write blockingly, in an order fixed beforehand, are a Kahn process network:
whether they deadlock depends on their order and on the capacity, not on how long anything takes. One
simulation settles it.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flowchan.pipelines.sequential.engine.schedule import Op, Step
from flowchan.pipelines.sequential.timeline import Timeline, TimelineEvent


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the workers did. Times are in the unit that ``forward`` and ``backward`` were given in, from 0 on.

    ``events`` are by worker, and those of a worker in their order. ``peaks`` says for each worker how many
    micro-batches it held at most, each counted once per part: those that went forward, and whose backward
    pass has not ended.
    """

    events: tuple[tuple[TimelineEvent, ...], ...]
    peaks: tuple[int, ...]

    def held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """For each worker how much it held at most, where a micro-batch's pass through a part holds so much
        of ``sizes``."""
        return tuple(_peak(events, sizes) for events in self.events)

    @property
    def makespan(self) -> float:
        """From the first step to the end of the last."""
        return max((event.end for events in self.events for event in events), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each worker, the share of the makespan that it spent without work."""
        return tuple(1 - _busy(events) / self.makespan if events else 1.0 for events in self.events)

    @property
    def bubble(self) -> float:
        """The share of all workers' time that was spent without work."""
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else 0.0

    def timeline(self, title: str = "simulated", unit: float = 1e-3) -> Timeline:
        """The same as a picture; ``unit`` is how many seconds one unit of time stands for."""
        events = (event for events in self.events for event in events)
        return Timeline(
            (event._replace(begin=event.begin * unit, end=event.end * unit) for event in events), title
        )

    def staircase(self) -> str:
        """A line per worker and a column per unit of time: ``F0`` where it begins, ``-`` where it goes on,
        ``.`` a wait.

        Raises ``ValueError`` when steps do not begin and end on whole units.
        """
        several = any(len({event.part for event in events}) > 1 for events in self.events)
        lines = []
        for worker, events in enumerate(self.events):
            cells = ["."] * round(self.makespan)
            for event in events:
                begin, end = round(event.begin), round(event.end)
                if (begin, end) != (event.begin, event.end):
                    raise ValueError(
                        f"staircase: steps must take whole units of time, not {event.begin} to {event.end}"
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
"""How long a step takes: for all parts, or by part."""


def simulate(
    plan: Sequence[Iterable[Step]],
    forward: Times = 1.0,
    backward: Times = 2.0,
    capacity: int | None = None,
    weights: Times | None = None,
) -> Simulated:
    """What happens when each worker does the steps of its list, ``plan[worker]``, in order.

    ``forward`` and ``backward`` are how long one step through one part takes, or through each of them;
    ``weights`` is how much of ``backward`` the gradients of the weights take, half if not told. ``capacity``
    is how many messages a link between two workers has room for; ``None``: any number. A list may go forward
    only.

    Raises ``ValueError`` for an order that cannot be done: a step twice, a part on two workers, ``B`` before
    ``F``, or a deadlock, and then it names who waits for what; and for times and a capacity that are none.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"simulate: capacity must be at least 1, or None for any number, not {capacity!r}")
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
    """By kind of step and part."""
    found: dict[str, list[float]] = {}
    if weights is None:
        weights = [one / 2 for one in backward] if isinstance(backward, Sequence) else backward / 2
    for name, given in (("forward", forward), ("backward", backward), ("weights", weights)):
        times = list(given) if isinstance(given, Sequence) else [given] * max(parts, 1)
        if len(times) < parts:
            raise ValueError(f"simulate: {name} must be a time for each of {parts} parts, not {given!r}")
        for one in times:
            if not 0 < one < math.inf:
                raise ValueError(f"simulate: {name} must be a time greater than 0, not {one!r}")
        found[name] = times
    rest = [whole - own for whole, own in zip(found["backward"], found["weights"], strict=False)]
    if not all(one > 0 for one in rest):
        raise ValueError(f"simulate: weights must take less than backward={backward!r}, not {weights!r}")
    return {"F": found["forward"], "B": found["backward"], "I": rest, "W": found["weights"]}


@dataclass(slots=True)
class _Link:
    """Messages on their way from one worker to another, in order: what was sent, when, and when each was
    taken. ``kept`` is what the receiver has of them."""

    capacity: int | None
    sent: list[tuple[Step, float]] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    kept: set[Step] = field(default_factory=set)

    def full(self) -> bool:
        return self.capacity is not None and len(self.sent) - len(self.taken) >= self.capacity

    def empty(self) -> bool:
        return len(self.taken) == len(self.sent)

    def put(self, message: Step, now: float) -> float:
        """When the message was put: ``now``, or when there was room for it."""
        if self.capacity is not None and len(self.sent) >= self.capacity:
            now = max(now, self.taken[len(self.sent) - self.capacity])
        self.sent.append((message, now))
        return now

    def take(self, now: float) -> float:
        """When the next message was taken: ``now``, or when it was there."""
        message, sent = self.sent[len(self.taken)]
        self.taken.append(max(now, sent))
        self.kept.add(message)
        return self.taken[-1]


class _Network:
    """Workers as coroutines that yield what they wait for, and the links between them. ``moves`` counts what
    happened."""

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
                raise ValueError(f"simulate: worker {worker} does {step} twice")
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
        """When ``worker`` has ``needed`` for ``step``."""
        name = replace(needed, op="B") if (step.op, needed.op) == ("B", "I") else needed
        owner = self._owners.get(needed.part)
        if owner is None:
            raise ValueError(
                f"simulate: worker {worker} needs {name} for {step}, and no worker has part {needed.part}"
            )
        if owner == worker:
            if needed not in done:
                raise ValueError(f"simulate: worker {worker} does {step} and has not done {name} before")
            return now
        link = self._link(owner, worker, needed.op)
        while needed not in link.kept:
            if link.empty():
                yield f"worker {worker} waits before {step} for {name} of worker {owner}"
            else:
                now = link.take(now)
                self.moves += 1
        return now

    def _send(self, worker: int, step: Step, now: float) -> Generator[str, None, float]:
        """When what came out of ``step`` is on its way to whoever needs it."""
        receiver = self._owners.get(step.part + 1 if step.op == "F" else step.part - 1, worker)
        if receiver == worker or step.op == "W":
            return now
        message = replace(step, op="I") if step.op == "B" else step  # to the receiver it is the same
        link = self._link(worker, receiver, message.op)
        while link.full():
            yield f"worker {worker} waits after {step} for room in its link to worker {receiver}"
        self.moves += 1
        return link.put(message, now)

    def _link(self, sender: int, receiver: int, op: Op) -> _Link:
        return self._links.setdefault((sender, receiver, op), _Link(self._capacity))


def _done_by(step: Step) -> list[Step]:
    """A backward pass is both of its halves."""
    return [replace(step, op="I"), replace(step, op="W")] if step.op == "B" else [step]


def _owners(lists: list[list[Step]]) -> dict[int, int]:
    """The worker of each part."""
    owners: dict[int, int] = {}
    for worker, steps in enumerate(lists):
        for step in steps:
            if owners.setdefault(step.part, worker) != worker:
                raise ValueError(
                    f"simulate: part {step.part} is on worker {owners[step.part]} and on worker {worker}"
                )
    return owners


def _busy(events: Iterable[TimelineEvent]) -> float:
    return sum(event.end - event.begin for event in events)


def _peak(events: Iterable[TimelineEvent], sizes: Sequence[float] | None = None) -> float:
    """How much is held at most by forward passes that wait for the end of their backward pass; without sizes
    how many."""
    held = highest = 0.0
    for event in events:
        size = 1 if sizes is None else sizes[event.part or 0]
        held += {"F": size, "I": 0.0}.get(event.op, -size)
        highest = max(highest, held)
    return highest

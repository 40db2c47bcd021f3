"""Generate schedules, which define the order of each worker's steps. This module does not use torch.

A batch is split into ``chunks`` micro-batches, and a model into ``parts``. Worker w of W holds the parts w, w
+ W, w + 2W, …; in a V it holds w and 2W - 1 - w. A step is the forward (``F``) or backward (``B``) pass of
one micro-batch through one part. ``F`` needs ``F`` of the previous part. ``B`` needs ``F`` of the same part
and ``B`` of the next part. Each worker runs its steps in the given order and waits for missing inputs. In the
drawings, time runs from left to right, and a dot means that the worker is waiting. The drawings assume equal
durations for forward and backward passes, but durations do not affect the order.

*gpipe*: all forward passes, then all backward passes. At its peak, each worker holds all micro-batches. Huang
et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism". ::

    0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

*1f1b*: one forward, one backward. Worker w runs W - 1 - w forward passes and then alternates. The worker
therefore holds at most W - w micro-batches. This schedule is as fast as gpipe. Narayanan et al. 2021
(PipeDream-flush), "Memory-Efficient Pipeline-Parallel DNN Training". ::

    0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

*interleaved*: 1f1b with several smaller parts per worker, which shortens the idle time at both ends.
Micro-batches pass in groups of W. A group passes through one part and then through the worker's next part,
before the next group follows. With v parts per worker, worker w runs 2 (W - 1 - w) + (v - 1) W forward passes
and then alternates. Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM". The number before the colon is the part. ::

    0  0:F0 0:F1 2:F0 2:F1 0:F2 2:B0 0:F3 2:B1 2:F2 0:B0 2:F3 0:B1 .    2:B2 .    2:B3 0:B2 0:B3
    1  .    1:F0 1:F1 3:F0 3:B0 3:F1 3:B1 1:F2 1:B0 1:F3 1:B1 3:F2 3:B2 3:F3 3:B3 1:B2 1:B3 .

In the paper, the numbers of micro-batches and of parts must be multiples of W. Here they can be any numbers.
The schedule for the next multiple is generated, and steps that do not exist are omitted. The remaining order
cannot deadlock. Multiples of W are faster, because workers are idle during omitted steps.

*Zero bubble*: a backward pass has two halves. The previous part waits only for the gradients of the inputs
(``I``). The gradients of the weights (``W``) can be computed at any time before the update, so they can fill
idle time. The drawings below assume that each half takes as long as a forward pass, as in a linear layer. No
worker waits for the first part. The adjacent ``I`` and ``W`` of that part therefore become one ``B``. Qi et
al. 2023, "Zero Bubble Pipeline Parallelism".

*zbh1*: 1f1b in which worker w computes its weight gradients w micro-batches later. Each worker holds at most
as much as the first worker in 1f1b, and is idle for a third as long. ::

    0  F0 F1 F2 .  .  B0 -  F3 B1 -  B2 -  B3 -
    1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

*zbv*: two parts per worker, the first on the way down a V and the second on the way up. The first worker
therefore computes the loss. If all three kinds of steps take the same time and there are at least twice as
many micro-batches as workers, no worker waits after its first step. Each worker holds as much as the first
worker in 1f1b. ::

    0  0:F0 0:F1 0:F2 3:F0 3:I0 3:W0 3:F1 3:I1 3:W1 0:B0 -    3:F2 3:I2 3:W2 0:B1 -    0:B2 -    .
    1  .    1:F0 2:F0 1:F1 2:F1 2:I0 2:W0 1:F2 1:I0 1:W0 2:F2 2:I1 2:W1 1:I1 2:I2 1:I2 1:W1 2:W2 1:W2

*dualpipev*: the same V. A worker alternates between forward and backward passes through its two parts, and
splits backward passes only while the pipeline is filling or emptying. DeepSeek-AI 2024, "DeepSeek-V3
Technical Report", in the cut-in-half variant by Sea AI Lab. ::

    0  0:F0 0:F1 0:F2 3:F0 3:I0 3:W0 3:F1 3:B1 -    3:F2 .    0:B0 -    3:B2 -    0:B1 -    .    .    0:B2 -
    1  .    1:F0 2:F0 1:F1 2:F1 1:F2 2:B0 -    2:F2 1:B0 -    2:B1 -    1:B1 -    2:B2 -    1:B2 -    .    .

With every schedule, a capacity of one message per direction between two workers suffices, as ``simulate``
shows.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from flowchan.items.arguments import whole
from flowchan.items.text import short

Op = Literal["F", "B", "I", "W"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zbh1", "zbv", "dualpipev"]

SCHEDULES: tuple[str, ...] = get_args(Schedule)
IN_A_V = "zbv", "dualpipev"
"""Schedules that give each worker one part on the way down and one on the way up."""

STEP = re.compile(r"(?:(?P<part>[0-9]+):)?(?P<op>[FBIW])(?P<chunk>[0-9]+)")


@dataclass(frozen=True, slots=True)
class Step:
    """Pass of micro-batch ``chunk`` through ``part``, both numbered from 0.

    ``op`` is ``"F"`` (forward), ``"B"`` (backward), or one half of a backward pass: ``"I"`` (gradients of the
    inputs) or ``"W"`` (gradients of the weights).
    """

    op: Op
    chunk: int
    part: int

    def __str__(self) -> str:
        """Return the step as text: ``1:F0`` is the forward pass of micro-batch 0 through part 1."""
        return f"{self.part}:{self.op}{self.chunk}"


def steps(schedule: Schedule, worker: int, workers: int, parts: int, chunks: int) -> Iterator[Step]:
    """Return the steps of ``worker`` in order, for a batch of ``chunks`` micro-batches.

    For each part and micro-batch, there is exactly one ``F``, and either one ``B`` or both of its halves.
    Raises ``ValueError`` or ``TypeError`` immediately if the schedule is unknown or the worker does not
    exist. The numbers are also checked: each worker needs at least one part, and at most as many as the
    schedule allows.
    """
    check("steps", schedule, workers, parts, chunks)
    whole("steps", "worker", worker, 0)
    if worker >= workers:
        raise ValueError(
            f"steps: worker must be between 0 and {workers - 1} with workers={workers}, got {worker}"
        )
    if schedule == "gpipe":
        return _gpipe(worker, chunks)
    if schedule == "zbh1":
        return _with_whole_first(_zbh1(worker, workers, chunks))
    if schedule in IN_A_V:
        found = (_zbv if schedule == "zbv" else _dualpipev)(worker, workers, chunks)
        return _with_whole_first(step for step in found if step.chunk < chunks and step.part < parts)
    if parts == workers:  # with one part per worker, parts cannot be interleaved
        return _one_forward_one_backward(worker, workers, chunks)
    return _interleaved(worker, workers, parts, chunks)


def plan(schedule: Schedule, workers: int, parts: int, chunks: int) -> list[list[Step]]:
    """Return the steps of each worker, in order. Raise the same errors as :func:`steps`."""
    check("plan", schedule, workers, parts, chunks)
    return [list(steps(schedule, worker, workers, parts, chunks)) for worker in range(workers)]


def usual_workers(schedule: Any, parts: int) -> int:
    """Return a schedule's default number of workers for a given number of parts."""
    return -(-parts // 2) if schedule in IN_A_V else parts


def check(caller: str, schedule: Any, workers: Any, parts: Any, chunks: Any) -> None:
    """Check the arguments of :func:`steps`; error messages begin with the name of ``caller``."""
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        known = " or ".join(map(repr, SCHEDULES))
        raise ValueError(f"{caller}: schedule must be {known}, got {short(schedule)}")
    whole(caller, "workers", workers, 1)
    whole(caller, "parts", parts, 1)
    whole(caller, "chunks", chunks, 1)
    if parts < workers:
        raise ValueError(f"{caller}: workers must be at most parts={parts}, got {workers}; use fewer workers")
    if schedule in IN_A_V:
        if not workers <= parts <= 2 * workers:
            raise ValueError(
                f"{caller}: parts must be at most 2 per worker with schedule={schedule!r}, got parts={parts} "
                f"for workers={workers}; use workers={usual_workers(schedule, parts)}"
            )
    elif parts > workers and schedule != "interleaved":
        raise ValueError(
            f"{caller}: schedule={schedule!r} requires one part per worker, got parts={parts} for "
            f"workers={workers}; use schedule='interleaved', or as many workers as parts"
        )


def _gpipe(part: int, chunks: int) -> Iterator[Step]:
    for chunk in range(chunks):
        yield Step("F", chunk, part)
    for chunk in range(chunks):
        yield Step("B", chunk, part)


def _one_forward_one_backward(part: int, parts: int, chunks: int) -> Iterator[Step]:
    ahead = min(parts - 1 - part, chunks)
    for chunk in range(ahead):
        yield Step("F", chunk, part)
    for chunk in range(ahead, chunks):
        yield Step("F", chunk, part)
        yield Step("B", chunk - ahead, part)
    for chunk in range(chunks - ahead, chunks):
        yield Step("B", chunk, part)


def _interleaved(worker: int, workers: int, parts: int, chunks: int) -> Iterator[Step]:
    each = -(-parts // workers)  # parts per worker, rounded up
    groups = -(-chunks // workers)
    forward = [
        (group * workers + member, own * workers + worker)
        for group in range(groups)
        for own in range(each)
        for member in range(workers)
    ]
    backward = [(chunk, (each - 1 - part // workers) * workers + worker) for chunk, part in forward]
    ahead = min(2 * (workers - 1 - worker) + (each - 1) * workers, len(forward))
    ordered = [Step("F", *where) for where in forward[:ahead]]
    for behind, where in enumerate(forward[ahead:]):
        ordered += [Step("F", *where), Step("B", *backward[behind])]
    ordered += [Step("B", *where) for where in backward[len(forward) - ahead :]]
    return (step for step in ordered if step.chunk < chunks and step.part < parts)


def _with_whole_first(steps: Iterable[Step]) -> Iterator[Step]:
    """Merge the two halves of a backward pass through the first part if they are adjacent."""
    last: Step | None = None
    for step in steps:
        if last is not None and step == Step("W", last.chunk, 0):
            yield Step("B", last.chunk, 0)
            last = None
            continue
        if last is not None:
            yield last
        last = step if (step.op, step.part) == ("I", 0) else None
        if last is None:
            yield step
    if last is not None:
        yield last


def _zbh1(part: int, parts: int, chunks: int) -> Iterator[Step]:
    ahead = min(parts - 1 - part, chunks)
    for chunk in range(ahead):
        yield Step("F", chunk, part)
    for chunk in range(chunks):
        if chunk + ahead < chunks:
            yield Step("F", chunk + ahead, part)
        yield Step("I", chunk, part)
        if chunk >= part:
            yield Step("W", chunk - part, part)
    for chunk in range(max(chunks - part, 0), chunks):
        yield Step("W", chunk, part)


class _Both:
    """Steps of a worker in a V-shaped schedule, in which each worker has two parts.

    Micro-batches pass through the ``down`` parts of all workers and then, in reverse order of the workers,
    through the ``up`` parts. Each part takes the micro-batches in order.
    """

    def __init__(self, worker: int, workers: int) -> None:
        self.down, self.up = worker, 2 * workers - 1 - worker
        self.steps: list[Step] = []
        self._next: dict[tuple[str, int], int] = {}
        # Postponed ``W`` steps, whose ``I`` steps are already done.
        self._postponed: deque[Step] = deque()

    def do(self, ops: str, part: int) -> None:
        """Append the next step of ``part`` for each letter in ``ops``.

        A ``B`` counts as both of its halves.
        """
        for op in ops:
            chunk = self.done("I" if op == "B" else op, part)
            self.steps.append(Step(cast("Op", op), chunk, part))
            for counted in ("I", "W") if op == "B" else (op,):
                self._next[counted, part] = chunk + 1
            if op == "I":
                self._postponed.append(Step("W", chunk, part))

    def done(self, op: str, part: int) -> int:
        """Return the number of micro-batches that have completed the step ``op``."""
        return self._next.get((op, part), 0)

    def pay(self) -> None:
        """Append the oldest step for weight gradients that was postponed."""
        if self._postponed:
            self.steps.append(self._postponed.popleft())


def _zbv(worker: int, workers: int, chunks: int) -> list[Step]:
    both = _Both(worker, workers)
    down, up = both.down, both.up
    # Generate steps for at least as many micro-batches as fill the pipeline. Surplus steps are omitted later.
    chunks = max(2 * workers - 1, chunks)
    for _ in range(2 * (workers - worker) - 1):
        both.do("F", down)
    for _ in range(worker):
        both.do("F", up)
        both.do("F", down)
    for _ in range(workers - worker):
        both.do("FIW", up)
    while both.done("F", up) < both.done("F", down) or both.done("F", down) < chunks:
        if both.done("F", down) < chunks:
            both.do("F", down)
        both.do("IW", down)
        both.do("FIW", up)
    for _ in range(worker):
        both.do("I", down)
        both.do("I", up)
    for _ in range(workers - worker):
        both.do("IW", down)
    for part in (up, down):
        both.do("W" * (both.done("I", part) - both.done("W", part)), part)
    return both.steps


def _dualpipev(worker: int, workers: int, chunks: int) -> list[Step]:
    both = _Both(worker, workers)
    down, up = both.down, both.up
    chunks = max(2 * workers, chunks)
    behind = workers - 1 - worker
    both.do("F" * (2 * behind), down)
    for _ in range(worker + 1):
        both.do("F", down)
        both.do("F", up)
    for _ in range(behind):
        both.do("I", up)
        both.pay()
        both.do("F", up)
    for _ in range(chunks - 2 * workers + worker + 1):
        both.do("F", down)
        both.do("B", up)
        both.do("F", up)
        both.do("B", down)
    for _ in range(behind):
        both.do("B", up)
        both.do("F", up)
        both.do("B", down)
    # Split the backward passes in the second half of these steps.
    for place in range(worker + 1):
        half = (worker + 1) // 2
        both.do("I" if place > half or (place == half and worker % 2) else "B", up)
        both.do("I" if place >= half else "B", down)
    for _ in range(behind):
        both.pay()
        both.do("I", down)
    for _ in range(worker + 1):
        both.pay()
    return both.steps


def text(steps: Iterable[Step]) -> str:
    """Format steps for :func:`parse`: ``F0 F1 B0 B1`` for a single part, ``0:F0 2:F0 …`` for several."""
    ordered = list(steps)
    one = len({step.part for step in ordered}) == 1
    return " ".join(f"{step.op}{step.chunk}" if one else str(step) for step in ordered)


def parse(text: str, part: int = 0) -> list[Step]:
    """Parse the format of :func:`text`. A step without a part number belongs to ``part``.

    Raises ``ValueError`` for a word that is not a step.
    """
    found = []
    for word in text.split():
        match = STEP.fullmatch(word)
        if match is None:
            raise ValueError(f"parse: a step must look like F0, or like 1:F0 to name the part, got {word!r}")
        where = part if match["part"] is None else int(match["part"])
        found.append(Step(cast("Op", match["op"]), int(match["chunk"]), where))
    return found

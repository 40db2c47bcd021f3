"""In which order the workers of a pipeline take their micro-batches: schedules as pure generators of steps.
No torch here.

A batch is cut into ``chunks`` micro-batches, a model into ``parts``. Worker w of W holds the parts w, w + W,
w + 2W, … or, in a V, w and 2W - 1 - w. A step is the forward (``F``) or the backward (``B``) pass of one
micro-batch through one part. ``F`` of a part needs ``F`` of the part before it; ``B`` needs ``F`` of its own
part and ``B`` of the part after it. Each worker does its steps in the order given here, and waits where
something is missing. In the drawings time goes to the right, a dot is a wait, and a backward pass takes as
long as a forward pass, which makes no difference to the order.

*gpipe*: all forward passes, then all backward passes. Every micro-batch is held at its fullest moment.
Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism". ::

    0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

*1f1b*: one forward, one backward. Worker w goes forward W - 1 - w times, then takes turns, so that it holds
no more than W - w micro-batches. As quick as gpipe. Narayanan et al. 2021 (PipeDream-flush),
"Memory-Efficient Pipeline-Parallel DNN Training". ::

    0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

*interleaved*: 1f1b over several parts per worker, which are smaller, and so are the waits at both ends.
Micro-batches go in groups of W: a group through one part, then through the worker's next part, and only then
the next group. Worker w goes forward 2 (W - 1 - w) + (v - 1) W times before it takes turns, with v parts
each. Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM". The part stands before the colon. ::

    0  0:F0 0:F1 2:F0 2:F1 0:F2 2:B0 0:F3 2:B1 2:F2 0:B0 2:F3 0:B1 .    2:B2 .    2:B3 0:B2 0:B3
    1  .    1:F0 1:F1 3:F0 3:B0 3:F1 3:B1 1:F2 1:B0 1:F3 1:B1 3:F2 3:B2 3:F3 3:B3 1:B2 1:B3 .

In the paper the number of micro-batches must be a multiple of W, and so must that of parts. Here they need
not be: the schedule for the next multiple is made, and the steps that do not exist are left out. The others
keep an order in which each of them can be done, so that there is no deadlock; but where steps are missing
workers wait, and multiples are quicker.

*Zero bubble*: a backward pass does two things. The part before waits only for the gradients of the inputs
(``I``); those of the weights (``W``) can be made at any time before the update, and so fill waits. In the
drawings below each of the two takes as long as a forward pass, as in a linear layer. The first part has
nobody who waits, so its ``I`` and ``W`` are one ``B`` where they come together. Qi et al. 2023, "Zero Bubble
Pipeline Parallelism".

*zbh1*: 1f1b whose worker w is w micro-batches behind with its weights. It holds no more than the first
worker of 1f1b does, and waits a third as long. ::

    0  F0 F1 F2 .  .  B0 -  F3 B1 -  B2 -  B3 -
    1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

*zbv*: two parts per worker, of which the first stands on the way down and the second on the way up of a V,
so that the first worker has the loss. From twice as many micro-batches as workers on, and where the three
kinds of steps take equally long, no worker waits once it has begun. It holds as much as the first worker of
1f1b does. ::

    0  0:F0 0:F1 0:F2 3:F0 3:I0 3:W0 3:F1 3:I1 3:W1 0:B0 -    3:F2 3:I2 3:W2 0:B1 -    0:B2 -    .
    1  .    1:F0 2:F0 1:F1 2:F1 2:I0 2:W0 1:F2 1:I0 1:W0 2:F2 2:I1 2:W1 1:I1 2:I2 1:I2 1:W1 2:W2 1:W2

*dualpipev*: the same V, in which a worker takes turns with forward and backward passes of its two parts, and
splits the backward pass only where the pipeline fills and empties. DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", in the half by Sea AI Lab. ::

    0  0:F0 0:F1 0:F2 3:F0 3:I0 3:W0 3:F1 3:B1 -    3:F2 .    0:B0 -    3:B2 -    0:B1 -    .    .    0:B2 -
    1  .    1:F0 2:F0 1:F1 2:F1 1:F2 2:B0 -    2:F2 1:B0 -    2:B1 -    1:B1 -    2:B2 -    1:B2 -    .    .

No schedule needs more than one place for a message in each direction between two workers (``simulate``
tells).
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
"""Schedules whose workers have a part on the way down and another on the way up."""

STEP = re.compile(r"(?:(?P<part>[0-9]+):)?(?P<op>[FBIW])(?P<chunk>[0-9]+)")


@dataclass(frozen=True, slots=True)
class Step:
    """The forward (``"F"``) or backward (``"B"``) pass of micro-batch ``chunk`` through ``part``, both from 0
    on; or of a backward pass the gradients of the inputs (``"I"``) or those of the weights (``"W"``)."""

    op: Op
    chunk: int
    part: int

    def __str__(self) -> str:
        """``1:F0``: of part 1, the forward pass of micro-batch 0."""
        return f"{self.part}:{self.op}{self.chunk}"


def steps(schedule: Schedule, worker: int, workers: int, parts: int, chunks: int) -> Iterator[Step]:
    """What ``worker`` (from 0 on) of ``workers`` does with a batch of ``chunks`` micro-batches, in order.

    Each ``F`` and each ``B``, or ``I`` and ``W``, of its parts comes exactly once. Raises ``ValueError`` or
    ``TypeError``, at once, for an unknown schedule, a worker that does not exist, fewer parts than workers,
    and more parts per worker than the schedule has.
    """
    check("steps", schedule, workers, parts, chunks)
    whole("steps", "worker", worker, 0)
    if worker >= workers:
        raise ValueError(
            f"steps: worker must be from 0 to {workers - 1} where workers={workers}, not {worker}"
        )
    if schedule == "gpipe":
        return _gpipe(worker, chunks)
    if schedule == "zbh1":
        return _with_whole_first(_zbh1(worker, workers, chunks))
    if schedule in IN_A_V:
        found = (_zbv if schedule == "zbv" else _dualpipev)(worker, workers, chunks)
        return _with_whole_first(step for step in found if step.chunk < chunks and step.part < parts)
    if parts == workers:  # nothing to interleave
        return _one_forward_one_backward(worker, workers, chunks)
    return _interleaved(worker, workers, parts, chunks)


def plan(schedule: Schedule, workers: int, parts: int, chunks: int) -> list[list[Step]]:
    """The :func:`steps` of all workers, by worker. Raises as :func:`steps` does."""
    check("plan", schedule, workers, parts, chunks)
    return [list(steps(schedule, worker, workers, parts, chunks)) for worker in range(workers)]


def usual_workers(schedule: Any, parts: int) -> int:
    """How many workers a schedule has for so many parts, unless it is said."""
    return -(-parts // 2) if schedule in IN_A_V else parts


def check(caller: str, schedule: Any, workers: Any, parts: Any, chunks: Any) -> None:
    """Raises what :func:`steps` says, with the name of ``caller`` in front."""
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        known = " or ".join(map(repr, SCHEDULES))
        raise ValueError(f"{caller}: schedule must be {known}, not {short(schedule)}")
    whole(caller, "workers", workers, 1)
    whole(caller, "parts", parts, 1)
    whole(caller, "chunks", chunks, 1)
    if parts < workers:
        raise ValueError(
            f"{caller}: parts={parts} leaves some of workers={workers} without a part: take fewer workers"
        )
    if schedule in IN_A_V:
        if not workers <= parts <= 2 * workers:
            raise ValueError(
                f"{caller}: schedule={schedule!r} gives each worker two parts, but there are parts={parts} "
                f"for workers={workers}: take workers={usual_workers(schedule, parts)}"
            )
    elif parts > workers and schedule != "interleaved":
        raise ValueError(
            f"{caller}: schedule={schedule!r} gives each worker one part, but there are parts={parts} for "
            f"workers={workers}: take schedule='interleaved', or as many workers as parts"
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
    """Both halves of a backward pass through the first part as one, where they come together."""
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
    """Steps of a worker in a V, whose ``down`` and ``up`` part each take their micro-batches in order."""

    def __init__(self, worker: int, workers: int) -> None:
        self.down, self.up = worker, 2 * workers - 1 - worker
        self.steps: list[Step] = []
        self._next: dict[tuple[str, int], int] = {}
        self._owed: deque[Step] = deque()  # weights whose inputs are done

    def do(self, ops: str, part: int) -> None:
        """The next step of each kind for ``part``; ``B`` counts as both of its halves."""
        for op in ops:
            chunk = self.done("I" if op == "B" else op, part)
            self.steps.append(Step(cast("Op", op), chunk, part))
            for counted in ("I", "W") if op == "B" else (op,):
                self._next[counted, part] = chunk + 1
            if op == "I":
                self._owed.append(Step("W", chunk, part))

    def done(self, op: str, part: int) -> int:
        """How many micro-batches have had this step."""
        return self._next.get((op, part), 0)

    def pay(self) -> None:
        """The weights that have been owed for the longest time."""
        if self._owed:
            self.steps.append(self._owed.popleft())


def _zbv(worker: int, workers: int, chunks: int) -> list[Step]:
    both = _Both(worker, workers)
    down, up = both.down, both.up
    chunks = max(2 * workers - 1, chunks)  # fewer do not fill the pipeline; what is too much is left out
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
    for place in range(worker + 1):  # the second half splits, from one of its parts on
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
    """The steps as :func:`parse` reads them: ``F0 F1 B0 B1`` where all are of one part, else ``0:F0 2:F0
    …``."""
    ordered = list(steps)
    one = len({step.part for step in ordered}) == 1
    return " ".join(f"{step.op}{step.chunk}" if one else str(step) for step in ordered)


def parse(text: str, part: int = 0) -> list[Step]:
    """The steps that :func:`text` wrote. Those that do not name their part are of ``part``.

    Raises ``ValueError`` for a word that is no step.
    """
    found = []
    for word in text.split():
        match = STEP.fullmatch(word)
        if match is None:
            raise ValueError(f"parse: {word!r} is no step: a step is written F0, B3 or, with its part, 1:F0")
        where = part if match["part"] is None else int(match["part"])
        found.append(Step(cast("Op", match["op"]), int(match["chunk"]), where))
    return found

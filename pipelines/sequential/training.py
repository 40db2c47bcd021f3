"""Training by micro-batches: the parent's side. It declares the graph of workers, feeds them, and gathers
what they answer.

The parameters stay the program's: on threads the workers train its own layers, on processes copies of them
whose parameters and buffers are the same memory. On hosts these are copies, too, and each step sends what has
changed: the program's own changes there, and those of the parts' optimizers and buffers back.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from flowchan import ChannelError, Feedback, Graph, Input, Run, RunError, StageError, Stream, WorkerDied
from flowchan.declare.places import Place
from flowchan.items.text import short
from flowchan.pipelines.sequential import worker as stages
from flowchan.pipelines.sequential.checks import without_gradient
from flowchan.pipelines.sequential.copies import Copies, Numbers
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.execution import Passed, casting_here
from flowchan.pipelines.sequential.parts import Part
from flowchan.pipelines.sequential.plans import Function, Plans, Written
from flowchan.pipelines.sequential.report import Kept, TrainingReport, measured, report
from flowchan.pipelines.sequential.schedule import Schedule, Step, text
from flowchan.pipelines.sequential.shared import share, state_tensors
from flowchan.pipelines.sequential.state import modes_of, state_of
from flowchan.pipelines.sequential.timeline import Event, Timeline
from flowchan.pipelines.sequential.values import batch_size, mapped, split
from flowchan.pipelines.sequential.worker import (
    Answer,
    Assignment,
    Evaluate,
    Item,
    Loss,
    Optimizers,
    Scale,
    Train,
    at,
)

KEPT = 10
"""Of so many last steps the timeline is kept."""


class Training:
    """What ``pipe.trainer(...)`` gives: use it in a ``with`` block, which starts the workers and ends them.

    A step that fails raises ``RunError``, whose message names the part, the schedule's step and the
    micro-batch; the training is over then. The parts that were quicker may have been updated already.
    """

    def __init__(
        self,
        cut: Cut,
        *,
        loss: Loss,
        optimizer: Optimizers | None,
        schedule: Schedule | Written | Function | None,
        workers: int | None,
        recompute: bool,
        clip: float | None,
        autocast: torch.dtype | None,
        deferred: bool,
    ) -> None:
        self._cut, self._on, self._clip = cut, cut.on, clip
        # Whether the first batch is yet to say where the parts are.
        self._open = schedule is None and workers in (None, len(cut.parts)) and cut.halvable()
        if schedule is None:
            schedule = "dualpipev" if self._open else "1f1b"
        parts = cut.halves() if self._open else cut.parts
        chunks = cut.chunks or CHUNKS
        self._plans = Plans(schedule, workers, len(parts), chunks)
        _check(parts, loss, optimizer, recompute, clip, autocast)
        self._outside = optimizer is None
        self._seen: Any = None  # the state of the layers that the processes have
        self._places = places = self._plans.places
        self._total, self._first, self._last = len(parts), places.of[0], places.of[-1]
        self._assign = partial(
            Assignment,
            places=places,
            optimizer=optimizer,
            recompute=recompute,
            clips=clip is not None,
            autocast=autocast,
            own_process=cut.on.apart,
            hosts=len(cut.on.hosts),
            deferred=deferred,
        )
        self._loss, self._chunks = loss, chunks
        self._declare(parts)
        self.schedule = [text(steps) for steps in self._plans.of(chunks)]
        """What each worker does in a step of ``chunks`` micro-batches, or of eight, as text."""
        self._copies: list[list[Copies]] = []  # of each worker's parts, where these are on other hosts
        self._run: Run | None = None
        self._begun = self._over = False
        self._answers: Iterator[Answer] | None = None
        self._steps = 0
        self._sent = [{1: 0, -1: 0} for _ in self._jobs]  # to the next worker, and to the one before
        self._done: deque[list[tuple[tuple[Event, ...], float]]] = deque(maxlen=KEPT)
        self._first_micro: Any = None
        self._kept: list[Kept] | None = None

    # --- its life ---

    def __enter__(self) -> Training:
        if self._begun:
            raise RuntimeError("this training has begun already; make another one with pipe.trainer(...)")
        self._begun = True
        if not self._open:
            self._start()
        return self

    def _declare(self, parts: Sequence[Part]) -> None:
        self._parts, places = parts, self._places
        self._jobs = [
            self._assign(
                worker=number,
                parts=tuple(parts[part] for part in places.parts(number)),
                loss=self._loss if number == self._last else None,
            )
            for number in range(places.workers)
        ]
        self._graph = Graph("Sequential training")
        self._commands, self._answered_by = _declare(self._graph, self._jobs, self._on, self._chunks)

    def _settle(self, x: Any) -> None:
        """With the first batch the workers start, where it was left to us which parts they have."""
        if self._begun and self._open and not self._over:
            self._open = False
            self._declare(self._cut.halves(x))
            self._start()

    def _start(self) -> None:
        if self._on.apart:
            share(part.module for part in self._parts if not part.away)
            self._seen = _seen(self._parts)
        self._copies = [
            [Copies(state_tensors(part.module)) for part in job.parts if part.away] for job in self._jobs
        ]
        self._run = self._graph.start()
        self._answers = self._run.iter(self._answered_by)

    @property
    def graph(self) -> Graph:
        """The workers and their channels, for ``flowchan viz``."""
        return self._graph

    @property
    def active(self) -> bool:
        """Whether it has begun and is not over."""
        return self._begun and not self._over

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run, failed = self._run, self._over
        self._answers, self._run, self._over = None, None, True
        if run is None:  # there was no batch
            return
        if error is None and failed:  # a step failed, and that was raised then
            run.abort()
            with contextlib.suppress(RunError):
                run.wait()
            return
        run.__exit__(kind, error, trace)

    # --- training ---

    def step(self, x: Any, target: Any) -> Tensor:
        """One training step with the batch ``x``: forward and backward passes of all its micro-batches, then
        the update. Gives the batch's loss: the mean of those of the micro-batches, each weighted by its size.

        With an optimizer outside, the gradients are added to the ``grad`` of the plain module's parameters
        instead, as ``loss.backward()`` does. Raises ``ValueError`` or ``TypeError`` for a batch that can't be
        split, and ``RunError`` when a part fails or its worker dies.
        """
        self._raise_if_changed()
        inputs, targets = self._split(without_gradient(x, "take the loss of pipe(x)"), target)
        self._settle(x)
        sizes = tuple(map(batch_size, inputs))
        if not self._steps:
            self._first_micro = mapped(lambda one: one.detach().cpu().clone(), inputs[0])
        seed = int(torch.randint(2**31, ()))
        plan = self._plans.of(len(sizes))
        with self._commanding(f"step {self._steps}", len(sizes), plan):
            for job in self._jobs:
                order = text(plan[job.worker])
                self._put(job.worker, Train(self._steps, sizes, seed, order, self._changed(job)))
            for chunk, (value, wanted) in enumerate(zip(inputs, targets, strict=True)):
                self._put(self._first, Item(("F", 0, chunk), Passed(self._light(value), {}, ())))
                self._put(self._last, Item(("T", self._total - 1, chunk), self._light(wanted)))
            if self._clip is not None:
                norm = math.sqrt(sum(answer.square for answer in self._answered()))
                # as torch's clip_grad_norm_, also where it is not a number
                factor = self._clip / (norm + 1e-6)
                for job in self._jobs:
                    self._put(job.worker, Scale(1.0 if factor >= 1.0 else factor))
            answers = self._answered()
        self._done.append([(answer.events, answer.communication) for answer in answers])
        self._steps += 1
        self._count_changes()
        for job, answer in zip(self._jobs, answers, strict=True):
            for copies, changed in zip(self._copies[job.worker], answer.changed, strict=True):
                copies.take(changed)
            add_gradients(job.parameters, answer.values)
        loss = answers[self._last].loss
        assert loss is not None
        return loss

    def evaluate(self, x: Any) -> Any:
        """The output for the batch ``x`` with the parameters of now, in ``eval`` mode and without
        gradients."""
        self._raise_if_changed()
        inputs = self._cut.split(without_gradient(x, "call it under torch.no_grad()"))
        self._settle(x)
        plan = [[step for step in own if step.op == "F"] for own in self._plans.of(len(inputs))]
        with self._commanding("an evaluation", len(inputs), plan):
            for job in self._jobs:
                self._put(job.worker, Evaluate(len(inputs), text(plan[job.worker]), self._changed(job)))
            for chunk, value in enumerate(inputs):
                self._put(self._first, Item(("F", 0, chunk), Passed(self._light(value), {}, ())))
            outputs = self._answered()[self._last].values
        assert outputs is not None
        return self._cut.joined(outputs, list(map(batch_size, inputs)), "the evaluation")

    def timeline(self) -> Timeline:
        """What the workers did and when, in the last ten steps."""
        found = (event for step in self._done for events, _ in step for event in events)
        return Timeline(found, self._graph.name)

    def report(self) -> TrainingReport:
        """What the last ten steps cost: how long workers waited, the share of communication, and how many
        bytes each part held at most. For the last it runs copies of the layers once, with a micro-batch of
        the first step."""
        if self._kept is None and self._first_micro is not None:
            self._kept = measured(self._parts, self._first_micro)
            self._first_micro = None
        return report(list(self._done), self._parts, self._kept or [Kept(0.0, 0.0)] * self._total)

    # --- behind it ---

    def _raise_if_changed(self) -> None:
        """The processes compute with the layers as these were at the beginning, and all workers with the
        types of then."""
        if casting_here():
            raise RuntimeError("torch.autocast does not reach a training: give pipe.trainer(…, autocast=…)")
        if self._on.apart and self._answers is not None and self._seen != _seen(self._parts):
            raise RuntimeError(
                "a layer has changed since this training began (its mode, an attribute, a hook, or where "
                "its parameters are), and the parts' processes have it as it was: leave the with block "
                "first, and begin another training"
            )

    def _count_changes(self) -> None:
        """The processes have changed parameters where torch here did not see it: graphs that have saved one
        of them raise in their backward pass."""
        if self._on.apart and not self._on.hosts and not self._outside:
            for part in self._parts:
                for parameter in part.module.parameters():
                    torch.autograd.graph.increment_version(parameter)

    def _changed(self, job: Assignment) -> list[Numbers]:
        return [copies.changed() for copies in self._copies[job.worker]]

    def _split(self, x: Any, target: Any) -> tuple[list[Any], list[Any]]:
        inputs = self._cut.split(x)
        samples, wanted = batch_size(x), batch_size(target, "target")
        if samples != wanted:
            raise ValueError(
                f"step: x has a batch of {samples}, but target one of {wanted}; give a target for each sample"
            )
        return inputs, split(target, len(inputs), "target")

    def _light(self, value: Any) -> Any:
        return value if not self._on.apart else mapped(lambda tensor: tensor.detach().cpu(), value)

    def _put(self, worker: int, item: Any) -> None:
        assert self._run is not None
        self._run[self._commands[worker]].put(item)

    def _answered(self) -> list[Answer]:
        """One answer of each worker, by worker."""
        assert self._answers is not None
        return sorted([next(self._answers) for _ in self._jobs], key=lambda answer: answer.worker)

    @contextlib.contextmanager
    def _commanding(self, doing: str, chunks: int, plan: list[list[Step]]) -> Iterator[None]:
        """Within it workers do something. Whatever breaks it off ends the training; a failure is told by its
        place."""
        if self._over:
            raise RuntimeError("this training is over; make another one with pipe.trainer(...)")
        if not self._begun:
            raise RuntimeError("this training has not begun: begin it, `with pipe.trainer(...) as training:`")
        assert self._run is not None
        try:
            yield
            for job, sent in zip(self._jobs, self._sent, strict=True):
                for step in plan[job.worker]:
                    if side := self._places.sends(job.worker, step):
                        sent[side] += 1
        except (ChannelError, StopIteration, RunError) as error:
            self._over = True
            raise self._told(error, doing, chunks, plan) from None
        except BaseException:
            self._over = True
            raise

    def _told(self, error: BaseException, doing: str, chunks: int, plan: list[list[Step]]) -> BaseException:
        """The failure of the run, with the place of the first one in its message."""
        assert self._run is not None
        with contextlib.suppress(RunError):  # it waits for the end, and nobody reads the answers any more
            self._run.__exit__(type(error), error, error.__traceback__)
        if not isinstance(error, RunError):
            try:
                self._run.wait()
            except RunError as failed:
                error = failed
            else:
                return RuntimeError("the run of this training was stopped from outside")
        failures = [failure for failure in error.exceptions if isinstance(failure, StageError)]
        failure = failures[0]
        cause = failure.__cause__ or failure
        if isinstance(cause, WorkerDied):
            job = next(job for job in self._jobs if _name(job) == failure.stage)
            place = f"{' and '.join(map(str, job.parts))}, {doing}, {self._reached(job, chunks, plan)}"
        else:
            notes = [note for note in getattr(cause, "__notes__", ()) if note.startswith("part ")]
            place = notes[0] if notes else f"{failure.stage}, {doing}"
        return RunError(f"{place}: {type(cause).__name__}: {cause}", failures)

    def _reached(self, job: Assignment, chunks: int, plan: list[list[Step]]) -> str:
        """How far a worker that died had come for certain, from what the others had taken of what it sent."""
        assert self._run is not None
        ports = {f"{_name(job)}.onward": 1, f"{_name(job)}.back": -1}
        taken = {ports[link.name]: link.passed for link in self._run.stats().links if link.name in ports}
        left = {side: taken.get(side, 0) - self._sent[job.worker][side] for side in (1, -1)}
        done = None
        for step in plan[job.worker]:
            side = self._places.sends(job.worker, step)
            if side and left[side] > 0:
                left[side] -= 1
                done = step
        if done is None:
            return "before anything of it was seen"
        name = text([done]) if len(job.parts) == 1 else str(done)
        return f"after {name} (micro-batch {done.chunk} of {chunks})"


def _seen(parts: Sequence[Part]) -> Any:
    return state_of(parts), modes_of(parts)


def add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None] | None) -> None:
    """Adds to the ``grad`` of parameters, in memory of their own, as a backward pass does."""
    for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
        if gradient is not None and parameter.grad is None:
            parameter.grad = gradient.detach().to(parameter.device, copy=True)
        elif gradient is not None and parameter.grad is not None:
            parameter.grad += gradient.to(parameter.device)


def _declare(
    graph: Graph, jobs: Sequence[Assignment], on: Place, chunks: int
) -> tuple[list[Input[Any]], Stream[Any]]:
    """The graph of a training: its inputs, and the stream of answers. In a ring the last worker's activations
    go on to the first one, and the first one's gradients back to the last."""
    size = len(jobs)
    ring = jobs[0].places.ring
    # Room for all that a worker sends in a step: nobody waits for room, so no order can lock workers up.
    capacity = 2 * chunks * max(len(job.parts) for job in jobs) + 8
    commands = [graph.input(f"commands {number}", capacity) for number in range(size)]
    round_about = graph.feedback("activations of the last worker") if ring else None
    onward: Stream[Any] | None = round_about
    gradients: list[Feedback[Any]] = []
    backs: list[Stream[Any]] = []
    answers: list[Stream[Any]] = []
    for job in jobs:
        inputs = [commands[job.worker], *([onward] if onward is not None else [])]
        if ring or job.worker < size - 1:
            gradients.append(graph.feedback(f"gradients for {_name(job)}"))
            inputs.append(gradients[-1])
        function = _FUNCTIONS[onward is not None, ring or job.worker < size - 1]
        outs = graph.stage(function, *inputs, name=_name(job), on=on, capacity=capacity, job=job)
        named = {stream.port: stream for stream in (outs if isinstance(outs, tuple) else (outs,))}
        answers.append(named["answers"])
        onward = named.get("onward")
        if "back" in named:
            backs.append(named["back"])
        graph._drawn[_name(job)] = "\n".join(part.drawn for part in job.parts)
    graph._drawn |= dict.fromkeys([*(f"commands {number}" for number in range(size)), "merge", "answers"])
    if ring:
        assert round_about is not None
        assert onward is not None
        round_about.feed(onward)
        backs = [*backs[1:], backs[0]]
    for feedback, back in zip(gradients, backs, strict=True):
        feedback.feed(back)
    return commands, graph.merge(*answers, name="merge").collect(name="answers")


_FUNCTIONS: dict[tuple[bool, bool], Callable[..., None]] = {
    (False, False): stages.alone,
    (False, True): stages.first,
    (True, True): stages.middle,
    (True, False): stages.last,
}
"""By whether there is a worker before, and one behind."""


def _name(job: Assignment) -> str:
    """``part 1``, or ``parts 0 and 2``."""
    numbers = [str(part.number) for part in job.parts]
    return f"part{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"


def _check(
    parts: Sequence[Part],
    loss: Any,
    optimizer: Any,
    recompute: Any,
    clip: Any,
    autocast: Any,
) -> None:
    """Raises ``TypeError`` or ``ValueError`` for what is wrong by itself."""
    if isinstance(loss, type):
        raise TypeError(
            f"training: loss is the class {loss.__name__}; give an instance of it: {loss.__name__}()"
        )
    if not callable(loss):
        raise TypeError(f"training: loss must be a function of output and target, not {short(loss)}")
    if isinstance(loss, torch.nn.Module) and any(one.requires_grad for one in loss.parameters()):
        raise ValueError(
            "training: the loss has parameters of its own, which would not learn; take the loss of pipe(x)"
        )
    if optimizer is not None:
        _check_optimizer(parts, optimizer)
    if not isinstance(recompute, bool):
        raise TypeError(f"training: recompute must be True or False, not {short(recompute)}")
    if clip is not None:
        if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip > 0:
            raise ValueError(
                f"training: clip must be the largest norm, greater than 0, or None, not {short(clip)}"
            )
        if optimizer is None:
            raise ValueError(
                "training: clip needs an optimizer in the parts; with one outside, call "
                "torch.nn.utils.clip_grad_norm_(module.parameters(), ...) between step and update"
            )
    if autocast is not None and (not isinstance(autocast, torch.dtype) or not autocast.is_floating_point):
        raise TypeError(
            "training: autocast must be a floating type such as torch.bfloat16, or None, "
            f"not {short(autocast)}"
        )
    owners: dict[int, Part] = {}
    for part in parts:
        named: list[tuple[str, str, Tensor]] = [("parameter", *one) for one in part.module.named_parameters()]
        named += [("buffer", *one) for one in part.module.named_buffers()]
        for kind, name, tensor in named:
            owner = owners.setdefault(id(tensor), part)
            if owner is not part:
                raise ValueError(
                    f"training: {part} shares {kind} {name!r} with {owner}; each part trains its own: "
                    "put the layers that share it into one part"
                )
            if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"training: {kind} {name!r} of {part} has a hook, which a step would call for each "
                    "micro-batch, or not at all; take the loss of pipe(x), or register it in the layer's "
                    "own code"
                )


def _check_optimizer(parts: Sequence[Part], optimizer: Any) -> None:
    """Makes what the workers will make, and forgets it. That loads what optimizers need, before processes are
    forked."""
    if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "training: optimizer must be a function that makes one of a list of parameters, such as "
            "partial(SGD, lr=0.1), "
            f"or None for one outside; not {type(optimizer).__name__}"
        )
    for part in parts:
        parameters = list(part.module.parameters())
        if parameters:
            with at(part, "making its optimizer"):
                made = optimizer(parameters)
            if not callable(getattr(made, "step", None)):
                raise TypeError(
                    f"training: optimizer must make an optimizer, with a step(), not a {type(made).__name__}"
                )

"""A worker of a training: it holds some parts of the model and follows the steps of the schedule, in order.

The parent sends commands, and with them micro-batches to the worker of the first part and targets to that of
the last. Activations go to the worker of the next part, gradients go back to that of the part before: workers
have a channel to each of their neighbours. Before each step the worker takes what it needs; what came too
early waits here.
Each command is answered once; a step with clipping twice, for the gradients are scaled only when all workers'
are known.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from flowchan import Drained, In, Out
from flowchan.pipelines.sequential.copies import Numbers
from flowchan.pipelines.sequential.execution import GENERATOR, Casting, Execution, Passed, Tail
from flowchan.pipelines.sequential.parts import Part, take_cores
from flowchan.pipelines.sequential.plans import Places
from flowchan.pipelines.sequential.schedule import Step, parse
from flowchan.pipelines.sequential.shared import State
from flowchan.pipelines.sequential.timeline import Event, Op
from flowchan.pipelines.sequential.values import join, mapped, tensors

Loss = Callable[[Any, Any], Tensor]
Optimizers = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class Assignment:
    """What a worker is told at its start. ``loss`` is for the last part's worker alone. ``optimizer`` is
    ``None`` when the gradients are for one outside. ``own_process``: it does not run on a thread of the
    parent, but perhaps on one of so many other ``hosts``."""

    worker: int
    places: Places
    parts: tuple[Part, ...]
    loss: Loss | None
    optimizer: Optimizers | None
    recompute: bool
    clips: bool
    autocast: torch.dtype | None
    own_process: bool
    hosts: int
    deferred: bool

    @property
    def total(self) -> int:
        """How many parts there are with all workers."""
        return len(self.places.of)

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for part in self.parts for parameter in part.module.parameters()]


# Commands


class Train(NamedTuple):
    """Do training step ``number`` with micro-batches of ``sizes`` samples, in the order of ``plan``.
    ``changed``: by part, what has changed here in the meantime."""

    number: int
    sizes: tuple[int, ...]
    seed: int
    plan: str
    changed: list[Numbers]


class Scale(NamedTuple):
    """Multiply the gradients, then update."""

    factor: float


class Evaluate(NamedTuple):
    """Let so many micro-batches pass in ``eval`` mode, in the order of the forward steps of ``plan``."""

    chunks: int
    plan: str
    changed: list[Numbers]


# What is on the way. The key says what it is: "F" what a forward step needs, "B" a backward step, "T" a
# target.

Key = tuple[str, int, int]


class Item(NamedTuple):
    """Something that a step of ``part`` (in ``key``) needs, for micro-batch ``key[2]``."""

    key: Key
    content: Any


# Answers


class Answer(NamedTuple):
    """What came of a command. ``loss`` of the step comes from the last part's worker; ``square`` is the sum
    of the squares of all gradients; ``values`` are gradients or outputs, as the command asks for;
    ``communication`` is how many seconds of a core went into handing things on, and ``changed`` what a worker
    on another host has changed, by part."""

    worker: int
    events: tuple[Event, ...] = ()
    loss: Tensor | None = None
    square: float = 0.0
    values: list[Any] | None = None
    communication: float = 0.0
    changed: Sequence[Numbers] = ()


# Stages. Which ports a worker has depends on where it stands: ``forward`` and ``backward`` bring what the
# worker before and the one behind have for it, ``onward`` and ``back`` take to them what it has.


def alone(commands: In[Any], answers: Out[Any], job: Assignment) -> None:
    """The only worker."""
    Worker(job, commands, answers).run()


def first(commands: In[Any], backward: In[Any], answers: Out[Any], onward: Out[Any], job: Assignment) -> None:
    """The worker of the first part and no other."""
    Worker(job, commands, answers, backward=backward, onward=onward).run()


def middle(
    commands: In[Any],
    forward: In[Any],
    backward: In[Any],
    answers: Out[Any],
    onward: Out[Any],
    back: Out[Any],
    job: Assignment,
) -> None:
    """A worker between two others, as all are in a ring."""
    Worker(job, commands, answers, forward, backward, onward, back).run()


def last(commands: In[Any], forward: In[Any], answers: Out[Any], back: Out[Any], job: Assignment) -> None:
    """The worker of the last part and no other."""
    Worker(job, commands, answers, forward=forward, back=back).run()


class Worker:
    """One worker at work. ``run`` returns when no more commands can come."""

    def __init__(
        self,
        job: Assignment,
        commands: In[Any],
        answers: Out[Any],
        forward: In[Any] | None = None,
        backward: In[Any] | None = None,
        onward: Out[Any] | None = None,
        back: Out[Any] | None = None,
    ) -> None:
        self.job = job
        self.commands, self.answers = commands, answers
        self.forward, self.backward, self.onward, self.back = forward, backward, onward, back
        self.optimizers: list[tuple[Part, Optimizer]] = []
        self.states: list[State] = []
        self.executions: dict[int, Execution] = {}
        self.early: dict[Key, Any] = {}
        self.events: list[Event] = []
        self.losses: list[Tensor] = []
        self.communication = 0.0
        self.plans: dict[str, list[Step]] = {}  # as they were read
        self.first: dict[int, tuple[Any, Any]] = {}  # outputs and targets of the first step

    def run(self) -> None:
        if self.job.own_process:
            take_cores(self.job.worker, self.job.places.workers, self.job.hosts)
        try:
            self._build()
            with contextlib.suppress(Drained):  # the parent, or the worker before, has ended
                for command in self.commands:
                    self.answers.put(self._do(command))
        finally:
            for execution in self.executions.values():
                execution.close()

    def _build(self) -> None:
        job = self.job
        for part in job.parts:
            if job.own_process:
                self.states.append(State(part.module, part.device))
            self.executions[part.number] = Execution(
                part, recompute=job.recompute, shared=not job.own_process, deferred=job.deferred
            )
            parameters = list(part.module.parameters())
            if job.optimizer is not None and parameters:
                with at(part, "making its optimizer"):
                    self.optimizers.append((part, job.optimizer(parameters)))  # type: ignore[arg-type]

    def _do(self, command: Any) -> Answer:
        for number, state in enumerate(self.states):
            state.take(command.changed[number] if self.job.hosts else None)
        if isinstance(command, Train):
            return self._train(command)
        assert isinstance(command, Evaluate), command
        return self._evaluate(command)

    # --- a training step ---

    def _train(self, train: Train) -> Answer:
        job = self.job
        self.events, self.losses, self.communication = [], [], 0.0
        if job.optimizer is not None or job.own_process:  # else they add up where the user has them
            for parameter in job.parameters:
                parameter.grad = None
        plan = self._steps(train.plan)
        for step, following in zip(plan, [*plan[1:], None], strict=True):
            with at(
                self.executions[step.part].part, f"step {step.op}{step.chunk}", step.chunk, len(train.sizes)
            ):
                if step.op == "F":
                    # elsewhere the backward step waits for the parts behind
                    at_end = step.part == self.job.total - 1
                    back = Step("B", step.chunk, step.part), Step("I", step.chunk, step.part)
                    self._go_forward(step, train, soon=at_end and following in back)
                elif step.op == "W":
                    with self._timed("W", train.number, step):
                        self.executions[step.part].weights((train.number, step.chunk))
                else:
                    self._go_backward(step, train)
        self._check_mean()
        for execution in self.executions.values():
            execution.norms.commit()
        if job.optimizer is not None:
            self._update(train)
        for state in self.states:
            state.give()
        values = (
            self._light([parameter.grad for parameter in job.parameters]) if self._sends_gradients else None
        )
        loss = torch.stack(self.losses).sum() if self.losses else None
        changed = [state.changed() for state in self.states] if job.hosts else []
        return Answer(job.worker, tuple(self.events), loss, 0.0, values, self.communication, changed)

    def _steps(self, plan: str) -> list[Step]:
        if plan not in self.plans:
            self.plans[plan] = parse(plan, self.job.parts[0].number)
        return self.plans[plan]

    def _check_mean(self) -> None:
        """After the first step: whether the loss of the whole batch is the mean of those of its
        micro-batches."""
        if not self.first:
            return
        outputs, targets = (join(list(found)) for found in zip(*self.first.values(), strict=True))
        self.first.clear()
        with torch.no_grad(), GENERATOR, torch.random.fork_rng([]):
            whole = float(weighted(outputs, self.job.loss, targets, 1.0))
        mean = float(torch.stack(self.losses).sum())
        rough = self.job.autocast or any(one.dtype.itemsize < 4 for one in tensors(outputs))
        near = math.isclose(mean, whole, rel_tol=0.03 if rough else 1e-3, abs_tol=1e-6)
        if not near and math.isfinite(mean) and math.isfinite(whole):
            raise ValueError(
                f"the loss is no mean over the samples: it is {whole:.6g} for the first batch, but "
                f"{mean:.6g} as the mean over its micro-batches, of which a step makes its gradients; "
                "give a loss that is a mean (no sum, no weights, nothing ignored), or take the loss of "
                "pipe(x)"
            )

    def _casting(self, execution: Execution) -> Casting:
        device = execution.part.device
        return (
            () if (kind := self.job.autocast) is None else ((device.type if device else "cpu", kind, True),)
        )

    @property
    def _sends_gradients(self) -> bool:
        return self.job.optimizer is None and self.job.own_process

    def _go_forward(self, step: Step, train: Train, soon: bool) -> None:
        passed: Passed = self._take(("F", step.part, step.chunk), step.part - 1)
        tail = self._tail(step, train) if step.part == self.job.total - 1 else None
        seed = train.seed + (step.part << 16) + step.chunk
        with self._timed("F", train.number, step):
            execution = self.executions[step.part]
            output = execution.forward(
                (train.number, step.chunk), passed, seed, tail, self._casting(execution), soon
            )
        if tail is None:
            self._put(("F", step.part + 1, step.chunk), self._packed(output))
        else:
            self.losses.append(output.value)

    def _tail(self, step: Step, train: Train) -> Tail:
        target = self._take(("T", step.part, step.chunk), None)
        device = self.executions[step.part].part.device
        if device is not None:
            target = mapped(lambda tensor: tensor.to(device), target)
        share = train.sizes[step.chunk] / max(sum(train.sizes), 1)
        loss = functools.partial(weighted, loss=self.job.loss, target=target, share=share)
        if train.number or len(train.sizes) == 1:
            return loss

        def noted(output: Any) -> Tensor:
            self.first[step.chunk] = mapped(Tensor.detach, output), target
            return loss(output)

        return noted

    def _go_backward(self, step: Step, train: Train) -> None:
        execution = self.executions[step.part]
        gradients: tuple[Tensor | None, ...] | None = None
        if step.part < self.job.total - 1:
            gradients = self._take(("B", step.part, step.chunk), step.part + 1)
        key = train.number, step.chunk
        if execution.is_to_be_done_again(key):
            with self._timed("recompute", train.number, step):
                execution.again(key)
        with self._timed(step.op, train.number, step):
            found = (execution.backward if step.op == "B" else execution.inputs)(key, gradients)
        if step.part > 0:
            self._put(("B", step.part - 1, step.chunk), self._light(found))

    def _update(self, train: Train) -> None:
        """Clips, as ``torch.nn.utils.clip_grad_norm_`` does over the gradients of all workers, and
        updates."""
        gradients = [parameter.grad for parameter in self.job.parameters if parameter.grad is not None]
        scale = Scale(1.0)
        if self.job.clips:
            norms = [float(torch.linalg.vector_norm(gradient)) for gradient in gradients]
            self.answers.put(Answer(self.job.worker, square=sum(norm * norm for norm in norms)))
            scale = self.commands.get()
        begin = time.monotonic()
        if scale.factor != 1.0:
            for gradient in gradients:
                gradient.mul_(scale.factor)
        for part, optimizer in self.optimizers:
            with at(part, f"update at the end of step {train.number}"):
                optimizer.step()
        self.events.append(
            Event(self.job.worker, None, "update", train.number, None, begin, time.monotonic())
        )

    # --- evaluation ---

    def _evaluate(self, command: Evaluate) -> Answer:
        job = self.job
        outputs: list[tuple[int, Any]] = []
        for step in (step for step in self._steps(command.plan) if step.op == "F"):
            execution = self.executions[step.part]
            with at(execution.part, f"evaluation, step F{step.chunk}", step.chunk, command.chunks):
                passed = self._take(("F", step.part, step.chunk), step.part - 1)
                output = execution.evaluate(passed, self._casting(execution))
            if step.part == job.total - 1:
                outputs.append((step.chunk, self._light(output.value)))
            else:
                self._put(("F", step.part + 1, step.chunk), self._packed(output))
        return Answer(
            job.worker, values=[value for _, value in sorted(outputs, key=lambda output: output[0])]
        )

    # --- ports ---

    def _take(self, key: Key, sender: int | None) -> Any:
        """What a step needs, of part ``sender``, or of the program where there is no such part."""
        side = None if sender in (None, -1) else self.job.places.towards(self.job.worker, sender or 0)
        port = self.commands if side is None else self.forward if side < 0 else self.backward
        begin = time.thread_time()  # which stands still while it waits
        while key not in self.early:
            assert port is not None
            item = port.get()
            self.early[item.key] = item.content
        self.communication += time.thread_time() - begin
        return self.early.pop(key)

    def _put(self, key: Key, content: Any) -> None:
        """Hands something to the worker of part ``key[1]``."""
        side = self.job.places.towards(self.job.worker, key[1])
        if not side:
            self.early[key] = content
            return
        port = self.onward if side > 0 else self.back
        assert port is not None
        begin = time.thread_time()
        port.put(Item(key, content))
        self.communication += time.thread_time() - begin

    def _packed(self, passed: Passed) -> Passed:
        return Passed(self._light(passed.value), self._light(passed.skips), passed.wants)

    def _light(self, value: Any) -> Any:
        """What is sent: between processes what is in main memory."""
        return value if not self.job.own_process else mapped(Tensor.cpu, value)

    @contextlib.contextmanager
    def _timed(self, op: Op, number: int, step: Step) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.events.append(Event(self.job.worker, step.part, op, number, step.chunk, begin, time.monotonic()))


@contextlib.contextmanager
def at(part: Part, doing: str, chunk: int | None = None, chunks: int = 0) -> Iterator[None]:
    """Notes on an error where it happened."""
    try:
        yield
    except BaseException as error:
        micro = "" if chunk is None else f" (micro-batch {chunk} of {chunks})"
        error.add_note(f"{part}, {doing}{micro}")
        raise


def weighted(output: Any, loss: Loss | None, target: Any, share: float) -> Tensor:
    """A micro-batch's loss, weighted by its share of the batch."""
    assert loss is not None
    found: Any = loss(output, target)
    if not isinstance(found, Tensor) or found.dim() != 0:
        what = (
            f"one of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        )
        raise TypeError(f"the loss must be a tensor without dimensions, the mean over the batch, not {what}")
    if not found.requires_grad and any(one.requires_grad for one in tensors(output)):
        raise ValueError(
            "the loss does not depend on the model's output (it has no grad_fn), so nothing "
            "would be learned; was it "
            "detached, or computed under torch.no_grad()?"
        )
    if share < 1 and bool(found.isnan()) and all(bool(one.isfinite().all()) for one in tensors(output)):
        raise ValueError(
            "the loss of this micro-batch is NaN, though the model's output is finite: a mean "
            "over no sample at all, as "
            "that of cross_entropy where each target is its ignore_index? Micro-batches' losses "
            "are averaged, so that "
            "everything would become NaN: take fewer chunks, or a loss that divides by the micro-batch's size"
        )
    return found * share

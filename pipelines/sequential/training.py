"""Implement the program's side of step-by-step training.

The program declares the graph of workers, sends batches and collects answers.

The program owns the parameters. Threads train the program's own layers. Processes train copies whose
parameters and buffers share the program's memory. On other hosts, the copies have separate memory. Each step
sends the program's changes to the workers, and returns the changes made by optimizers and in buffers.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowchan import ChannelError, Graph, RunError, StageError, WorkerDied
from flowchan.pipelines.sequential.cuda_streams import from_workers, to_workers
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.engine.driver import WorkersRun
from flowchan.pipelines.sequential.engine.plans import Function, Plans, Written
from flowchan.pipelines.sequential.engine.schedule import Schedule, Step, text
from flowchan.pipelines.sequential.engine.worker_messages import (
    Assignment,
    Evaluate,
    LoadState,
    Loss,
    Optimizers,
    SaveState,
    ScaleGradients,
    Train,
)
from flowchan.pipelines.sequential.parts import Part, current_casting
from flowchan.pipelines.sequential.shared_memory import share
from flowchan.pipelines.sequential.state import modes_of, state_of
from flowchan.pipelines.sequential.tensor_trees import batch_size, mapped, split, without_gradient
from flowchan.pipelines.sequential.timeline import Timeline, TimelineEvent
from flowchan.pipelines.sequential.training_checks import check_training
from flowchan.pipelines.sequential.training_report import Kept, TrainingReport, measured, report
from flowchan.pipelines.sequential.training_state import copied, layer_counts, optimizer_name, parts_for
from flowchan.public import public

KEPT = 10
"""Number of steps that the timeline keeps."""


class TrainingOptions(NamedTuple):
    """Arguments of ``pipe.trainer(...)`` that its workers need."""

    loss: Loss
    optimizer: Optimizers | None
    recompute: bool
    clip: float | None
    autocast: torch.dtype | None
    deferred: bool


@public
class Training:
    """Trainer of a pipe, returned by ``pipe.trainer(...)``.

    Use it in a ``with`` block, which starts and ends the workers. A step that fails raises ``RunError``. The
    message names the part, the step in the schedule and the micro-batch. Training is then over, and some
    parts may already have updated their parameters.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.pipelines import Sequential
        >>> pipe = Sequential([nn.Linear(4, 8), nn.Linear(8, 1)])
        >>> sgd = partial(torch.optim.SGD, lr=0.1)
        >>> x, target = torch.ones(16, 4), torch.zeros(16, 1)
        >>> with pipe.trainer(loss=nn.MSELoss(), optimizer=sgd) as training:
        ...     loss = training.step(x, target)
        ...     output = training.evaluate(x)
        >>> output.shape
        torch.Size([16, 1])
        >>> table, events = str(training.report()), training.timeline().events
    """

    def __init__(
        self,
        cut: Cut,
        options: TrainingOptions,
        schedule: Schedule | Written | Function | None,
        workers: int | None,
    ) -> None:
        self._cut, self._on, self._clip = cut, cut.on, options.clip
        # True if the first batch determines the cut.
        self._open = schedule is None and workers in (None, len(cut.parts)) and cut.halvable()
        if schedule is None:
            schedule = "dualpipev" if self._open else "1f1b"
        parts = cut.halves() if self._open else cut.parts
        chunks = cut.chunks or CHUNKS
        self._plans = Plans(schedule, workers, len(parts), chunks)
        check_training(parts, *options[:5])
        self._outside = options.optimizer is None
        self._seen: Any = None  # state of the layers in the worker processes
        self._owners = self._plans.owners
        self._options, self._chunks = options, chunks
        self._declare(parts)
        self.schedule = [text(steps) for steps in self._plans.of(chunks)]
        """Each worker's steps as text, for ``chunks`` micro-batches (8 if ``chunks`` is ``None``)."""
        self._begun = self._over = False
        self._steps = 0
        # For each worker, the number of messages that it has sent to each neighbour.
        self._sent = [{1: 0, -1: 0} for _ in range(self._owners.workers)]
        self._done: deque[list[tuple[tuple[TimelineEvent, ...], float]]] = deque(maxlen=KEPT)
        self._first_micro: Any = None
        self._kept: list[Kept] | None = None

    # --- starting and ending ---

    def __enter__(self) -> Training:
        if self._begun:
            raise RuntimeError(
                "training: training has already started; create a new one with pipe.trainer(...)"
            )
        self._begun = True
        if not self._open:
            self._start()
        return self

    def _declare(self, parts: Sequence[Part]) -> None:
        options, last = self._options, self._owners.of[-1]
        job = Assignment(
            worker=0,
            owners=self._owners,
            parts=(),
            recompute=options.recompute,
            deferred=options.deferred,
            own_process=self._on.own_process,
            hosts=len(self._on.hosts),
            trains=True,
            optimizer=options.optimizer,
            clips=options.clip is not None,
            autocast=options.autocast,
        )
        self._parts = parts
        self._jobs = [
            replace(
                job,
                worker=number,
                parts=tuple(parts[part] for part in self._owners.parts(number)),
                loss=options.loss if number == last else None,
            )
            for number in range(self._owners.workers)
        ]
        self._run = WorkersRun("Sequential training", self._jobs, self._on, self._chunks)

    def _settle(self, x: Any) -> None:
        """Start the workers on the first batch if that batch determines the cut."""
        if self._begun and self._open and not self._over:
            self._start_with(self._cut.halves(x))

    def _start_with(self, parts: Sequence[Part]) -> None:
        self._open = False
        self._declare(parts)
        self._start()

    def _start(self) -> None:
        if self._on.own_process:
            share(part.module for part in self._parts if not part.remote)
            self._seen = _seen(self._parts)
        self._run.begin()
        self._run.run.__enter__()  # enter the run's block, which handles Ctrl-C

    @property
    def graph(self) -> Graph:
        """Return the graph of the workers and their channels, for ``flowchan viz``."""
        return self._run.graph

    @property
    def active(self) -> bool:
        """Return True between the start and the end of training."""
        return self._begun and not self._over

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed, self._over = self._over, True
        if not self._run.started:  # the program has not trained on any batch
            return
        self._run.close()
        if error is None and failed:  # the failed step has already raised its error
            self._run.end(at_once=True)
        else:
            self._run.run.__exit__(kind, error, trace)

    # --- training ---

    def step(self, x: Any, target: Any) -> Tensor:
        """Train on one batch: run the passes of all its micro-batches, and update the parameters.

        If the parts have no optimizer, the step adds to the ``grad`` of the module's parameters, like
        ``loss.backward()``.

        Args:
            x: The input of the module.
            target: The second argument of the loss, with the same batch size.

        Returns:
            The loss of the batch: the mean over its micro-batches, weighted by their sizes.

        Raises:
            TypeError: The batch cannot be split.
            ValueError: The batch cannot be split, ``x`` requires grad, or ``target`` has a different batch
                size.
            RunError: A part failed, or its worker died.
            RuntimeError: Training has not started or is over, or a layer has changed.
        """
        self._raise_if_changed()
        inputs, targets = self._split(without_gradient(x, "compute the loss yourself from pipe(x)"), target)
        self._settle(x)
        sizes = tuple(map(batch_size, inputs))
        if self._kept is None and self._first_micro is None:
            self._first_micro = mapped(lambda one: one.detach().cpu().clone(), inputs[0])
        seed = int(torch.randint(2**31, ()))
        plan = self._plans.of(len(sizes))
        with self._commanding(f"step {self._steps}", len(sizes), plan) as run:
            for job in self._jobs:
                order = text(plan[job.worker])
                run.put(job.worker, Train(self._steps, sizes, seed, order, run.changed(job)))
            run.put_inputs(inputs)
            run.put_to_last("T", targets)
            if self._clip is not None:
                norm = math.sqrt(sum(answer.square for answer in run.answers()[0]))
                # Use the same factor as torch's clip_grad_norm_, also for NaN.
                factor = self._clip / (norm + 1e-6)
                for job in self._jobs:
                    run.put(job.worker, ScaleGradients(1.0 if factor >= 1.0 else factor))
            answers, _ = run.answers()
        self._done.append([(answer.events, answer.communication) for answer in answers])
        self._steps += 1
        self._count_changes()
        loss = answers[self._owners.of[-1]].loss
        from_workers((loss, [answer.gradients for answer in answers], [job.parameters for job in self._jobs]))
        for job, answer in zip(self._jobs, answers, strict=True):
            add_gradients(job.parameters, answer.gradients)
        assert loss is not None
        return loss

    def evaluate(self, x: Any) -> Any:
        """Compute the output for a batch with the current parameters, in ``eval`` mode and without gradients.

        Args:
            x: The input of the module.

        Returns:
            The outputs of all micro-batches, joined.

        Raises:
            RunError: A part failed, or its worker died.
            RuntimeError: Training has not started or is over, or a layer has changed.
        """
        self._raise_if_changed()
        inputs = self._cut.split(without_gradient(x, "call it under torch.no_grad()"))
        self._settle(x)
        plan = [[step for step in own if step.op == "F"] for own in self._plans.of(len(inputs))]
        with self._commanding("an evaluation", len(inputs), plan) as run:
            for job in self._jobs:
                run.put(job.worker, Evaluate(len(inputs), text(plan[job.worker]), run.changed(job)))
            run.put_inputs(inputs)
            _, items = run.answers()
        outputs = [items["F", len(self._parts), chunk].value for chunk in range(len(inputs))]
        return self._cut.joined(outputs, list(map(batch_size, inputs)), "the evaluation")

    def state_dict(self) -> dict[str, Any]:
        """Copy the state of the module and of the optimizers of all parts.

        Save it with ``torch.save``; ``torch.load`` reads it with ``weights_only=True``, its default. For
        layers that draw random numbers, also save ``torch.get_rng_state()``.

        Returns:
            A dictionary. The keys are ``"module"`` (a ``state_dict``), ``"parts"`` (the number of layers in
            each part), ``"steps"``, ``"optimizer"`` (the class name), and ``"optimizers"`` (a ``state_dict``
            per part). The entry of a part without parameters is ``None``. ``"parts"`` is ``None`` until the
            first batch has determined the cut.

        Raises:
            TypeError: The optimizer has no ``state_dict``.
            RunError: A part failed, or its worker died.
            RuntimeError: Training has not started or is over, or a layer has changed.

        Example:
            >>> from functools import partial
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import Sequential
            >>> pipe = Sequential([nn.Linear(4, 8), nn.Linear(8, 1)])
            >>> adam = partial(torch.optim.Adam, lr=0.1)
            >>> with pipe.trainer(loss=nn.MSELoss(), optimizer=adam) as training:
            ...     loss = training.step(torch.ones(16, 4), torch.zeros(16, 1))
            ...     state = training.state_dict()
            >>> with pipe.trainer(loss=nn.MSELoss(), optimizer=adam) as training:
            ...     training.load_state_dict(state)
            ...     loss = training.step(torch.ones(16, 4), torch.zeros(16, 1))
            >>> state["steps"], state["optimizer"]
            (1, 'Adam')
        """
        self._raise_unless_active()
        self._raise_if_changed()
        name = optimizer_name(self._parts, self._options.optimizer)
        optimizers: list[Any] = []
        if not self._open:
            with self._commanding("state_dict", 0, [[] for _ in self._jobs]) as run:
                for job in self._jobs:
                    run.put(job.worker, SaveState(run.changed(job)))
                answers, _ = run.answers()
            saved = {
                part.number: state
                for job, answer in zip(self._jobs, answers, strict=True)
                for part, state in zip(job.parts, answer.optimizers, strict=True)
            }
            optimizers = [copied(saved[part.number]) for part in self._parts]
        return {
            "module": copied(self._cut.module.state_dict()),
            "parts": None if self._open else layer_counts(self._parts),
            "steps": self._steps,
            "optimizer": name,
            "optimizers": optimizers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned.

        The training must have the same model, parts and optimizer. A state that does not fit raises an error
        and changes nothing. The parameter groups of the state, including their learning rates, replace the
        groups from ``optimizer=``.

        Args:
            state: The dictionary.

        Raises:
            TypeError: ``state`` is not a dictionary, or the optimizer has no ``load_state_dict``.
            ValueError: The state comes from another model, another cut or another optimizer.
            RunError: A part failed, or its worker died.
            RuntimeError: Training has not started or is over, or a layer has changed.
        """
        self._raise_unless_active()
        self._raise_if_changed()
        parts = parts_for(state, self._cut.module, self._parts, self._open, self._options.optimizer)
        if parts is not None and self._open:
            self._start_with(parts)
        self._cut.module.load_state_dict(state["module"])
        if parts is not None:
            with self._commanding("load_state_dict", 0, [[] for _ in self._jobs]) as run:
                for job in self._jobs:
                    states = [state["optimizers"][part.number] for part in job.parts]
                    run.put(job.worker, LoadState(states, run.changed(job)))
                run.answers()
        self._steps = state["steps"]
        self._count_changes()

    def timeline(self) -> Timeline:
        """Return the events of all workers in the last ten steps.

        Returns:
            The timeline, whose ``save(path)`` writes a picture or a trace.
        """
        found = (event for step in self._done for events, _ in step for event in events)
        return Timeline(found, self.graph.name)

    def report(self) -> TrainingReport:
        """Report on the last ten steps: waiting times, communication, and the peak memory of each part.

        To measure memory, the first call runs copies of the layers on a micro-batch from the first step.

        Returns:
            The report. Printing it shows a table.
        """
        if self._kept is None and self._first_micro is not None:
            self._kept = measured(self._parts, self._first_micro)
            self._first_micro = None
        return report(list(self._done), self._parts, self._kept or [Kept(0.0, 0.0)] * len(self._parts))

    # --- internals ---

    def _raise_unless_active(self) -> None:
        if self._over:
            raise RuntimeError("training: training is over; create a new one with pipe.trainer(...)")
        if not self._begun:
            raise RuntimeError(
                "training: training has not started; enter the block `with pipe.trainer(...) as training:`"
            )

    def _raise_if_changed(self) -> None:
        """Raise ``RuntimeError`` if layers have changed or ``torch.autocast`` is active.

        The workers would not notice these changes.
        """
        if current_casting():
            raise RuntimeError(
                "training: torch.autocast does not reach the parts; use pipe.trainer(…, autocast=…)"
            )
        if self._on.own_process and self._run.alive and self._seen != _seen(self._parts):
            raise RuntimeError(
                "training: a layer has changed since training began (mode, attribute, hook or memory); "
                "leave the with block and start a new one"
            )

    def _count_changes(self) -> None:
        """Increment the version counters of the parameters that the processes have changed.

        Torch then raises in the backward pass of any graph that saved one of these parameters.
        """
        if self._on.own_process and not self._on.hosts and not self._outside:
            for part in self._parts:
                for parameter in part.module.parameters():
                    torch.autograd.graph.increment_version(parameter)

    def _split(self, x: Any, target: Any) -> tuple[list[Any], list[Any]]:
        inputs = self._cut.split(x)
        samples, wanted = batch_size(x), batch_size(target, "target")
        if samples != wanted:
            raise ValueError(
                f"step: target must have the same batch size as x ({samples}), got {wanted}; pass a target "
                "for each sample"
            )
        to_workers(target)
        return inputs, split(target, len(inputs), "target")

    @contextlib.contextmanager
    def _commanding(self, doing: str, chunks: int, plan: list[list[Step]]) -> Iterator[WorkersRun]:
        """Give the caller exclusive use of the workers for one command.

        Interrupting the command ends training. If the command fails, the exception names the part and the
        step.
        """
        self._raise_unless_active()
        try:
            yield self._run
            for job, sent in zip(self._jobs, self._sent, strict=True):
                for step in plan[job.worker]:
                    if side := self._owners.sends(job.worker, step):
                        sent[side] += 1
        except ChannelError:
            self._over = True
            raise self._placed(doing, chunks, plan) from None
        except BaseException:
            self._over = True
            raise

    def _placed(self, doing: str, chunks: int, plan: list[list[Step]]) -> BaseException:
        """Return the run's error, with a message that names the place of the first failure."""
        self._run.end(at_once=True)
        if (error := self._run.failure) is None:
            return RuntimeError(
                "training: the run was stopped from outside; create a new one with pipe.trainer(...)"
            )
        failures = [failure for failure in error.exceptions if isinstance(failure, StageError)]
        failure = failures[0]
        cause = failure.__cause__ or failure
        if isinstance(cause, WorkerDied):
            job = next(job for job in self._jobs if job.name == failure.stage)
            place = f"{' and '.join(map(str, job.parts))}, {doing}, {self._reached(job, chunks, plan)}"
        else:
            notes = [note for note in getattr(cause, "__notes__", ()) if note.startswith("part ")]
            place = notes[0] if notes else f"{failure.stage}, {doing}"
        return RunError(f"{place}: {type(cause).__name__}: {cause}", failures)

    def _reached(self, job: Assignment, chunks: int, plan: list[list[Step]]) -> str:
        """Return the last step that a dead worker is known to have completed.

        The step follows from the number of the worker's messages that other workers have received.
        """
        ports = {f"{job.name}.onward": 1, f"{job.name}.back": -1}
        taken = {ports[link.name]: link.passed for link in self._run.run.stats().edges if link.name in ports}
        unsent = {side: taken.get(side, 0) - self._sent[job.worker][side] for side in (1, -1)}
        done = None
        for step in plan[job.worker]:
            side = self._owners.sends(job.worker, step)
            if side and unsent[side] > 0:
                unsent[side] -= 1
                done = step
        if done is None:
            return "before any step that is known to be complete"
        name = text([done]) if len(job.parts) == 1 else str(done)
        return f"after {name} (micro-batch {done.chunk} of {chunks})"


def _seen(parts: Sequence[Part]) -> Any:
    return state_of(parts), modes_of(parts)


def add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None] | None) -> None:
    """Add gradients to the ``grad`` of parameters, like a backward pass. No two ``grad`` share memory."""
    for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
        if gradient is not None and parameter.grad is None:
            parameter.grad = gradient.detach().to(parameter.device, copy=True)
        elif gradient is not None and parameter.grad is not None:
            parameter.grad += gradient.to(parameter.device)

"""Implement the worker for training. It runs the steps of its schedule in order and updates its parts.

A worker that clips gradients answers twice per step, because gradients can be scaled only when the norms of
all workers are known.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flowchan import In, Out
from flowchan.pipelines.sequential.engine.execution import GENERATOR, Execution, Tail
from flowchan.pipelines.sequential.engine.pipeline_worker import PipelineWorker
from flowchan.pipelines.sequential.engine.schedule import Step, parse
from flowchan.pipelines.sequential.engine.worker_messages import (
    Assignment,
    Evaluate,
    LoadState,
    Loss,
    SaveState,
    ScaleGradients,
    Train,
    WorkerAnswer,
)
from flowchan.pipelines.sequential.parts import Casting, Part
from flowchan.pipelines.sequential.tensor_trees import join, mapped, tensors
from flowchan.pipelines.sequential.timeline import TimelineEvent
from flowchan.pipelines.sequential.training_state import copied


class TrainingWorker(PipelineWorker):
    """Worker that trains some of the parts."""

    def __init__(self, job: Assignment, commands: In[Any], answers: Out[Any], **neighbours: Any) -> None:
        super().__init__(job, commands, answers, **neighbours)
        self.optimizers: list[tuple[Part, Optimizer]] = []
        self.losses: list[Tensor] = []
        self.plans: dict[str, list[Step]] = {}  # parsed plans, keyed by their text
        self.first: dict[int, tuple[Any, Any]] = {}  # outputs and targets of the first step, by micro-batch
        self.begun = False  # true once this worker has done a step, which need not be step 0

    def begin(self, part: Part) -> None:
        """Prepare a part and create its optimizer."""
        super().begin(part)
        parameters = list(part.module.parameters())
        if self.job.optimizer is not None and parameters:
            with at(part, "creating its optimizer"):
                self.optimizers.append((part, self.job.optimizer(parameters)))  # type: ignore[arg-type]

    def follow(self, command: Any) -> WorkerAnswer:
        """Execute a command of the trainer."""
        self.take_changes(command.changed)
        if isinstance(command, Train):
            return self._train(command)
        if isinstance(command, SaveState):
            return self._save()
        if isinstance(command, LoadState):
            return self._load(command)
        assert isinstance(command, Evaluate), command
        return self._evaluate(command)

    # --- training steps ---

    def _train(self, train: Train) -> WorkerAnswer:
        job = self.job
        self.losses = []
        # If the workers are threads and have no optimizer, keep the gradients. They accumulate in the user's
        # parameters, which the program's own optimizer updates.
        if job.optimizer is not None or job.own_process:
            for parameter in job.parameters:
                parameter.grad = None
        plan = self._steps(train.plan)
        for step, following in zip(plan, [*plan[1:], None], strict=True):
            with at(
                self.executions[step.part].part, f"step {step.op}{step.chunk}", step.chunk, len(train.sizes)
            ):
                if step.op == "F":
                    # A backward step can follow at once only in the last part. Other parts must first wait
                    # for gradients from later parts.
                    at_end = step.part == job.total - 1
                    back = Step("B", step.chunk, step.part), Step("I", step.chunk, step.part)
                    self._go_forward(step, train, soon=at_end and following in back)
                elif step.op == "W":
                    with self.timed("W", train.number, step):
                        self.executions[step.part].weights((train.number, step.chunk))
                else:
                    self._go_back(step, train)
        self._check_mean()
        self.begun = True
        for execution in self.executions.values():
            execution.norms.commit()
        if job.optimizer is not None:
            self._update(train)
        self.give_changes()
        sends = job.optimizer is None and job.own_process
        return WorkerAnswer(
            job.worker,
            tuple(self.events),
            loss=torch.stack(self.losses).sum() if self.losses else None,
            gradients=self.on_cpu([parameter.grad for parameter in job.parameters]) if sends else None,
            communication=self.communication,
            changed=self.sent_changes(),
        )

    def _steps(self, plan: str) -> list[Step]:
        if plan not in self.plans:
            self.plans[plan] = parse(plan, self.job.parts[0].number)
        return self.plans[plan]

    def _check_mean(self) -> None:
        """Check after the first step that the loss is a mean over the samples.

        Raises ``ValueError`` unless the batch's loss equals the mean of its micro-batches' losses.
        """
        if not self.first:
            return
        outputs, targets = (join(list(found)) for found in zip(*self.first.values(), strict=True))
        self.first.clear()
        with torch.no_grad(), GENERATOR, torch.random.fork_rng([]):
            batch_loss = float(weighted(outputs, self.job.loss, targets, 1.0))
        mean = float(torch.stack(self.losses).sum())
        rough = self.job.autocast or any(one.dtype.itemsize < 4 for one in tensors(outputs))
        near = math.isclose(mean, batch_loss, rel_tol=0.03 if rough else 1e-3, abs_tol=1e-6)
        if not near and math.isfinite(mean) and math.isfinite(batch_loss):
            raise ValueError(
                f"loss must be a mean over samples, got {batch_loss:.6g} for a batch and {mean:.6g} for its "
                "micro-batches; use an unweighted mean, or compute the loss yourself from pipe(x)"
            )

    def _casting(self, execution: Execution) -> Casting:
        device = execution.part.device
        return (
            () if (kind := self.job.autocast) is None else ((device.type if device else "cpu", kind, True),)
        )

    def _go_forward(self, step: Step, train: Train, soon: bool) -> None:
        passed = self.take(("F", step.part, step.chunk))
        tail = self._tail(step, train) if step.part == self.job.total - 1 else None
        seed = train.seed + (step.part << 16) + step.chunk
        execution = self.executions[step.part]
        with self.timed("F", train.number, step):
            output = execution.forward(
                (train.number, step.chunk), passed, seed, tail, self._casting(execution), soon
            )
        if tail is None:
            self.put(("F", step.part + 1, step.chunk), self.packed(output))
        else:
            self.losses.append(output.value)

    def _tail(self, step: Step, train: Train) -> Tail:
        target = self.take(("T", step.part, step.chunk))
        device = self.executions[step.part].part.device
        if device is not None:
            target = mapped(lambda tensor: tensor.to(device), target)
        share = train.sizes[step.chunk] / max(sum(train.sizes), 1)
        loss = functools.partial(weighted, loss=self.job.loss, target=target, share=share)
        if self.begun or len(train.sizes) == 1:
            return loss

        def recorded(output: Any) -> Tensor:
            self.first[step.chunk] = mapped(Tensor.detach, output), target
            return loss(output)

        return recorded

    def _go_back(self, step: Step, train: Train) -> None:
        execution = self.executions[step.part]
        gradients: tuple[Tensor | None, ...] | None = None
        if step.part < self.job.total - 1:
            gradients = self.take(("B", step.part, step.chunk))
        key = train.number, step.chunk
        if execution.needs_recompute(key):
            with self.timed("recompute", train.number, step):
                execution.again(key)
        with self.timed(step.op, train.number, step):
            found = (execution.backward if step.op == "B" else execution.inputs)(key, gradients)
        if step.part > 0:
            self.put(("B", step.part - 1, step.chunk), self.on_cpu(found))

    def _update(self, train: Train) -> None:
        """Clip the gradients by their norm over all workers, and update the parts.

        The result is the same as with ``torch.nn.utils.clip_grad_norm_``.
        """
        gradients = [parameter.grad for parameter in self.job.parameters if parameter.grad is not None]
        scale = ScaleGradients(1.0)
        if self.job.clips:
            norms = [float(torch.linalg.vector_norm(gradient)) for gradient in gradients]
            self.answers.put(WorkerAnswer(self.job.worker, square=sum(norm * norm for norm in norms)))
            scale = self.commands.get()
        begin = time.monotonic()
        if scale.factor != 1.0:
            for gradient in gradients:
                gradient.mul_(scale.factor)
        for part, optimizer in self.optimizers:
            with at(part, f"update at the end of step {train.number}"):
                optimizer.step()
        self.events.append(
            TimelineEvent(self.job.worker, None, "update", train.number, None, begin, time.monotonic())
        )

    # --- evaluation ---

    def _evaluate(self, command: Evaluate) -> WorkerAnswer:
        for step in self._steps(command.plan):
            execution = self.executions[step.part]
            with at(execution.part, f"evaluation, step F{step.chunk}", step.chunk, command.chunks):
                passed = self.take(("F", step.part, step.chunk))
                output = execution.evaluate(passed, self._casting(execution))
            self.put(("F", step.part + 1, step.chunk), self.packed(output))
        return WorkerAnswer(self.job.worker)

    # --- the state of the optimizers ---

    def _save(self) -> WorkerAnswer:
        states: dict[int, Any] = {}
        for part, optimizer in self.optimizers:
            with at(part, "saving its optimizer"):
                states[part.number] = copied(optimizer.state_dict(), cpu=self.job.own_process)
        found = [states.get(part.number) for part in self.job.parts]
        return WorkerAnswer(self.job.worker, optimizers=found)

    def _load(self, command: LoadState) -> WorkerAnswer:
        states = dict(zip([part.number for part in self.job.parts], command.optimizers, strict=True))
        for part, optimizer in self.optimizers:
            with at(part, "loading its optimizer"):
                optimizer.load_state_dict(copied(states[part.number]))  # torch keeps the given tensors
        return WorkerAnswer(self.job.worker)


@contextlib.contextmanager
def at(part: Part, doing: str, chunk: int | None = None, chunks: int = 0) -> Iterator[None]:
    """Add a note to any exception, which says where the exception was raised."""
    try:
        yield
    except BaseException as error:
        micro = "" if chunk is None else f" (micro-batch {chunk} of {chunks})"
        error.add_note(f"{part}, {doing}{micro}")
        raise


def weighted(output: Any, loss: Loss | None, target: Any, share: float) -> Tensor:
    """Compute the loss of a micro-batch, weighted by its share of the batch."""
    assert loss is not None
    found: Any = loss(output, target)
    if not isinstance(found, Tensor) or found.dim() != 0:
        what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise TypeError(f"loss must be a 0-dimensional tensor (the mean over the batch), got {what}")
    if not found.requires_grad and any(one.requires_grad for one in tensors(output)):
        raise ValueError(
            "loss must depend on the model's output, got a tensor without grad_fn; do not detach it or "
            "compute it under torch.no_grad()"
        )
    if share < 1 and bool(found.isnan()) and all(bool(one.isfinite().all()) for one in tensors(output)):
        raise ValueError(
            "loss must be finite for a finite output, got NaN (the mean of no samples?); use fewer chunks, "
            "or divide by the size of the micro-batch"
        )
    return found * share

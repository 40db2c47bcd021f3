"""A worker of a pipe: it holds some parts of the model and follows commands of the program.

The program sends commands, and with them the micro-batches of the first part and the targets of the last one.
Activations go to the worker of the next part, gradients to the worker of the part before. Workers have a
channel to each of their neighbours. Before each step a worker takes what the step needs; what comes too early
waits here.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flowchan import Drained, In, Out
from flowchan.pipelines.sequential.engine.execution import Execution, Passed
from flowchan.pipelines.sequential.engine.schedule import Step
from flowchan.pipelines.sequential.engine.worker_messages import Assignment, Item, Key, WorkerAnswer
from flowchan.pipelines.sequential.parts import Part, take_cores
from flowchan.pipelines.sequential.state import Numbers, PartState
from flowchan.pipelines.sequential.tensor_trees import mapped
from flowchan.pipelines.sequential.timeline import Op, TimelineEvent


class PipelineWorker(abc.ABC):
    """One worker. A subclass carries out the commands.

    Which ports it has depends on its neighbours: ``forward`` and ``backward`` bring what the worker before
    and the worker behind have for it, ``onward`` and ``back`` take to them what it has for them.
    """

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
        self._forward, self._backward, self._onward, self._back = forward, backward, onward, back
        self.states: list[PartState] = []
        self.executions: dict[int, Execution] = {}
        self.events: list[TimelineEvent] = []
        self.communication = 0.0
        self._early: dict[Key, Any] = {}

    def run(self) -> None:
        """Follow commands until no more can come."""
        torch.set_grad_enabled(True)  # of this thread, which is the worker's own
        if self.job.own_process:
            take_cores(self.job.worker, self.job.owners.workers, self.job.hosts)
        try:
            for part in self.job.parts:
                self.begin(part)
            with contextlib.suppress(Drained):  # the program, or a neighbour, has ended
                for command in self.commands:
                    self.events, self.communication = [], 0.0
                    self.answers.put(self.follow(command))
        finally:
            for execution in self.executions.values():
                execution.close()

    def begin(self, part: Part) -> None:
        """Prepare a part before the first command."""
        job = self.job
        if job.own_process:
            self.states.append(PartState(part.module, part.device))
        self.executions[part.number] = Execution(
            part, recompute=job.recompute, shared=not job.own_process, deferred=job.deferred
        )

    @abc.abstractmethod
    def follow(self, command: Any) -> WorkerAnswer:
        """Carry out one command."""

    # --- what the program sees of parameters and buffers ---

    def take_changes(self, changed: list[Numbers]) -> None:
        """Take over what the program has changed since the last command."""
        for number, state in enumerate(self.states):
            state.take(changed[number] if self.job.hosts else None)

    def give_changes(self) -> None:
        """Let the program see what the layers have changed."""
        for state in self.states:
            state.give()

    def sent_changes(self) -> list[Numbers]:
        """The changes that travel with an answer: all that a program on another host does not see."""
        return [state.changed() for state in self.states] if self.job.hosts else []

    # --- ports ---

    def take(self, key: Key) -> Any:
        """What a step needs: from the worker of the part that makes it, or from the program."""
        maker = key[1] + {"F": -1, "B": 1, "T": 1}[key[0]]
        port: In[Any] | None = self.commands
        if 0 <= maker < self.job.total:
            ahead = self.job.owners.towards(self.job.worker, maker) < 0
            port = self._forward if ahead else self._backward
        begin = time.thread_time()  # which stands still while it waits
        while key not in self._early:
            assert port is not None
            item = port.get()
            self._early[item.key] = item.content
        self.communication += time.thread_time() - begin
        return self._early.pop(key)

    def put(self, key: Key, content: Any) -> None:
        """Send something to the worker of part ``key[1]``, or to the program where there is no such part."""
        port: Out[Any] | None = self.answers
        if 0 <= key[1] < self.job.total:
            side = self.job.owners.towards(self.job.worker, key[1])
            if not side:
                self._early[key] = content
                return
            port = self._onward if side > 0 else self._back
        assert port is not None
        begin = time.thread_time()
        port.put(Item(key, content))
        self.communication += time.thread_time() - begin

    def packed(self, passed: Passed) -> Passed:
        """An output as it is sent."""
        return Passed(self.light(passed.value), self.light(passed.skips), passed.wants)

    def light(self, value: Any) -> Any:
        """A value as it is sent: in main memory, if it goes to another process."""
        return value if not self.job.own_process else mapped(Tensor.cpu, value)

    @contextlib.contextmanager
    def timed(self, op: Op, number: int, step: Step) -> Iterator[None]:
        """Note for the timeline what happens within."""
        begin = time.monotonic()
        yield
        self.events.append(
            TimelineEvent(self.job.worker, step.part, op, number, step.chunk, begin, time.monotonic())
        )

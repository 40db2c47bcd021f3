"""Implement the worker of a pipe, which owns parts of the model and executes the program's commands.

The program sends commands, the micro-batches for the first part, and the targets for the last part. Channels
connect each worker with its neighbours. Activations go to the worker of the next part, and gradients go to
the worker of the previous part. Before each step, a worker receives the step's inputs. Messages for later
steps are stored.
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
    """Base class of workers. Each subclass executes different commands.

    The ports of a worker depend on its neighbours. ``forward`` and ``backward`` receive from the previous and
    the next worker; ``back`` and ``onward`` send to them.
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
        """Execute commands until the command channel is drained."""
        torch.set_grad_enabled(True)  # affects only this thread, which belongs to the worker
        if self.job.own_process:
            take_cores(self.job.worker, self.job.owners.workers, self.job.hosts)
        try:
            for part in self.job.parts:
                self.begin(part)
            with contextlib.suppress(Drained):  # the program or a neighbour may have ended
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
        """Execute one command and return its answer."""

    # --- parameters and buffers shared with the program ---

    def take_changes(self, changed: list[Numbers]) -> None:
        """Apply the changes that the program has made since the last command."""
        for number, state in enumerate(self.states):
            state.take(changed[number] if self.job.hosts else None)

    def give_changes(self) -> None:
        """Make the layers' changes visible to the program."""
        for state in self.states:
            state.give()

    def sent_changes(self) -> list[Numbers]:
        """Return the changes to send with the answer; empty unless the program is on another host."""
        return [state.changed() for state in self.states] if self.job.hosts else []

    # --- ports ---

    def take(self, key: Key) -> Any:
        """Receive an input for a step, from the program or from the worker that computes the input."""
        maker = key[1] + {"F": -1, "B": 1, "T": 1}[key[0]]
        port: In[Any] | None = self.commands
        if 0 <= maker < self.job.total:
            ahead = self.job.owners.towards(self.job.worker, maker) < 0
            port = self._forward if ahead else self._backward
        begin = time.thread_time()  # CPU time, which does not include waiting
        while key not in self._early:
            assert port is not None
            item = port.get()
            self._early[item.key] = item.content
        self.communication += time.thread_time() - begin
        return self._early.pop(key)

    def put(self, key: Key, content: Any) -> None:
        """Send ``content`` to the worker of part ``key[1]``, or to the program if no part has this number."""
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
        """Prepare an output to be sent."""
        return Passed(self.on_cpu(passed.value), self.on_cpu(passed.skips), passed.wants)

    def on_cpu(self, value: Any) -> Any:
        """Prepare a value to be sent. If it goes to another process, move it to CPU memory."""
        return value if not self.job.own_process else mapped(Tensor.cpu, value)

    @contextlib.contextmanager
    def timed(self, op: Op, number: int, step: Step) -> Iterator[None]:
        """Record how long the block takes as an event in the timeline."""
        begin = time.monotonic()
        yield
        self.events.append(
            TimelineEvent(self.job.worker, step.part, op, number, step.chunk, begin, time.monotonic())
        )

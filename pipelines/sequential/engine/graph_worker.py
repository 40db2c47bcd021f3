"""Implement the worker of one part, for calls whose outputs require grad.

The worker runs forward passes, keeps the autograd graph of its part, and runs backward passes when the
program requests them. The worker never changes the ``grad`` of the module's parameters. The gradients of the
parameters are sent with the answer, and the program's autograd accumulates them and calls hooks. If a layer
raises, the worker and the call continue. The worker passes the exception on to the following parts as a
:class:`PartFailure`. The graphs of other calls stay valid.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from flowchan import In, Out
from flowchan.pipelines.sequential.engine.execution import Execution, Passed
from flowchan.pipelines.sequential.engine.pipeline_worker import PipelineWorker
from flowchan.pipelines.sequential.engine.schedule import Step
from flowchan.pipelines.sequential.engine.worker_messages import (
    Assignment,
    Backward,
    Forward,
    PartFailure,
    WorkerAnswer,
)
from flowchan.run.policy.failures import Portable

Swap = tuple[dict[str, Any], str, Tensor, Tensor]
"""Dictionary that holds a parameter, the parameter's name, the parameter, and its replacement."""


class _CallState(NamedTuple):
    """Parameters whose gradients a call needs, and replacements for the parameters that have hooks."""

    parameters: list[Tensor]
    swaps: list[Swap]


class GraphWorker(PipelineWorker):
    """Worker of one part that runs calls and their backward passes."""

    def __init__(self, job: Assignment, commands: In[Any], answers: Out[Any], **neighbours: Any) -> None:
        super().__init__(job, commands, answers, **neighbours)
        (self.part,) = job.parts
        self.failure: PartFailure | None = None
        self._held: dict[int, _CallState] = {}

    @property
    def execution(self) -> Execution:
        """Execution of the worker's only part."""
        return self.executions[self.part.number]

    def follow(self, command: Any) -> WorkerAnswer:
        """Execute a :class:`Forward` or :class:`Backward` command."""
        self.failure = None
        gradients = None
        if isinstance(command, Forward):
            self._go_forward(command)
        else:
            gradients = self._go_back(command)
        return WorkerAnswer(
            self.job.worker,
            tuple(self.events),
            gradients=gradients,
            changed=self.sent_changes(),
            failure=self.failure,
        )

    # --- forward ---

    def _go_forward(self, call: Forward) -> None:
        for number in call.dropped:
            self._drop(number)
        self._begin(call)
        for chunk in range(call.chunks):
            step = Step("F", chunk, self.part.number)
            passed = self.take(("F", step.part, chunk))
            if not isinstance(passed, PartFailure):
                with self.timed("F", call.number, step):
                    passed = self._tried(functools.partial(self._passed, call, step, passed))
            if isinstance(passed, PartFailure):
                self.failure = self.failure or passed
            self.put(("F", step.part + 1, chunk), passed)
        if self.failure is None:
            self.failure = self._tried(self._commit)

    def _begin(self, call: Forward) -> None:
        module = self.part.module
        self.execution.norms.forget()
        self.take_changes(call.changed)
        if call.modes is not None:
            trains, requires = call.modes[0]
            for layer, mode in zip(module.modules(), trains, strict=True):
                layer.training = mode
            for parameter, required in zip(module.parameters(), requires, strict=True):
                parameter.requires_grad_(required)
        if call.keeps_graph:
            swaps = [] if self.job.own_process else _swaps(module)
            copies = {id(own): copy for _, _, own, copy in swaps}
            parameters = [copies.get(id(one), one) for one in module.parameters() if one.requires_grad]
            self._held[call.number] = _CallState(parameters, swaps)

    def _passed(self, call: Forward, step: Step, passed: Passed) -> Passed:
        if not call.keeps_graph:
            return self.packed(self.execution.infer(passed, call.casting))
        seed = call.seed + (step.part << 16) + step.chunk
        with _swapped(self._held[call.number].swaps):
            key = call.number, step.chunk
            return self.packed(self.execution.forward(key, passed, seed, casting=call.casting))

    def _commit(self) -> None:
        self.execution.norms.commit()
        self.give_changes()

    # --- backward ---

    def _go_back(self, back: Backward) -> list[Tensor | None]:
        parameters = self._held[back.number].parameters
        sums: list[Tensor | None] = [None] * len(parameters)
        # Indices of the sums that can be changed in place, because only this worker uses their memory.
        own: set[int] = set()
        for chunk in range(back.chunks):
            step = Step("B", chunk, self.part.number)
            given = self.take(("B", step.part, chunk))
            found = given
            if not isinstance(given, PartFailure):
                found = self._tried(functools.partial(self._gradients, back, step, given))
            if isinstance(found, PartFailure):
                self.failure = self.failure or found
                values: Any = found
            else:
                values = tuple(found[: len(found) - len(parameters)])
                _add(sums, own, found[len(values) :])
            if step.part or (values and self.failure is None):
                self.put(("B", step.part - 1, chunk), self.on_cpu(values))
        if not back.keep:
            self._drop(back.number)
        on_cpu: list[Tensor | None] = self.on_cpu(sums)
        return on_cpu

    def _gradients(
        self, back: Backward, step: Step, given: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        key = back.number, step.chunk
        parameters, swaps = self._held[back.number]
        if self.execution.needs_recompute(key):
            with self.timed("recompute", back.number, step), _swapped(swaps):
                self.execution.again(key)
        with self.timed("B", back.number, step):
            return self.execution.gradients(key, given, parameters, back.keep)

    # --- both ---

    def _drop(self, number: int) -> None:
        """Release the graphs of a call."""
        self._held.pop(number, None)
        self.execution.drop(number)

    def _tried(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            return PartFailure(self.part.number, Portable(error) if self.job.own_process else error)


def _add(sums: list[Tensor | None], own: set[int], found: tuple[Tensor | None, ...]) -> None:
    """Add the gradients of a micro-batch, but never write into memory that autograd may share."""
    for place, gradient in enumerate(found):
        so_far = sums[place]
        if gradient is None:
            continue
        if so_far is None:
            sums[place] = gradient
        elif place in own:
            so_far.add_(gradient)
        else:
            sums[place] = so_far + gradient
            own.add(place)


def _swaps(module: nn.Module) -> list[Swap]:
    """Return replacements for the parameters that have hooks.

    The hooks expect the gradient of the whole batch. The micro-batches therefore use another parameter that
    shares the memory but has no hooks.
    """
    copies: dict[int, Tensor] = {}
    found: list[Swap] = []
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter._backward_hooks:
                copy = copies.setdefault(id(parameter), nn.Parameter(parameter.detach()))
                found.append((layer._parameters, name, parameter, copy))
    return found


@contextlib.contextmanager
def _swapped(swaps: list[Swap]) -> Iterator[None]:
    for parameters, name, _, copy in swaps:
        parameters[name] = copy
    try:
        yield
    finally:
        for parameters, name, parameter, _ in swaps:
            parameters[name] = parameter

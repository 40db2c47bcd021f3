"""The worker of one part in calls whose outputs have a graph: it goes forward, holds the part's own graph,
and goes back when the program does.

Commands come along the forward chain, from the program to the first part and on from part to part: the
micro-batches of a call, then, whenever the program asks for it, the word that their backward pass comes. The
gradients for that come the other way, from the program to the last part and on to the one before. Each worker
answers the program once for each backward pass of a call, with the gradients of its parameters: no ``grad``
of the module is touched here, and what becomes of them is autograd's affair, with its hooks, in the program.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowchan import Drained, In, Out
from flowchan.pipelines.sequential.copies import Numbers
from flowchan.pipelines.sequential.execution import Casting, Execution, Passed
from flowchan.pipelines.sequential.parts import Part, take_cores
from flowchan.pipelines.sequential.shared import State
from flowchan.pipelines.sequential.timeline import Event, Op
from flowchan.pipelines.sequential.values import mapped
from flowchan.run.failures import Portable


@dataclass(frozen=True)
class PartJob:
    """What a worker is told at its start."""

    part: Part
    total: int
    recompute: bool
    deferred: bool
    own_process: bool
    hosts: int


class Call(NamedTuple):
    """What all micro-batches of a call have in common. ``graph``: there will be a backward pass. ``modes``
    are, for each part, whether each of its modules trains and each of its parameters requires a gradient;
    ``None`` where these are as before. ``changed``: for each part that is on another host, what the program
    has changed of its numbers."""

    number: int
    chunks: int
    seed: int
    casting: Casting
    graph: bool
    modes: tuple[tuple[list[bool], list[bool]], ...] | None
    changed: tuple[Numbers, ...] = ()


class Failure(NamedTuple):
    """In place of what a part would have given."""

    part: int
    error: Any


class Ahead(NamedTuple):
    """A micro-batch on its way forward. ``events`` are of the parts that it has passed, ``changed`` is what
    parts on other hosts have changed of their numbers."""

    call: Call
    chunk: int
    passed: Passed | Failure
    events: tuple[Event, ...]
    changed: tuple[tuple[int, Numbers], ...] = ()


class Back(NamedTuple):
    """The backward pass of a call comes. ``keep``: perhaps not for the last time."""

    number: int
    chunks: int
    keep: bool


class Gradients(NamedTuple):
    """Those of the outputs of a part for one micro-batch that it said it wants."""

    chunk: int
    values: tuple[Tensor | None, ...] | Failure


class Drop(NamedTuple):
    """Nobody will ask for the backward passes of these calls."""

    numbers: tuple[int, ...]


class Answer(NamedTuple):
    """What came of a backward pass: the gradients of the parameters, and from the first part those of the
    inputs by micro-batch."""

    number: int
    part: int
    gradients: list[Tensor | None]
    inputs: list[tuple[Tensor | None, ...]]
    events: tuple[Event, ...]
    failure: Failure | None


def first(forward: In[Any], backward: In[Any], onward: Out[Any], answers: Out[Any], job: PartJob) -> None:
    """The worker of the first part."""
    Passes(job, forward, backward, onward, answers).run()


def other(
    forward: In[Any], backward: In[Any], onward: Out[Any], back: Out[Any], answers: Out[Any], job: PartJob
) -> None:
    """The worker of another part."""
    Passes(job, forward, backward, onward, answers, back).run()


Swap = tuple[dict[str, Any], str, Tensor, Tensor]
"""Where a parameter stands, its name, itself, and what takes its place."""


class _Held(NamedTuple):
    """Of a call: the parameters that get gradients, and what took their places."""

    parameters: list[Tensor]
    swaps: list[Swap]


class Passes:
    """One worker at work. ``run`` returns when nothing more can come."""

    def __init__(
        self,
        job: PartJob,
        forward: In[Any],
        backward: In[Any],
        onward: Out[Any],
        answers: Out[Any],
        back: Out[Any] | None = None,
    ) -> None:
        self.job, self.part = job, job.part
        self.forward, self.backward = forward, backward
        self.onward, self.answers, self.back = onward, answers, back
        self.held: dict[int, _Held] = {}
        self.failed = False

    def run(self) -> None:
        torch.set_grad_enabled(True)  # of this thread, which is the worker's own
        if self.job.own_process:
            take_cores(self.part.number, self.job.total, self.job.hosts)
        self.state = State(self.part.module, self.part.device) if self.job.own_process else None
        self.execution = Execution(
            self.part,
            recompute=self.job.recompute,
            shared=not self.job.own_process,
            deferred=self.job.deferred,
        )
        with contextlib.suppress(Drained):
            for command in self.forward:
                if isinstance(command, Ahead):
                    self._ahead(command)
                elif isinstance(command, Back):
                    self._pass_on(command)
                    self._back(command)
                else:
                    self._pass_on(command)
                    self._drop(command)

    def _pass_on(self, command: Any) -> None:
        if self.part.number < self.job.total - 1:
            self.onward.put(command)

    def _drop(self, command: Drop) -> None:
        for number in command.numbers:
            self.held.pop(number, None)
            self.execution.drop(number)

    # --- forward ---

    def _ahead(self, item: Ahead) -> None:
        call, events = item.call, item.events
        if not item.chunk:
            self._begin(call)
        passed = item.passed
        if not isinstance(passed, Failure):
            begin = time.monotonic()
            passed = self._tried(lambda: self._passed(call, item.chunk, item.passed))
            events = (*events, self._event("F", call.number, item.chunk, begin))
        self.failed |= isinstance(passed, Failure)
        if item.chunk == call.chunks - 1 and not self.failed:
            failure = self._tried(self._commit)
            passed = failure if failure is not None else passed
        changed = item.changed
        if item.chunk == call.chunks - 1 and self.state is not None and self.part.away:
            changed = (*changed, (self.part.number, self.state.changed()))
        call = call._replace(changed=_without(call.changed, self.part.number))
        self.onward.put(Ahead(call, item.chunk, passed, events, changed))

    def _begin(self, call: Call) -> None:
        self.failed = False
        module = self.part.module
        self.execution.norms.forget()
        if self.state is not None:
            self.state.take(call.changed[self.part.number] if call.changed else None)
        if call.modes is not None and self.job.own_process:
            trains, requires = call.modes[self.part.number]
            for layer, mode in zip(module.modules(), trains, strict=True):
                layer.training = mode
            for parameter, required in zip(module.parameters(), requires, strict=True):
                parameter.requires_grad_(required)
        if call.graph:
            swaps = [] if self.job.own_process else _swaps(module)
            places = {id(own): instead for _, _, own, instead in swaps}
            parameters = [places.get(id(one), one) for one in module.parameters() if one.requires_grad]
            self.held[call.number] = _Held(parameters, swaps)

    def _passed(self, call: Call, chunk: int, passed: Any) -> Passed:
        if call.graph:
            seed = call.seed + (self.part.number << 16) + chunk
            with _swapped(self.held[call.number].swaps):
                found = self.execution.forward((call.number, chunk), passed, seed, casting=call.casting)
        else:
            found = self.execution.infer(passed, call.casting)
        return Passed(self._light(found.value), self._light(found.skips), found.wants)

    def _commit(self) -> None:
        self.execution.norms.commit()
        if self.state is not None:
            self.state.give()

    # --- backward ---

    def _back(self, back: Back) -> None:
        parameters = self.held[back.number].parameters
        sums: list[Tensor | None] = [None] * len(parameters)
        own: set[int] = set()  # those that are memory of ours
        inputs: list[Any] = [()] * back.chunks
        events: list[Event] = []
        failure: Failure | None = None
        for _ in range(back.chunks):
            chunk, given = self.backward.get()
            found: Any = given
            if not isinstance(given, Failure):
                found = self._tried(functools.partial(self._gradients, back, chunk, given, events))
            if isinstance(found, Failure):
                failure = failure or found
                values: Any = found
            else:
                values = tuple(found[: len(found) - len(parameters)])
                _add(sums, own, found[len(values) :])
            if self.back is None:
                inputs[chunk] = () if failure else self._light(values)
            else:
                self.back.put(Gradients(chunk, self._light(values)))
        if not back.keep:
            self._drop(Drop((back.number,)))
        gradients = self._light(sums)
        answer = Answer(back.number, self.part.number, gradients, inputs, tuple(events), failure)
        self.answers.put(answer)

    def _gradients(
        self, back: Back, chunk: int, given: tuple[Tensor | None, ...], events: list[Event]
    ) -> tuple[Tensor | None, ...]:
        key = back.number, chunk
        parameters, swaps = self.held[back.number]
        if self.execution.is_to_be_done_again(key):
            begin = time.monotonic()
            with _swapped(swaps):
                self.execution.again(key)
            events.append(self._event("recompute", back.number, chunk, begin))
        begin = time.monotonic()
        found = self.execution.gradients(key, given, parameters, back.keep)
        events.append(self._event("B", back.number, chunk, begin))
        return found

    # --- both ---

    def _tried(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            return Failure(self.part.number, Portable(error) if self.job.own_process else error)

    def _event(self, op: Op, number: int, chunk: int, begin: float) -> Event:
        return Event(self.part.number, self.part.number, op, number, chunk, begin, time.monotonic())

    def _light(self, value: Any) -> Any:
        """What is sent: between processes what is in main memory."""
        return value if not self.job.own_process else mapped(Tensor.cpu, value)


def _without(changed: tuple[Numbers, ...], number: int) -> tuple[Numbers, ...]:
    """Without what part ``number`` has taken."""
    return tuple([] if place == number else numbers for place, numbers in enumerate(changed))


def _add(sums: list[Tensor | None], own: set[int], found: tuple[Tensor | None, ...]) -> None:
    """Adds the gradients of a micro-batch. What autograd gave may be memory of others."""
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
    """Parameters with hooks of their own, which are for the gradient of the whole batch: the micro-batches
    see a twin of them, with the same memory, that has none."""
    twins: dict[int, Tensor] = {}
    found: list[Swap] = []
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter._backward_hooks:
                twin = twins.setdefault(id(parameter), nn.Parameter(parameter.detach()))
                found.append((layer._parameters, name, parameter, twin))
    return found


@contextlib.contextmanager
def _swapped(swaps: list[Swap]) -> Iterator[None]:
    for parameters, name, _, twin in swaps:
        parameters[name] = twin
    try:
        yield
    finally:
        for parameters, name, parameter, _ in swaps:
            parameters[name] = parameter

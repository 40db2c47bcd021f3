"""Calls whose outputs have a graph: for autograd the parts together are one function of the input and of all
parameters, whose backward pass goes back through the parts, micro-batch by micro-batch.

    batch ──split──> [part 0] ──> [part 1] ──> … ──> outputs ──join──> y      y = pipe(x)
                        │   <───────  │   <─── …  <── gradients <── split     loss(y).backward()
                        └──────┬──────┘
              gradients of x and of the parameters

So what comes before the pipe and behind it, the loss over the whole batch, hooks of parameters, wrappers that
reduce gradients, and accumulation are autograd's own affair, as with the plain module. The workers
(:mod:`graph_worker`) keep what the backward pass of a call needs until it was done without ``retain_graph``,
or no caller can ask for it any more.

One call at a time goes forward or back. :class:`_Workers` live as long as outputs that came through them do,
also when there are newer ones, because a layer has changed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flowchan import Broken, Closed, Drained
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.engine.driver import WorkersRun, part_error
from flowchan.pipelines.sequential.engine.execution import may_draw
from flowchan.pipelines.sequential.engine.plans import PartOwners
from flowchan.pipelines.sequential.engine.worker_messages import (
    Assignment,
    Backward,
    Forward,
    Key,
    PartFailure,
    WorkerAnswer,
)
from flowchan.pipelines.sequential.parts import Part, casting_here
from flowchan.pipelines.sequential.shared_memory import share
from flowchan.pipelines.sequential.state import modes_of, state_of
from flowchan.pipelines.sequential.tensor_trees import mapped, tensors
from flowchan.pipelines.sequential.timeline import TimelineEvent


class _Workers:
    """The workers of some parts. They end when nobody has this object any more."""

    def __init__(self, cut: Cut, parts: Sequence[Part], recompute: bool, deferred: bool, name: str) -> None:
        self.parts = parts
        self.dropped: deque[int] = deque()  # calls whose graphs nobody needs
        self._lock = threading.Lock()
        self._modes: Any = None
        owners = PartOwners(len(parts), tuple(range(len(parts))))
        jobs = [
            Assignment(part.number, owners, (part,), recompute, deferred, cut.on.apart, len(cut.on.hosts))
            for part in parts
        ]
        self.run = WorkersRun(name, jobs, cut.on, cut.chunks or CHUNKS)
        self.run.begin()
        weakref.finalize(self, self.run.close)

    def forward(self, call: Forward, pieces: Sequence[Any], wants: tuple[bool, ...]) -> _Answers:
        """The outputs of the micro-batches, among the items that come with the answers."""
        with self._using() as run:
            modes = self._changed_modes()
            dropped = tuple(self.dropped.popleft() for _ in range(len(self.dropped)))
            for job in run.jobs:
                own = None if modes is None else [modes[part.number] for part in job.parts]
                run.put(job.worker, call._replace(modes=own, dropped=dropped, changed=run.changed(job)))
            run.put_inputs(pieces, wants)
            return run.answers()

    def backward(self, back: Backward, gradients: Sequence[tuple[Tensor | None, ...]]) -> _Answers:
        """The gradients of the parameters, and among the items those of the inputs."""
        with self._using() as run:
            for job in run.jobs:
                run.put(job.worker, back)
            run.put_behind("B", gradients)
            return run.answers()

    @contextlib.contextmanager
    def _using(self) -> Iterator[WorkersRun]:
        """Hold the workers for one command. What breaks it off ends them: what is on its way would be taken
        for the answer to the next command."""
        with self._lock:
            try:
                if self.run.over.is_set():
                    raise Closed("the run has ended")
                yield self.run
            except BaseException as error:
                ended = isinstance(error, (Broken, Closed, Drained)) or self.run.closed
                self.run.end(at_once=True)
                if not ended:
                    raise
            else:
                return
            # another one each time, for its traceback holds this frame
            raise copy.copy(self.run.error) from self.run.error.__cause__

    def _changed_modes(self) -> Any:
        if not self.run.apart or (now := modes_of(self.parts)) == self._modes:
            return None
        self._modes = now
        return now


_Answers = tuple[list[WorkerAnswer], dict[Key, Any]]


class Differentiable:
    """The calls of a pipe whose outputs have a graph."""

    def __init__(
        self,
        cut: Cut,
        name: str,
        recompute: bool,
        deferred: bool,
        numbers: Iterator[int],
        events: deque[TimelineEvent],
    ) -> None:
        self.cut, self._name, self._options = cut, name, (recompute, deferred)
        self._numbers, self._events = numbers, events
        self._lock = threading.Lock()  # around what begins and ends workers
        self._workers: _Workers | None = None
        self._every: weakref.WeakSet[_Workers] = weakref.WeakSet()
        self._seen: Any = None  # the state of the modules that the processes have
        self._closed = False

    def call(self, value: Any) -> Any:
        """Compute the module's output for a batch, with a graph where the plain module's has one."""
        if self._closed:
            raise Closed(f"the pipe {self._name!r} is closed; make another one")
        pieces = self.cut.pieces(value, back=torch.is_grad_enabled())
        self.cut.measure(mapped(Tensor.detach, pieces[0]))
        parts = self.cut.parts
        through = _Through(self._workers_for(parts), next(self._numbers), self._events)
        # As torch's own layers do: a module that draws nothing leaves the program's generator alone.
        draws = any(may_draw(part.module) for part in parts)
        seed = int(torch.randint(2**31, ())) if draws else 0
        graph = torch.is_grad_enabled()
        call = Forward(through.number, len(pieces), seed, [], casting_here(), graph, None, ())
        outputs = _applied(through, call, pieces) if graph else through.forward(call, pieces, ())
        return self.cut.joined(outputs, list(map(self.cut.samples, pieces)), f"batch {call.number}")

    def _workers_for(self, parts: Sequence[Part]) -> _Workers:
        """The workers; new ones where there are none, they have ended, or the parts have changed since."""
        with self._lock:
            workers = self._workers
            if workers is not None and (not workers.run.alive or workers.parts is not parts):
                workers = None
            if self.cut.on.apart:
                share(part.module for part in parts if not part.away)
                now = state_of(parts)
                workers = workers if now == self._seen else None
                self._seen = now
            if workers is None:
                workers = self._workers = _Workers(self.cut, parts, *self._options, self._name)
                self._every.add(workers)
            return workers

    def close(self) -> None:
        """End the workers; backward passes of what is out raise ``Closed``."""
        with self._lock:
            self._closed = True
            every = list(self._every)  # the last ones too, which may go with their name here
            self._workers = None
            for workers in every:
                workers.run.end()

    def forget(self) -> None:
        """End the workers without waiting, as soon as no output of theirs is left."""
        self._workers = None


class _Through:
    """A call and its backward passes."""

    def __init__(self, workers: _Workers, number: int, events: deque[TimelineEvent]) -> None:
        self.workers, self.number, self.events = workers, number, events
        self.wants: list[tuple[bool, ...]] = []  # of each micro-batch's outputs
        self._asked = [
            [one for one in part.module.parameters() if one.requires_grad] for part in workers.parts
        ]
        self.parameters = list({id(one): one for asked in self._asked for one in asked}.values())
        self._versions: list[tuple[Tensor, int]] = []
        self._dropping: Any = None

    def forward(self, call: Forward, pieces: Sequence[Any], wants: tuple[bool, ...]) -> list[Any]:
        """Compute the outputs of the micro-batches. Raises ``StageError`` for the first that failed."""
        if call.keeps_graph:  # the workers hold it as long as this object is in use
            self._dropping = weakref.finalize(self, self.workers.dropped.append, self.number)
            self._dropping.atexit = False
            if self.workers.run.apart:
                every = {id(one): one for part in self.workers.parts for one in part.module.parameters()}
                self._versions = [(one, one._version) for one in every.values() if not one.is_inference()]
        answers, items = self.workers.forward(call, pieces, wants)
        self._note(answers)
        last, values = len(answers), []
        for chunk in range(len(pieces)):
            passed = items["F", last, chunk]
            if isinstance(passed, PartFailure):
                self._fail(passed, f"micro-batch {chunk} of {len(pieces)} of ")
            values.append(passed.value)
            self.wants.append(passed.wants)
        self._raise_for(answers, "")
        return values

    def backward(
        self, gradients: Sequence[Tensor | None], keep: bool
    ) -> tuple[list[tuple[Tensor | None, ...]], list[Tensor | None]]:
        """Compute the gradients of the inputs, by micro-batch, and of the parameters, from the gradients of
        the outputs."""
        self._raise_if_changed()
        every = iter(gradients)
        given = [
            tuple(one for one, want in [(next(every), want) for want in wants] if want)
            for wants in self.wants
        ]
        if not keep:
            self._dropping.detach()
        answers, items = self.workers.backward(Backward(self.number, len(given), keep), given)
        self._note(answers)
        self._raise_for(answers, "the backward pass of ")
        return [items.get(("B", -1, chunk), ()) for chunk in range(len(given))], self._of_parameters(answers)

    def _note(self, answers: list[WorkerAnswer]) -> None:
        for answer in answers:
            self.events.extend(answer.events)

    def _raise_for(self, answers: list[WorkerAnswer], of: str) -> None:
        for answer in answers:
            if answer.failure is not None:
                self._fail(answer.failure, of)

    def _fail(self, failure: PartFailure, of: str) -> NoReturn:
        raise part_error(self.workers.parts[failure.part], f"{of}batch {self.number}", failure.error)

    def _of_parameters(self, answers: list[WorkerAnswer]) -> list[Tensor | None]:
        """The gradients of all parameters; of one that several parts have, the sum."""
        found: dict[int, Tensor] = {}
        for asked, answer in zip(self._asked, answers, strict=True):
            for parameter, gradient in zip(asked, answer.gradients or (), strict=True):
                if gradient is not None:
                    so_far = found.get(id(parameter))
                    here = gradient.to(parameter.device)
                    found[id(parameter)] = here if so_far is None else so_far + here
        return [found.get(id(parameter)) for parameter in self.parameters]

    def _raise_if_changed(self) -> None:
        """What torch says where a saved tensor was changed; the processes' graphs can't see it."""
        for parameter, version in self._versions:
            if parameter._version != version:
                raise RuntimeError(
                    "a parameter of the pipe, of shape "
                    f"{tuple(parameter.shape)}, has been modified by an inplace operation since the output "
                    "was computed, so that the backward pass would be wrong: call backward() before the "
                    "optimizer's step(), or the pipe once more after it"
                )


def _applied(through: _Through, call: Forward, pieces: Sequence[Any]) -> list[Any]:
    """The outputs of the micro-batches with their graph."""
    inputs = [one for piece in pieces for one in tensors(piece)]
    holder: list[Any] = []
    flat = iter(_Parts.apply(through, call, pieces, holder, len(inputs), *inputs, *through.parameters))  # type: ignore[no-untyped-call]
    return [mapped(lambda _: next(flat), value) for value in holder]


class _Parts(torch.autograd.Function):
    """All parts together, as autograd sees them: a function of the micro-batches and the parameters."""

    @staticmethod
    def forward(
        ctx: Any, through: _Through, call: Forward, pieces: Any, holder: list[Any], count: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        """The tensors of the outputs; the outputs as they are go into ``holder``."""
        wants = tuple(one.requires_grad for one in given[: count // len(pieces)])
        holder.extend(through.forward(call, [mapped(Tensor.detach, piece) for piece in pieces], wants))
        # Autograd lets nobody change a function's output in place where it is a view, and ties its node to
        # the tensors, of which the workers may hold the one that they have made.
        flat = tuple(one.clone() if one._is_view() else one.detach() for one in tensors(holder))
        wanted = [want for each in through.wants for want in each]
        ctx.mark_non_differentiable(*(one for one, want in zip(flat, wanted, strict=True) if not want))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))  # so that torch tells of a second backward pass
        if any(wanted):
            ctx.through, ctx.wants, ctx.devices = through, wants, [one.device for one in given[:count]]
        return flat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients of the micro-batches and of the parameters."""
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True has reached a Sequential in parts, through which second derivatives "
                "do not go; compute them with the plain module, pipe.module"
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        pieces, parameters = ctx.through.backward(gradients, keep)
        inputs: list[Tensor | None] = []
        for found in map(iter, pieces):
            inputs.extend(next(found) if want else None for want in ctx.wants)
        there = [
            one if one is None else one.to(device) for one, device in zip(inputs, ctx.devices, strict=True)
        ]
        return None, None, None, None, None, *there, *parameters

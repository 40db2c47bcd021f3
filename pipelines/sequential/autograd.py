"""Run calls of a pipe whose outputs require grad.

For autograd, all parts together are one function of the input and of all parameters. The backward pass runs
through the parts in reverse, micro-batch by micro-batch.

    batch ──split──> [part 0] ──> [part 1] ──> … ──> outputs ──join──> y      y = pipe(x)
                        │   <───────  │   <─── …  <── gradients <── split     loss(y).backward()
                        └──────┬──────┘
              gradients of x and of the parameters

Everything around the pipe therefore works as with the plain module. Examples are other layers, a loss over
the whole batch, hooks on parameters, wrappers that reduce gradients, and gradient accumulation. The workers
(:mod:`graph_worker`) keep the autograd graph of a call until a backward pass without ``retain_graph``, or
until the program drops the output.

Only one call or backward pass runs at a time. If a layer changes, later calls use new :class:`_Workers`. The
old workers exist until all outputs that they computed have been released.
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
from flowchan.pipelines.sequential.cuda_streams import from_workers, to_workers
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
from flowchan.pipelines.sequential.parts import Part, current_casting
from flowchan.pipelines.sequential.shared_memory import share
from flowchan.pipelines.sequential.state import modes_of, state_of
from flowchan.pipelines.sequential.tensor_trees import mapped, tensors
from flowchan.pipelines.sequential.timeline import TimelineEvent


class _Workers:
    """Workers for a list of parts. The workers end when this object is garbage-collected."""

    def __init__(self, cut: Cut, parts: Sequence[Part], recompute: bool, deferred: bool, name: str) -> None:
        self.parts = parts
        self.dropped: deque[int] = deque()  # ids of the calls whose outputs were dropped
        self._lock = threading.Lock()
        self._modes: Any = None
        owners = PartOwners(len(parts), tuple(range(len(parts))))
        jobs = [
            Assignment(
                part.number, owners, (part,), recompute, deferred, cut.on.own_process, len(cut.on.hosts)
            )
            for part in parts
        ]
        self.run = WorkersRun(name, jobs, cut.on, cut.chunks or CHUNKS)
        self.run.begin()
        weakref.finalize(self, self.run.close)

    def forward(self, call: Forward, pieces: Sequence[Any], wants: tuple[bool, ...]) -> _Answers:
        """Run a forward pass, and return the workers' answers and the outputs of the micro-batches."""
        with self._using() as run:
            modes = self._changed_modes()
            dropped = tuple(self.dropped.popleft() for _ in range(len(self.dropped)))
            for job in run.jobs:
                own = None if modes is None else [modes[part.number] for part in job.parts]
                run.put(job.worker, call._replace(modes=own, dropped=dropped, changed=run.changed(job)))
            run.put_inputs(pieces, wants)
            return run.answers()

    def backward(self, back: Backward, gradients: Sequence[tuple[Tensor | None, ...]]) -> _Answers:
        """Run a backward pass.

        The answers contain the parameters' gradients, and the items contain the inputs' gradients.
        """
        with self._using() as run:
            for job in run.jobs:
                run.put(job.worker, back)
            run.put_to_last("B", gradients)
            return run.answers()

    @contextlib.contextmanager
    def _using(self) -> Iterator[WorkersRun]:
        """Give the caller exclusive use of the workers for one command.

        If the command is interrupted, this method ends the workers. Otherwise, their late messages would be
        mistaken for answers to the next command.
        """
        with self._lock:
            try:
                if self.run.over.is_set():
                    raise Closed("the run of the pipe has ended")
                yield self.run
            except BaseException as error:
                ended = isinstance(error, (Broken, Closed, Drained)) or self.run.closed
                self.run.end(at_once=True)
                if not ended:
                    raise
            else:
                return
            # Raise a copy of the error, because the traceback of each call refers to the frame of that call.
            raise copy.copy(self.run.error) from self.run.error.__cause__

    def _changed_modes(self) -> Any:
        if not self.run.own_processes or (now := modes_of(self.parts)) == self._modes:
            return None
        self._modes = now
        return now


_Answers = tuple[list[WorkerAnswer], dict[Key, Any]]


class Differentiable:
    """Forward and backward passes for the calls of a pipe whose outputs require grad."""

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
        self._lock = threading.Lock()  # protects the start and end of workers
        self._workers: _Workers | None = None
        self._every: weakref.WeakSet[_Workers] = weakref.WeakSet()
        self._seen: Any = None  # state of the modules in the worker processes
        self._closed = False

    def call(self, value: Any) -> Any:
        """Compute the module's output for a batch. It requires grad if the plain module's output would."""
        if self._closed:
            raise Closed(f"the pipe {self._name!r} is closed; create another one")
        pieces = self.cut.pieces(value, back=torch.is_grad_enabled())
        self.cut.measure(mapped(Tensor.detach, pieces[0]))
        parts = self.cut.parts
        through = _Through(self._workers_for(parts), next(self._numbers), self._events)
        # If the module draws no random numbers, the call must not advance the program's generator.
        draws = any(may_draw(part.module) for part in parts)
        seed = int(torch.randint(2**31, ())) if draws else 0
        graph = torch.is_grad_enabled()
        call = Forward(through.number, len(pieces), seed, [], current_casting(), graph, None, ())
        outputs = _applied(through, call, pieces) if graph else through.forward(call, pieces, ())
        return self.cut.joined(outputs, list(map(self.cut.samples, pieces)), f"batch {call.number}")

    def _workers_for(self, parts: Sequence[Part]) -> _Workers:
        """Return the current workers, or new ones if they have ended or the parts have changed."""
        with self._lock:
            workers = self._workers
            if workers is not None and (not workers.run.alive or workers.parts is not parts):
                workers = None
            if self.cut.on.own_process:
                share(part.module for part in parts if not part.remote)
                now = state_of(parts)
                workers = workers if now == self._seen else None
                self._seen = now
            if workers is None:
                workers = self._workers = _Workers(self.cut, parts, *self._options, self._name)
                self._every.add(workers)
            return workers

    def close(self) -> None:
        """End the workers. Later backward passes that need the workers raise ``Closed``."""
        with self._lock:
            self._closed = True
            # Make a list, because the next line could otherwise free the current workers before they end.
            every = list(self._every)
            self._workers = None
            for workers in every:
                workers.run.end()

    def forget(self) -> None:
        """Drop the workers. They end when the last output that they computed is released."""
        self._workers = None


class _Through:
    """One call of the pipe, and its backward passes."""

    def __init__(self, workers: _Workers, number: int, events: deque[TimelineEvent]) -> None:
        self.workers, self.number, self.events = workers, number, events
        self.wants: list[tuple[bool, ...]] = []  # for each micro-batch, whether each output requires grad
        self._parameters_of = [
            [one for one in part.module.parameters() if one.requires_grad] for part in workers.parts
        ]
        self.parameters = list(
            {id(one): one for requested in self._parameters_of for one in requested}.values()
        )
        self._versions: list[tuple[Tensor, int]] = []
        self._dropping: Any = None

    def forward(self, call: Forward, pieces: Sequence[Any], wants: tuple[bool, ...]) -> list[Any]:
        """Compute the outputs of the micro-batches. Raise ``StageError`` for the first failed micro-batch."""
        if call.keeps_graph:  # let the workers drop the graph when this object is freed
            self._dropping = weakref.finalize(self, self.workers.dropped.append, self.number)
            self._dropping.atexit = False
            if self.workers.run.own_processes:
                every = {id(one): one for part in self.workers.parts for one in part.module.parameters()}
                self._versions = [(one, one._version) for one in every.values() if not one.is_inference()]
        answers, items = self.workers.forward(call, pieces, wants)
        self._record(answers)
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
        """Compute the gradients of the inputs for each micro-batch, and the gradients of the parameters."""
        self._raise_if_changed()
        every = iter(gradients)
        given = [
            tuple(one for one, want in [(next(every), want) for want in wants] if want)
            for wants in self.wants
        ]
        if not keep:
            self._dropping.detach()
        answers, items = self.workers.backward(Backward(self.number, len(given), keep), given)
        self._record(answers)
        self._raise_for(answers, "the backward pass of ")
        return [items.get(("B", -1, chunk), ()) for chunk in range(len(given))], self._of_parameters(answers)

    def _record(self, answers: list[WorkerAnswer]) -> None:
        for answer in answers:
            self.events.extend(answer.events)

    def _raise_for(self, answers: list[WorkerAnswer], of: str) -> None:
        for answer in answers:
            if answer.failure is not None:
                self._fail(answer.failure, of)

    def _fail(self, failure: PartFailure, of: str) -> NoReturn:
        raise part_error(self.workers.parts[failure.part], f"{of}batch {self.number}", failure.error)

    def _of_parameters(self, answers: list[WorkerAnswer]) -> list[Tensor | None]:
        """Return the gradients of all parameters. A parameter in several parts gets the sum."""
        found: dict[int, Tensor] = {}
        for requested, answer in zip(self._parameters_of, answers, strict=True):
            for parameter, gradient in zip(requested, answer.gradients or (), strict=True):
                if gradient is not None:
                    so_far = found.get(id(parameter))
                    moved = gradient.to(parameter.device)
                    found[id(parameter)] = moved if so_far is None else so_far + moved
        return [found.get(id(parameter)) for parameter in self.parameters]

    def _raise_if_changed(self) -> None:
        """Raise the error that torch raises if a saved tensor has been modified.

        The graphs in the processes cannot detect such changes.
        """
        for parameter, version in self._versions:
            if parameter._version != version:
                raise RuntimeError(
                    f"Sequential: a parameter of shape {tuple(parameter.shape)} was modified by an "
                    "inplace operation after the output was computed; call backward() before the "
                    "optimizer's step()"
                )


def _applied(through: _Through, call: Forward, pieces: Sequence[Any]) -> list[Any]:
    """Compute the outputs of the micro-batches, attached to the autograd graph."""
    inputs = [one for piece in pieces for one in tensors(piece)]
    passage = _Passage(through)
    token = _Parts.apply(passage, call, pieces, len(inputs), *inputs, *through.parameters)  # type: ignore[no-untyped-call]
    flat = iter(_Outputs.apply(passage, token))  # type: ignore[no-untyped-call]
    outputs, passage.outputs = passage.outputs, []
    return [mapped(lambda _: next(flat), value) for value in outputs]


class _Passage:
    """One call of the pipe, and the data that its two autograd functions exchange.

    ``outputs`` are the outputs of the micro-batches. ``gradients`` maps the number of a backward pass to the
    output tensors' gradients and the thread that received them.
    """

    def __init__(self, through: _Through) -> None:
        self.through = through
        self.outputs: list[Any] = []
        self.gradients: dict[int, tuple[tuple[Tensor | None, ...], int]] = {}


class _Parts(torch.autograd.Function):
    """Autograd function of all inputs and parameters, which runs all parts.

    The output is an empty CPU tensor, the token, from which :class:`_Outputs` creates the output tensors.
    Autograd therefore runs the backward pass in the thread that called ``backward()``. For a CUDA tensor,
    autograd would use its only thread for that device. The thread would wait for workers whose own backward
    passes need the same thread.
    """

    @staticmethod
    def forward(
        ctx: Any, passage: _Passage, call: Forward, pieces: Sequence[Any], count: int, *given: Tensor
    ) -> Tensor:
        """Compute the outputs of all micro-batches, and return the token."""
        wants = tuple(one.requires_grad for one in given[: count // len(pieces)])
        detached = [mapped(Tensor.detach, piece) for piece in pieces]
        passage.outputs = passage.through.forward(call, detached, wants)
        ctx.passage, ctx.wants, ctx.devices = passage, wants, [one.device for one in given[:count]]
        ctx.save_for_backward(torch.empty(0))  # makes torch detect a second backward pass
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Any:
        """Return the gradients of the micro-batches and of the parameters."""
        gradients, receiver = ctx.passage.gradients.pop(torch._C._current_graph_task_id())
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Sequential: create_graph=True is not supported, because second derivatives cannot flow "
                "through the parts; use the plain module, pipe.module"
            )
        if receiver == threading.get_ident() and any(one is not None and one.is_cuda for one in gradients):
            raise RuntimeError(
                "Sequential: backward() must not run in autograd's thread of a CUDA device, because the "
                "parts need that thread; for torch.utils.checkpoint around the pipe, use use_reentrant=False"
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        pieces, parameters = ctx.passage.through.backward(gradients, keep)
        inputs: list[Tensor | None] = []
        for found in map(iter, pieces):
            inputs.extend(next(found) if want else None for want in ctx.wants)
        on_devices = [
            one if one is None else one.to(device) for one, device in zip(inputs, ctx.devices, strict=True)
        ]
        from_workers([*on_devices, *parameters])
        return None, None, None, None, *on_devices, *parameters


class _Outputs(torch.autograd.Function):
    """Autograd function that creates the output tensors from the token of :class:`_Parts`."""

    @staticmethod
    def forward(ctx: Any, passage: _Passage, _token: Tensor) -> tuple[Tensor, ...]:
        """Return the output tensors of all micro-batches."""
        # Return new tensors. Autograd forbids in-place changes to an output that is a view. It also attaches
        # this node to the returned tensors, but a worker may still use the tensors that it has created.
        flat = tuple(one.clone() if one._is_view() else one.detach() for one in tensors(passage.outputs))
        wanted = [want for each in passage.through.wants for want in each]
        ctx.mark_non_differentiable(*(one for one, want in zip(flat, wanted, strict=True) if not want))
        ctx.set_materialize_grads(False)
        ctx.passage = passage
        return flat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Keep the gradients for the backward pass of :class:`_Parts`. Return a gradient for the token."""
        to_workers([one for one in gradients if one is not None])
        ctx.passage.gradients[torch._C._current_graph_task_id()] = gradients, threading.get_ident()
        return None, torch.empty(0)

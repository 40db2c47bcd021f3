"""Calls whose outputs have a graph: for autograd the parts together are one function of the input and of all
parameters, whose backward pass goes back through the parts, micro-batch by micro-batch.

    batch ──split──> [part 0] ──> [part 1] ──> … ──> outputs ──join──> y      y = pipe(x)
                        │   <───────  │   <─── …  <── gradients <── split     loss(y).backward()
                        └──────┬──────┘
              gradients of x and of the parameters

So what comes before the pipe and behind it, the loss over the whole batch, hooks of parameters, wrappers that
reduce gradients, and accumulation are autograd's own affair, as with the plain module. The workers
(:mod:`passes`) keep what the backward pass of a call needs until it was done without ``retain_graph``, or
nobody can ask for it any more.

One call at a time goes forward or back. A :class:`_Line` is one run of the workers; it lives as long as
outputs that came through it do, also when there is a newer one, because a layer has changed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flowchan import (
    Broken,
    Channel,
    Closed,
    Drained,
    Full,
    Graph,
    In,
    Input,
    Out,
    RunError,
    StageError,
    Stream,
)
from flowchan.declare.places import Place
from flowchan.pipelines.sequential import passes
from flowchan.pipelines.sequential.copies import Copies
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.execution import Passed, casting_here, may_draw
from flowchan.pipelines.sequential.parts import Part
from flowchan.pipelines.sequential.passes import Ahead, Answer, Back, Call, Drop, Failure, Gradients, PartJob
from flowchan.pipelines.sequential.shared import share, state_tensors
from flowchan.pipelines.sequential.state import modes_of, state_of
from flowchan.pipelines.sequential.timeline import Event
from flowchan.pipelines.sequential.values import mapped, tensors
from flowchan.run.latch import Latch


class _Ends:
    """The ends of a run's channels, which the program holds: what goes in, and the ports that a stage of the
    run lends. It doesn't know the line, which can so be forgotten while the run goes on."""

    def __init__(self) -> None:
        self.error: BaseException = Closed(
            "the pipe was closed, and the workers that hold its graphs have ended"
        )
        self.closed = False
        self.outputs: In[Any]
        self.answers: In[Any]
        self.inputs: list[Out[Any]] = []
        self.over, self.opened = Latch(), Latch()
        self._ending: Channel[None] = Channel(1)

    def attend(self, outputs: In[Any], answers: In[Any]) -> None:
        """The last stage: lends its ports until the end."""
        self.outputs, self.answers = outputs, answers
        self.opened.set()
        with contextlib.suppress(Drained):
            self._ending.get()

    def watch(self, run: Any) -> None:
        """Waits for the end of the run, whatever it ends by."""
        try:
            run.wait()
        except RunError as failed:
            self.error = failed.exceptions[0]
        except BaseException as failed:
            self.error = failed
        self.opened.set()
        self.over.set()

    def close(self) -> None:
        """Lets the run end. Takes no lock, and does not wait."""
        self.closed = True
        for port in self.inputs:
            port.close()
        with contextlib.suppress(Full, Closed):
            self._ending.put_nowait(None)


class _Line:
    """One run of workers with the parts of then."""

    def __init__(
        self, parts: Sequence[Part], on: Place, chunks: int, recompute: bool, deferred: bool, name: str
    ) -> None:
        self.parts = parts
        self.apart = on.apart
        self._copies = [Copies(state_tensors(part.module)) for part in parts if part.away]
        self.dropped: deque[int] = deque()  # calls that nobody will go back through
        self.lock = threading.Lock()
        self._modes: Any = None
        self._ends = ends = _Ends()
        self._graph = Graph(name)
        inputs = self._declare(on, chunks, recompute, deferred)
        run = self._graph.start()
        ends.inputs = [run[stream] for stream in inputs]
        self._forward, self._backward = ends.inputs
        watcher = threading.Thread(target=ends.watch, args=(run,), name=f"{name} watcher", daemon=True)
        watcher.start()
        self._run, self._watcher = run, watcher
        weakref.finalize(self, ends.close)

    def _declare(
        self, on: Place, chunks: int, recompute: bool, deferred: bool
    ) -> tuple[Input[Any], Input[Any]]:
        graph, last, capacity = self._graph, len(self.parts) - 1, 2 * chunks + 8
        stream = forward = graph.input("micro-batches", capacity)
        backward = graph.input("gradients", capacity)
        answers: list[Stream[Any]] = []
        after: Any = None
        for part in self.parts:
            gradients = backward if part.number == last else graph.feedback(f"gradients for {part.name}")
            job = PartJob(part, last + 1, recompute, deferred, self.apart, len(on.hosts))
            function = passes.other if part.number else passes.first
            outs = graph.stage(function, stream, gradients, name=part.name, on=on, capacity=capacity, job=job)
            named = {out.port: out for out in outs}
            if after is not None:
                after.feed(named["back"])
            stream, after = named["onward"], gradients
            answers.append(named["answers"])
        answered = graph.merge(*answers, name="answers") if last else answers[0]
        graph.stage(self._ends.attend, stream, answered, name="results")
        return forward, backward

    @property
    def runs(self) -> bool:
        return not self._ends.over.is_set()

    # --- a call ---

    def ahead(self, call: Call, pieces: Sequence[Any], wants: tuple[bool, ...]) -> list[Ahead]:
        """What comes out for each micro-batch."""
        with self.lock, self._using():
            if modes := self._changed_modes():
                call = call._replace(modes=modes)
            if self.dropped:
                self._forward.put(Drop(tuple(self.dropped.popleft() for _ in range(len(self.dropped)))))
            first = call._replace(changed=tuple(copies.changed() for copies in self._copies))
            for chunk, piece in enumerate(pieces):
                passed = Passed(self._light(piece), {}, wants)
                self._forward.put(Ahead(call if chunk else first, chunk, passed, ()))
            found = [self._ends.outputs.get() for _ in pieces]
            for number, changed in (each for item in found for each in item.changed):
                self._copies[number].take(changed)
            return found

    def back(
        self, number: int, gradients: Sequence[tuple[Tensor | None, ...]], keep: bool
    ) -> dict[int, Answer]:
        """The answers of all parts."""
        with self.lock, self._using():
            self._forward.put(Back(number, len(gradients), keep))
            for chunk, values in enumerate(gradients):
                self._backward.put(Gradients(chunk, self._light(values)))
            found = [self._ends.answers.get() for _ in self.parts]
        return {answer.part: answer for answer in found}

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """What breaks this off ends the line: nobody would take out what is on its way."""
        self._ends.opened.wait()
        try:
            if self._ends.over.is_set():
                raise Closed("the run has ended")
            yield
        except BaseException as error:
            ended = isinstance(error, (Broken, Closed, Drained)) or self._ends.closed
            self.end(at_once=True)
            if not ended:
                raise
        else:
            return
        # another one each time, for its traceback holds this frame
        raise copy.copy(self._ends.error) from self._ends.error.__cause__

    def _changed_modes(self) -> Any:
        if not self.apart or (now := modes_of(self.parts)) == self._modes:
            return None
        self._modes = now
        return now

    def _light(self, value: Any) -> Any:
        if not self.apart:
            return value
        return mapped(lambda tensor: tensor.detach().cpu().contiguous(), value)

    def end(self, at_once: bool = False) -> None:
        """Ends the run and waits for it."""
        self._ends.close()
        if at_once:
            self._run.abort()
        self._ends.over.wait()
        self._watcher.join()


class Differentiable:
    """The calls of a pipe whose outputs have a graph."""

    def __init__(
        self,
        cut: Cut,
        name: str,
        recompute: bool,
        deferred: bool,
        numbers: Iterator[int],
        events: deque[Event],
    ) -> None:
        self.cut, self._name, self._options = cut, name, (recompute, deferred)
        self._numbers, self._events = numbers, events
        self._lock = threading.Lock()  # around what begins and ends lines
        self._line: _Line | None = None
        self._lines: weakref.WeakSet[_Line] = weakref.WeakSet()
        self._seen: Any = None  # the state of the modules that the processes have
        self._closed = False

    def call(self, value: Any) -> Any:
        """The module's output for a batch, with a graph where the plain module's has one."""
        if self._closed:
            raise Closed(f"the pipe {self._name!r} is closed; make another one")
        pieces = self.cut.pieces(value, back=torch.is_grad_enabled())
        self.cut.measure(mapped(Tensor.detach, pieces[0]))
        parts = self.cut.parts
        through = _Through(self._line_for(parts), next(self._numbers), self._events)
        # As torch's own layers do: a module that draws nothing leaves the program's generator alone.
        draws = any(may_draw(part.module) for part in parts)
        seed = int(torch.randint(2**31, ())) if draws else 0
        call = Call(through.number, len(pieces), seed, casting_here(), torch.is_grad_enabled(), None)
        outputs = _applied(through, call, pieces) if call.graph else through.ahead(call, pieces, ())
        return self.cut.joined(outputs, list(map(self.cut.samples, pieces)), f"batch {call.number}")

    def _line_for(self, parts: Sequence[Part]) -> _Line:
        """The workers; new ones where there are none, they have ended, or the parts have changed since."""
        with self._lock:
            line = self._line
            if line is not None and (not line.runs or line.parts is not parts):
                line = None
            if self.cut.on.apart:
                share(part.module for part in parts if not part.away)
                now = state_of(parts)
                line = line if now == self._seen else None
                self._seen = now
            if line is None:
                chunks = self.cut.chunks or CHUNKS
                line = self._line = _Line(parts, self.cut.on, chunks, *self._options, self._name)
                self._lines.add(line)
            return line

    def close(self) -> None:
        """Ends the workers; backward passes of what is out raise ``Closed``."""
        with self._lock:
            self._closed = True
            lines = list(self._lines)  # the last one too, which may go with its name here
            self._line = None
            for line in lines:
                line.end()

    def forget(self) -> None:
        """Ends the workers without waiting, as soon as nobody has an output of theirs."""
        self._line = None


class _Through:
    """What a call and its backward passes know of each other."""

    def __init__(self, line: _Line, number: int, events: deque[Event]) -> None:
        self.line, self.number, self.events = line, number, events
        self.wants: list[tuple[bool, ...]] = []  # of each micro-batch's outputs
        self._asked = [[one for one in part.module.parameters() if one.requires_grad] for part in line.parts]
        self.parameters = list({id(one): one for asked in self._asked for one in asked}.values())
        self._versions: list[tuple[Tensor, int]] = []
        self._dropping: Any = None

    def ahead(self, call: Call, pieces: Sequence[Any], wants: tuple[bool, ...]) -> list[Any]:
        """The outputs of the micro-batches. Raises ``StageError`` for the first that failed."""
        if call.graph:  # the workers hold it as long as anybody has this
            self._dropping = weakref.finalize(self, self.line.dropped.append, self.number)
            self._dropping.atexit = False
            if self.line.apart:
                every = {id(one): one for part in self.line.parts for one in part.module.parameters()}
                self._versions = [(one, one._version) for one in every.values() if not one.is_inference()]
        values = []
        for item in self.line.ahead(call, pieces, wants):
            self.events.extend(item.events)
            if isinstance(item.passed, Failure):
                raise self._told(item.passed, f"micro-batch {item.chunk} of {len(pieces)} of ")
            values.append(item.passed.value)
            self.wants.append(item.passed.wants)
        return values

    def back(self, gradients: Sequence[Tensor | None], keep: bool) -> dict[int, Answer]:
        """What the parts answer to the gradients of the outputs."""
        self._raise_if_changed()
        every = iter(gradients)
        given = [
            tuple(one for one, want in [(next(every), want) for want in wants] if want)
            for wants in self.wants
        ]
        if not keep:
            self._dropping.detach()
        answers = self.line.back(self.number, given, keep)
        for answer in answers.values():
            self.events.extend(answer.events)
        for answer in answers.values():
            if answer.failure is not None:
                raise self._told(answer.failure, "the backward pass of ")
        return answers

    def of_parameters(self, answers: dict[int, Answer]) -> list[Tensor | None]:
        """The gradients of all parameters; of one that several parts have, the sum."""
        found: dict[int, Tensor] = {}
        for asked, number in zip(self._asked, sorted(answers), strict=True):
            for parameter, gradient in zip(asked, answers[number].gradients, strict=True):
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

    def _told(self, failure: Failure, of: str) -> StageError:
        part = self.line.parts[failure.part]
        where = f"{of}batch {self.number}"
        cause = failure.error
        error = StageError(
            f"{part} failed on {where}: {type(cause).__name__}: {cause}",
            stage=part.name, worker=part.name, item=where,
        )  # fmt: skip
        error.__cause__ = cause
        return error


def _applied(through: _Through, call: Call, pieces: Sequence[Any]) -> list[Any]:
    """The outputs of the micro-batches with their graph."""
    inputs = [one for piece in pieces for one in tensors(piece)]
    holder: list[Any] = []
    flat = iter(_Parts.apply(through, call, pieces, holder, len(inputs), *inputs, *through.parameters))  # type: ignore[no-untyped-call]
    return [mapped(lambda _: next(flat), value) for value in holder]


class _Parts(torch.autograd.Function):
    """All parts together, as autograd sees them: a function of the micro-batches and the parameters."""

    @staticmethod
    def forward(
        ctx: Any, through: _Through, call: Call, pieces: Any, holder: list[Any], count: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        """The tensors of the outputs; the outputs as they are go into ``holder``."""
        wants = tuple(one.requires_grad for one in given[: count // len(pieces)])
        holder.extend(through.ahead(call, [mapped(Tensor.detach, piece) for piece in pieces], wants))
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
        answers = ctx.through.back(gradients, torch._C._autograd._get_current_graph_task_keep_graph())
        inputs: list[Tensor | None] = []
        for found in map(iter, answers[0].inputs):
            inputs.extend(next(found) if want else None for want in ctx.wants)
        there = [
            one if one is None else one.to(device) for one, device in zip(inputs, ctx.devices, strict=True)
        ]
        return None, None, None, None, None, *there, *ctx.through.of_parameters(answers)

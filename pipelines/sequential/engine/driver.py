"""Implement the program's side of a run, which starts and ends the run, and exchanges messages with workers.

The last stage, ``results``, only lends its ports to the program, which reads from them directly. A thread
between the parts and the program would interrupt a part twice per batch. The first interruption would be its
own wake-up, and the second that of the program. A watcher thread waits until the run ends, so that callers
that are waiting always return.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from flowchan import (
    Channel,
    Closed,
    Drained,
    Full,
    Graph,
    In,
    Input,
    Out,
    Run,
    RunError,
    StageError,
    Stream,
    select,
)
from flowchan.channel.latch import Latch
from flowchan.declare.placements import Placement
from flowchan.pipelines.sequential.engine.execution import Passed
from flowchan.pipelines.sequential.engine.stages import declare
from flowchan.pipelines.sequential.engine.worker_messages import Assignment, Item, Key, WorkerAnswer
from flowchan.pipelines.sequential.parts import Part
from flowchan.pipelines.sequential.shared_memory import state_tensors
from flowchan.pipelines.sequential.state import Numbers, SyncedTensors
from flowchan.pipelines.sequential.tensor_trees import mapped


class PipelineRun:
    """One run of a graph that a subclass declares.

    The run's threads refer to this object. A :class:`PipelineRun` must therefore not refer to any object that
    closes the run in its finalizer.
    """

    run: Run

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self.error: BaseException = Closed("the pipe was closed, and its workers have ended")
        self.failure: RunError | None = None
        self.ports: list[In[Any]] = []  # lent by the last stage
        self.inputs: list[Out[Any]] = []
        self.closed = False
        # Latches, because Ctrl-C in Thread.join() or is_alive() can make a running thread appear finished.
        self.opened, self.over = Latch(), Latch()
        self._watcher: threading.Thread | None = None
        self._ending: Channel[None] = Channel(1)

    def lend(self, *streams: Stream[Any]) -> None:
        """Declare the last stage, which lends its ports for one or two streams to the program."""
        self.graph.stage(self._lend if len(streams) > 1 else self._lend_one, *streams, name="results")

    def _lend(self, outputs: In[Any], others: In[Any]) -> None:
        self._serve([outputs, others])

    def _lend_one(self, outputs: In[Any]) -> None:
        self._serve([outputs])

    def _serve(self, ports: list[In[Any]]) -> None:
        """Run the last stage: lend the ports until the run is closed, and then read the remaining items."""
        self.ports = ports
        self.opened.set()
        gets: list[Any] = [*self.watched(), self._ending]
        with contextlib.suppress(Drained):
            while True:
                found = select(gets)
                if found.channel is self._ending:
                    gets = list(ports)
                else:
                    self.receive(found.channel, found.item)

    def watched(self) -> Sequence[In[Any]]:
        """Return the ports that the last stage reads for the whole run."""
        return ()

    def receive(self, port: Any, item: Any) -> None:
        """Handle an item that the last stage has read (default: ignore the item)."""

    def start(self, inputs: Sequence[Input[Any]]) -> None:
        """Start the run, which ends when all ``inputs`` are closed."""
        run = self.run = self.graph.start()
        self.inputs = [run[stream] for stream in inputs]
        watcher = threading.Thread(target=self._watch, name=f"{self.graph.name} watcher", daemon=True)
        watcher.start()
        self._watcher = watcher

    def _watch(self) -> None:
        try:
            self.run.wait()
        except RunError as failed:
            self.failure, self.error = failed, failed.exceptions[0]
        except BaseException as failed:
            self.error = failed
        self.opened.set()
        self.ended()
        self.over.set()

    def ended(self) -> None:
        """Clean up when the run has ended, before :attr:`over` is set."""

    @property
    def started(self) -> bool:
        """Return True if the run has started."""
        return self._watcher is not None

    @property
    def alive(self) -> bool:
        """Return True if the run has started and has not ended."""
        return self.started and not self.over.is_set()

    def close(self) -> None:
        """Let the run finish the items in flight and then end. Return at once, without taking a lock."""
        self.closed = True
        for port in self.inputs:
            port.close()
        with contextlib.suppress(Full):
            self._ending.put_nowait(None)

    def end(self, at_once: bool = False) -> None:
        """End the run, and wait for its end. Unless ``at_once`` is true, finish the items in flight first."""
        if self._watcher is not None:
            self.close()
            if at_once:
                self.run.abort()
            self.over.wait()
            self._watcher.join()


class WorkersRun(PipelineRun):
    """Run whose workers execute commands."""

    def __init__(self, name: str, jobs: Sequence[Assignment], on: Placement, chunks: int) -> None:
        super().__init__(name)
        self.jobs, self.own_processes = jobs, on.own_process
        self._commands, answers = declare(self.graph, jobs, on, chunks)
        self.lend(*answers)
        # Tensors of the parts that are on other hosts, by worker and part.
        self._synced: list[list[SyncedTensors]] = []

    def begin(self) -> None:
        """Start the workers."""
        self._synced = [
            [SyncedTensors(state_tensors(part.module)) for part in job.parts if part.remote]
            for job in self.jobs
        ]
        self.start(self._commands)

    def put(self, worker: int, item: Any) -> None:
        """Send a worker a command, or an input for a step."""
        self.inputs[worker].put(item)

    def put_inputs(self, pieces: Sequence[Any], wants: tuple[bool, ...] = ()) -> None:
        """Send the micro-batches of a batch to the worker of the first part."""
        worker = self.jobs[0].owners.of[0]
        for chunk, piece in enumerate(pieces):
            self.put(worker, Item(("F", 0, chunk), Passed(self.on_cpu(piece), {}, wants)))

    def put_to_last(self, what: str, pieces: Sequence[Any]) -> None:
        """Send the worker of the last part one gradient or target per micro-batch."""
        last = self.jobs[0].total - 1
        for chunk, piece in enumerate(pieces):
            self.put(self.jobs[0].owners.of[-1], Item((what, last, chunk), self.on_cpu(piece)))

    def on_cpu(self, value: Any) -> Any:
        """Prepare a value to be sent. If it goes to another process, move it to CPU memory."""
        if not self.own_processes:
            return value
        return mapped(lambda tensor: tensor.detach().cpu().contiguous(), value)

    def changed(self, job: Assignment) -> list[Numbers]:
        """Return the program's changes to a worker's remote parts since the last command."""
        return [tensors.changed() for tensors in self._synced[job.worker]]

    def answers(self) -> tuple[list[WorkerAnswer], dict[Key, Any]]:
        """Receive the answers of all workers, and the items that parts send to the program."""
        self.opened.wait()
        if not self.ports:
            raise Closed("the run of the pipe has ended")
        answers: dict[int, WorkerAnswer] = {}
        items: dict[Key, Any] = {}
        for port, count in zip(self.ports, (1, len(self.jobs) - 1), strict=False):
            wanted = len(answers) + count
            while len(answers) < wanted:
                got = port.get()
                if isinstance(got, Item):
                    items[got.key] = got.content
                    continue
                answers[got.worker] = got
                for tensors, numbers in zip(self._synced[got.worker], got.changed, strict=False):
                    tensors.take(numbers)
        return [answers[worker] for worker in range(len(self.jobs))], items


def part_error(part: Part, where: str, cause: BaseException) -> StageError:
    """Create the error for a part that failed on a micro-batch or a batch."""
    error = StageError(
        f"{part} failed on {where}: {type(cause).__name__}: {cause}",
        stage=part.name, worker=part.name, item=where,
    )  # fmt: skip
    error.__cause__ = cause
    return error

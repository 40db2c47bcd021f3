"""Run the workers of an ``async def`` stage as tasks of one event loop on one thread.

For deadlock detection, the supervisor asks whether these tasks can still make progress. An event loop without
timers, sockets or due callbacks calls its selector without a timeout. If, in addition, every task awaits a
channel of the graph, only a channel can wake the loop. Any other wait, for example for a future or for
another task, counts as work. A wait for a channel in the user's own event loop also counts as work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import selectors
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

from flowchan.channel.awaiting import end_waits, waits_of_loops
from flowchan.channel.channel import Channel
from flowchan.declare.values import Stage
from flowchan.errors import Closed
from flowchan.run.policy import seeds
from flowchan.run.policy.events import Began, Event, Failure, WorkerId
from flowchan.run.policy.seeds import Worker
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.operator_job import OperatorJob
from flowchan.run.worker.port_release import PortRelease
from flowchan.run.worker.worker import end, ends_of, job_of, join_ports, tell_aborts, with_short_traceback
from flowchan.run.worker.worker_callable import AsyncCallable, nothing

ANSWER_WITHIN_S = 0.05
"""Time limit for an event loop's answer, in seconds. A slower loop counts as busy."""
STACKS_WITHIN_S = 1.0
"""Time limit for reading the stacks of coroutines, in seconds."""


class _Selector(selectors.DefaultSelector):
    """Selector that knows whether only other threads can wake its event loop."""

    is_idle = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # If there is only one socket, it is the loop's own, through which other threads wake the loop.
        self.is_idle = timeout is None and len(self.get_map()) == 1
        return super().select(timeout)


class StageLoop(asyncio.SelectorEventLoop):
    """Event loop that knows whether only channels can wake it.

    ``starter`` is the task that starts the workers and waits for them. This task does not count as work.
    """

    def __init__(self) -> None:
        self._waiting = _Selector()
        super().__init__(self._waiting)
        self.starter: asyncio.Task[Any] | None = None

    def has_only(self, tasks: Collection[asyncio.Task[Any] | None]) -> bool:
        """Return whether the loop is idle and has no task except ``tasks``. Call this on another thread."""
        answer: concurrent.futures.Future[bool] = concurrent.futures.Future()

        def check() -> None:  # runs in the loop, because other threads must not read its tasks without a GIL
            answer.set_result(self._waiting.is_idle and asyncio.all_tasks() <= {*tasks, self.starter})

        try:
            self.call_soon_threadsafe(check)
            return answer.result(ANSWER_WITHIN_S)
        except (TimeoutError, RuntimeError):  # the loop is too busy to answer, or closed
            return False


def _stage_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop: a :class:`StageLoop`, unless the program's policy provides another class."""
    loop = asyncio.new_event_loop()
    if type(loop) is not asyncio.SelectorEventLoop:
        return loop
    loop.close()
    return StageLoop()


def only_wait_for(channels: Collection[Channel[Any]]) -> bool:
    """Return whether only these channels can wake the event loops that wait for them."""
    known = {id(channel) for channel in channels}
    for loop, waits in waits_of_loops():
        tasks = {task for task, channel in waits if id(channel) in known}
        if tasks and not (isinstance(loop, StageLoop) and loop.has_only(tasks)):
            return False
    return True


class Tasks:
    """Gives other threads access to the tasks of one async stage.

    Unlike a thread, a task can be cancelled while it waits. ``into`` is the input channel; while it is empty,
    the tasks have no work. ``ids`` names the workers in the order of their tasks.
    """

    def __init__(self, into: Channel[Any] | None = None, ids: Sequence[WorkerId] = ()) -> None:
        self.into = into
        self._ids = ids
        self._of_worker: dict[WorkerId, asyncio.Task[None]] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the tasks. Later calls have no effect, so that they cannot disturb the tasks' cleanup."""
        with self._lock:
            loop, repeated, self._cancelled = self._loop, self._cancelled, True
        if loop is not None and not repeated:
            with contextlib.suppress(RuntimeError):  # the loop is closed because the tasks have ended
                loop.call_soon_threadsafe(self._cancel)

    def examine(self, ids: Collection[WorkerId], read: Callable[[Any], str]) -> dict[WorkerId, str]:
        """Call ``read`` in the event loop with the coroutine of each running worker in ``ids``.

        The result is empty if the event loop has ended or is too busy to answer in time.
        """
        answer: concurrent.futures.Future[dict[WorkerId, str]] = concurrent.futures.Future()

        def examine() -> None:
            running = {id: task for id, task in self._of_worker.items() if id in ids and not task.done()}
            answer.set_result({id: read(task.get_coro()) for id, task in running.items()})

        with self._lock:
            loop = self._loop
        if loop is not None and not set(ids).isdisjoint(self._ids):
            with contextlib.suppress(TimeoutError, RuntimeError):  # the loop is busy or closed
                loop.call_soon_threadsafe(examine)
                return answer.result(STACKS_WITHIN_S)
        return {}

    def leave_alone(self) -> None:
        """Protect the current task from cancellation while it cleans up."""
        self._tasks = [task for task in self._tasks if task is not asyncio.current_task()]

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def run(self, workers: Iterable[Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(loop, StageLoop):
            loop.starter = asyncio.current_task()
        running = [asyncio.ensure_future(worker) for worker in workers]
        self._tasks = running
        self._of_worker = dict(zip(self._ids, running, strict=False))
        with self._lock:
            self._loop = loop
            cancelled = self._cancelled
        await asyncio.sleep(0)  # let all tasks begin: a task cancelled before it begins cannot report its end
        if cancelled:
            self._cancel()
        await asyncio.gather(*running)
        with self._lock:
            self._loop = None
        self._tasks, self._of_worker = [], {}
        end_waits()


def work_together(
    workers: dict[Worker, Ports], stage: Stage, tell: Callable[[Event], None], tasks: Tasks
) -> None:
    """Run the workers of an ``async def`` stage as tasks in one event loop on this thread."""

    async def run_worker(info: Worker, ports: Ports) -> None:
        worker = WorkerId(info.stage, info.number)
        seeds.enter(info)
        job = OperatorJob(kind=stage.kind, function=nothing)
        ended_by: BaseException | None = None
        release = PortRelease(worker, ports, tell)
        tell_aborts(worker, ports, tell, sends=False)
        try:
            join_ports(ports, stage)
            made = shared if stage.share_instance else AsyncCallable(1, tasks.leave_alone)
            async with made.built(stage.function) as function:
                job = job_of(worker, stage, ports, function, tell, False)
                job.timeout, job.pace = stage.timeout, ports.shared.pace
                job.on_clean_up = tasks.leave_alone
                tell(Began(worker))
                await stage.operator.run_async()(job, **ends_of(job, stage, ports))
        except BaseException as error:
            ended_by = with_short_traceback(error, ports)
        unreported.discard(worker)
        end(worker, job, ports, release, ended_by, tell, sends=False)
        release.done()

    shared = AsyncCallable(len(workers), tasks.leave_alone)
    unreported = {WorkerId(info.stage, info.number) for info in workers}
    work = tasks.run(run_worker(info, ports) for info, ports in workers.items())
    try:
        with asyncio.Runner(loop_factory=_stage_loop) as runner:
            runner.run(work)
    # The event loop itself failed. Report every worker's end, because the run would otherwise wait forever.
    except BaseException as error:
        work.close()
        for worker in sorted(unreported, key=str):
            with contextlib.suppress(Closed):
                tell(Failure(worker, error, None, os.getpid()))

"""Run the workers of an ``async def`` stage as tasks of one event loop on one thread.

For its deadlock check, the supervisor asks whether these tasks can still make progress. The selector gets no
timeout if the loop has no timer, no socket and no callback that is due. If, in addition, each task awaits a
channel of the graph, only a channel can wake the loop. Everything else counts as work: a task that awaits
another task, an event or a future. Waits for a channel in the user's own event loop also count as work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import selectors
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from flowchan.channel.awaiting import end_waits, waits_of_loops
from flowchan.channel.channel import Channel
from flowchan.declare.values import Stage
from flowchan.errors import Closed
from flowchan.run.policy import seeds
from flowchan.run.policy.events import Began, Event, Failure, WorkerId
from flowchan.run.policy.seeds import Worker
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.operator_loops import OperatorJob
from flowchan.run.worker.port_release import PortRelease
from flowchan.run.worker.worker import end, ends_of, job_of, join_ports, tell_aborts, with_short_traceback
from flowchan.run.worker.worker_callable import built_async, nothing

ANSWER_WITHIN_S = 0.05
"""Time limit in seconds; an event loop that does not answer in this time has work."""


class _Selector(selectors.DefaultSelector):
    """Selector that records whether only calls from other threads can wake the event loop."""

    is_idle = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.is_idle = timeout is None and len(self.get_map()) == 1  # the loop's own socket for wakeups
        return super().select(timeout)


class StageLoop(asyncio.SelectorEventLoop):
    """Event loop that can report whether only channels can wake it.

    ``starter`` is the task that waits for the workers.
    """

    def __init__(self) -> None:
        self._waiting = _Selector()
        super().__init__(self._waiting)
        self.starter: asyncio.Task[Any] | None = None

    def has_only(self, tasks: Collection[asyncio.Task[Any] | None]) -> bool:
        """Return whether the loop waits and has only these tasks; call it on another thread."""
        answer: concurrent.futures.Future[bool] = concurrent.futures.Future()

        def check() -> None:  # runs in the loop: without a GIL, no other thread may read its tasks
            answer.set_result(self._waiting.is_idle and asyncio.all_tasks() <= {*tasks, self.starter})

        try:
            self.call_soon_threadsafe(check)
            return answer.result(ANSWER_WITHIN_S)
        except (TimeoutError, RuntimeError):  # the loop is busy or closed
            return False


def _stage_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of the program's event loop policy; instead of asyncio's own, a :class:`StageLoop`."""
    loop = asyncio.new_event_loop()
    if type(loop) is not asyncio.SelectorEventLoop:
        return loop
    loop.close()
    return StageLoop()


def only_wait_for(channels: Collection[Channel[Any]]) -> bool:
    """Return whether only these channels can wake each event loop that awaits one of them."""
    known = {id(channel) for channel in channels}
    for loop, waits in waits_of_loops():
        tasks = {task for task, channel in waits if id(channel) in known}
        if tasks and not (isinstance(loop, StageLoop) and loop.has_only(tasks)):
            return False
    return True


class Tasks:
    """Tasks of one async stage, for use by other threads.

    Unlike a thread, a task can be cancelled while it awaits. ``into`` is the input channel, without which the
    tasks have no work.
    """

    def __init__(self, into: Channel[Any] | None = None) -> None:
        self.into = into
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the tasks once; later calls do not disturb their cleanup."""
        with self._lock:
            loop, repeated, self._cancelled = self._loop, self._cancelled, True
        if loop is not None and not repeated:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so the tasks have ended
                loop.call_soon_threadsafe(self._cancel)

    def leave_alone(self) -> None:
        """Exclude the current task, which is cleaning up, from cancellation."""
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
        with self._lock:
            self._loop = loop
            cancelled = self._cancelled
        await asyncio.sleep(0)  # a task cancelled before its first step would not report its end
        if cancelled:
            self._cancel()
        await asyncio.gather(*running)
        with self._lock:
            self._loop = None
        self._tasks = []
        end_waits()


def work_together(
    workers: dict[Worker, Ports], stage: Stage, tell: Callable[[Event], None], tasks: Tasks
) -> None:
    """Run the workers of an ``async def`` stage as tasks of one event loop on this thread."""

    async def run_worker(info: Worker, ports: Ports) -> None:
        worker = WorkerId(info.stage, info.number)
        seeds.enter(info)
        job = OperatorJob(kind=stage.kind, function=nothing)
        ended_by: BaseException | None = None
        release = PortRelease(worker, ports, tell)
        tell_aborts(worker, ports, tell, sends=False)
        try:
            join_ports(ports, stage)
            async with built_async(stage.function) as function:
                job = job_of(worker, stage, ports, function, tell, False)
                job.timeout, job.pace = stage.timeout, ports.pace
                job.on_clean_up = tasks.leave_alone
                tell(Began(worker))
                await stage.operator.run_async()(job, **ends_of(job, stage, ports))
        except BaseException as error:
            ended_by = with_short_traceback(error, ports)
        unreported.discard(worker)
        end(worker, job, ports, release, ended_by, tell, sends=False)
        release.done()

    unreported = {WorkerId(info.stage, info.number) for info in workers}
    work = tasks.run(run_worker(info, ports) for info, ports in workers.items())
    try:
        with asyncio.Runner(loop_factory=_stage_loop) as runner:
            runner.run(work)
    except BaseException as error:  # the loop failed: each worker must report, or the run waits forever
        work.close()
        for worker in sorted(unreported, key=str):
            with contextlib.suppress(Closed):
                tell(Failure(worker, error, None, os.getpid()))

"""Define the main functions of worker processes: one for a single run, and one for a pool's runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from flowchan import _core
from flowchan.channel.channel import Channel, In, Out
from flowchan.declare.broadcast import begin_reading
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed
from flowchan.items.latest_value import close_inherited
from flowchan.items.worker_globals import shared_globals, worker_globals
from flowchan.run.policy import seeds
from flowchan.run.policy.events import Event, Failure, WorkerId
from flowchan.run.policy.failures import RETIRED, Portable, Suspicion
from flowchan.run.worker import logs
from flowchan.run.worker.cancelled_requests import forget_boards
from flowchan.run.worker.gang_membership import Memberships
from flowchan.run.worker.gpus import see_only
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.streams import Streams, printing_to
from flowchan.run.worker.worker import Outcome, work
from flowchan.run.worker.worker_callable import Function, PooledCallable, built
from flowchan.transport.device import transfer


@dataclass(frozen=True, slots=True)
class Order:
    """Tells a process to act as the worker ``info`` in one run.

    The process reports to ``mail``. ``suspicion`` describes earlier deaths on the first item. A worker of a
    gang uses ``memberships``. ``levels`` are the program's log levels. ``terminals`` are the terminals to
    which the process of a pool prints during the run.
    """

    info: seeds.Worker
    ports: Ports
    mail: Channel[Event | logs.Logged]
    suspicion: Suspicion
    memberships: Memberships
    levels: Mapping[str, int]
    terminals: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """Last message from a pool's process, with the ``error`` that closing its callable raised."""

    error: Any = None  # an exception as in Failure, or None


def process_main(
    id: WorkerId, stage: bytes, order: Order, parent: int, devices: str | None, streams: Streams
) -> None:
    """Act as a worker in a single run.

    ``stage`` is the pickled stage. If the process ``parent`` ends, this process is killed. ``devices`` are
    the GPUs that the worker may use. ``streams`` become the standard output and error of this process.
    """
    streams.take()
    _prepare(id, parent, devices)
    if _Work(stage, built).do(order) == "retired":
        sys.exit(RETIRED)


def pooled_main(
    id: WorkerId,
    stage: bytes,
    orders: In[Order],
    reports: Out[WorkEnded | logs.Logged | None],
    parent: int,
    devices: str | None,
) -> None:
    """Act as a worker in one run for each order.

    The process sends ``None`` to ``reports`` whenever it is ready for another order. The process ends after
    the last order or after a failure. Log records that it writes after the last run also go to ``reports``.
    """
    _prepare(id, parent, devices)
    pooled = PooledCallable()
    runs = _Work(stage, pooled.built)
    outcome: Outcome = "done"
    for order in orders:
        with printing_to(order.terminals):
            outcome = runs.do(order)
        del order  # keep no objects of this run
        if outcome != "done":
            break
        runs.rest()
        with contextlib.suppress(Closed, Broken):  # the pool has ended and will send no more orders
            reports.put(None)
    else:
        runs.end(reports.put)
    ended = WorkEnded()
    try:
        pooled.close()
    except BaseException as error:
        ended = WorkEnded(Portable(error))
    with contextlib.suppress(Closed, Broken):
        reports.put(ended)
    if outcome == "retired":
        sys.exit(RETIRED)


def _prepare(id: WorkerId, parent: int, devices: str | None) -> None:
    """Prepare this process for its worker before any user code is loaded."""
    _core._die_with(parent)
    close_inherited()
    worker_globals.share()
    show_name(id.stage, f" {id.number}")
    see_only(devices)
    # The terminal sends Ctrl-C to the whole process group, but only the supervisor may react.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # A forked process lacks OpenMP's threads, for which torch would wait forever.
    if (torch := sys.modules.get("torch")) and multiprocessing.get_start_method() == "fork":
        torch.set_num_threads(1)


def show_name(name: str, end: str = "") -> None:
    """Show a worker's stage and number as the name of this process in ``ps``, ``top`` and debuggers.

    The kernel keeps 15 bytes of a name, which always include ``end``. The command line stays the same,
    because users search it for the processes of their program.
    """
    name = name.encode(errors="replace")[: 15 - len(end)].decode(errors="ignore")
    # Without /proc, the name is not shown.
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name + end)


class _Work:
    """Runs this process's worker in one run or in several.

    The first run unpickles the stage, and later runs reuse it. A stage is unpickled for every run if it has
    parts that a run may use up, such as a source's iterable or arguments.
    """

    def __init__(
        self, stage: bytes, build: Callable[[Function | None], AbstractContextManager[Function]]
    ) -> None:
        self._packed = stage
        self._stage: Stage | None = None
        self._build = build
        self._logs = logs.Sending()

    def do(self, order: Order) -> Outcome:
        info, tell = order.info, order.mail.put
        self._logs.begin(info, order.levels, tell)
        forget_boards()
        begin_reading(order.ports.shared.broadcasts)
        seeds.begin(info)
        try:
            with shared_globals():
                stage = self._stage or pickle.loads(self._packed)
        except BaseException as error:
            with contextlib.suppress(Closed, Broken):
                tell(Failure(WorkerId(info.stage, info.number), Portable(error), None, os.getpid()))
            return "failed"
        used_up = stage.args or stage.kwargs or "iterable" in stage.options
        self._stage = None if used_up else stage
        outcome = work(
            info, stage, order.ports, tell, sends=True, suspicion=order.suspicion,
            memberships=order.memberships, build=self._build,
        )  # fmt: skip
        transfer.only_ports_read(port.channel for port in order.ports.everything())
        return outcome

    def rest(self) -> None:
        """Stop sending log records until the next run, because the current run has ended."""
        self._logs.rest()

    def end(self, tell: Callable[[logs.Logged], None]) -> None:
        """Send later log records to ``tell``, because no run follows."""
        self._logs.end(tell)

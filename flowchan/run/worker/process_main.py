"""What a worker's own process runs: one run, or one after the other for a pool."""

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
from pathlib import Path
from typing import Any

from flowchan import _core
from flowchan.channel.channel import Channel, In, Out
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed
from flowchan.run.policy import seeds
from flowchan.run.policy.events import Event, Failure, WorkerId
from flowchan.run.policy.failures import RETIRED, Portable
from flowchan.run.worker import logs
from flowchan.run.worker.cancelled_requests import forget_boards
from flowchan.run.worker.gpus import see_only
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.streams import Streams, printing_to
from flowchan.run.worker.worker import Outcome, work
from flowchan.run.worker.worker_callable import Function, Lasting, built
from flowchan.transport.device import transfer


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is to do in one run: to be ``here``, with these ports. ``mail`` gets what it tells.
    ``predecessors``: how those died with whose item it begins. ``member``: of a group, if its stage is a
    gang; ``next_seats``: by which those of later groups come. ``levels``: from which on the program's loggers
    want records. ``terminals``: where it prints meanwhile, if it lasts longer than the run."""

    here: seeds.Worker
    ports: Ports
    mail: Channel[Event | logs.Logged]
    predecessors: tuple[str, ...]
    member: Any
    next_seats: Channel[Any] | None
    levels: Mapping[str, int]
    terminals: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Left:
    """The last word of a process that lasts over runs: by which ``error`` closing its callable failed, if it
    did."""

    error: Any = None  # as that of a Failure


def process_main(
    id: WorkerId, stage: bytes, order: Order, parent: int, devices: str | None, streams: Streams
) -> None:
    """Works in one run. ``stage``: what it does, pickled. ``parent``: whose end is its own. ``devices``: the
    GPUs that it is to see, if these were given to it. ``streams``: by which it prints."""
    streams.take()
    _prepare(id, parent, devices)
    if _Work(stage, built).do(order) == "retired":
        sys.exit(RETIRED)


def lasting_main(
    id: WorkerId,
    stage: bytes,
    orders: In[Order],
    says: Out[Left | logs.Logged | None],
    parent: int,
    devices: str | None,
) -> None:
    """Works in a run for each of its orders. It ``says`` ``None`` when it waits for another one; when there
    are no more, or it has failed, it leaves. What it logs after its last run it says, too."""
    _prepare(id, parent, devices)
    lasting = Lasting()
    runs = _Work(stage, lasting.built)
    outcome: Outcome = "done"
    for order in orders:
        with printing_to(order.terminals):
            outcome = runs.do(order)
        del order  # and with it all that there is of the run
        if outcome != "done":
            break
        runs.rest()
        with contextlib.suppress(Closed, Broken):  # nobody has the pool any more, so there are no more orders
            says.put(None)
    else:
        runs.end(says.put)
    left = Left()
    try:
        lasting.close()
    except BaseException as error:
        left = Left(Portable(error))
    with contextlib.suppress(Closed, Broken):
        says.put(left)
    if outcome == "retired":
        sys.exit(RETIRED)


def _prepare(id: WorkerId, parent: int, devices: str | None) -> None:
    """Makes the process that of the worker, before any code of the user's is loaded."""
    _core._die_with(parent)
    show_name(id.stage, f" {id.number}")
    see_only(devices)
    # The terminal sends Ctrl-C to the whole group; what it means is the supervisor's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # OpenMP's threads did not come along with a fork, and torch would wait for them for ever.
    if (torch := sys.modules.get("torch")) and multiprocessing.get_start_method() == "fork":
        torch.set_num_threads(1)


def show_name(name: str, end: str = "") -> None:
    """What ``ps``, ``top`` and debuggers call this process, of a worker its stage and number. By the name
    that the kernel keeps, of 15 bytes, of which ``end`` is not cut off: the command line stays the program's,
    by which people find and end it."""
    name = name.encode()[: 15 - len(end)].decode(errors="ignore")
    with contextlib.suppress(OSError):  # no /proc here
        Path("/proc/self/comm").write_text(name + end)


class _Work:
    """What the process does in a run. The stage is loaded in the first; in each, if it has a part that a run
    may use up: what its source iterates over, or arguments."""

    def __init__(
        self, stage: bytes, build: Callable[[Function | None], AbstractContextManager[Function]]
    ) -> None:
        self._packed = stage
        self._stage: Stage | None = None
        self._build = build
        self._logs = logs.Sending()

    def do(self, order: Order) -> Outcome:
        here, tell = order.here, order.mail.put
        self._logs.begin(here, order.levels, tell)
        forget_boards()
        seeds.begin(here)
        try:
            stage = self._stage or pickle.loads(self._packed)
        except BaseException as error:
            with contextlib.suppress(Closed, Broken):
                tell(Failure(WorkerId(here.stage, here.number), Portable(error), None, os.getpid()))
            return "failed"
        used_up = stage.args or stage.kwargs or "iterable" in stage.options
        self._stage = None if used_up else stage
        outcome = work(
            here, stage, order.ports, tell, sends=True, predecessors=order.predecessors,
            member=order.member, next_seats=order.next_seats, build=self._build,
        )  # fmt: skip
        transfer.only_ports_read(port.channel for port in order.ports.everything())
        return outcome

    def rest(self) -> None:
        """Keeps nothing of the run that is over."""
        self._logs.rest()

    def end(self, tell: Callable[[logs.Logged], None]) -> None:
        """No other run follows."""
        self._logs.end(tell)

"""One worker: builds what the user declared, runs the verb's loop over its ports, and tells the supervisor
how it ended.

The same :func:`work` runs on a thread of this process and in a process of its own; what differs is how it
gets there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowchan import _core
from flowchan.channel.channel import Channel, hears_aborts
from flowchan.declare.callables import is_callable_class
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed
from flowchan.items.device import crossing
from flowchan.items.text import short
from flowchan.run import chance, limits, logs
from flowchan.run.asking import Answering
from flowchan.run.bodies import Job
from flowchan.run.chance import Worker
from flowchan.run.events import Aborted, Began, Ended, Event, Failure, Result, Retried, Troubled, WorkerId
from flowchan.run.failures import ItemFailed, Portable, Retires
from flowchan.run.gpus import see_only
from flowchan.run.opening import Ports
from flowchan.run.recovery import RETIRED


def join_ports(ports: Ports, stage: Stage) -> None:
    """Lets the outputs belong to the items of the single input: that is what keeps order, and what
    recovery needs to know which outputs of an item exist. All outputs of a restartable source belong to
    one item."""
    if not ports.inputs and stage.restartable:
        for out in ports.outputs.values():
            out._replay()
    if len(ports.inputs) != 1:
        return
    (reader,) = ports.inputs.values()
    ordered = stage.ordered and stage.workers > 1 and stage.verb.ordered
    apart = {output.port for output in stage.outputs if output.apart}
    for port, out in ports.outputs.items():
        out._follow(reader, ordered and port not in apart, stage.verb.one_output)
    if ports.errors is not None:
        ports.errors._follow(reader, False, False)


@contextlib.contextmanager
def built(function: Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """The function to call: a callable class is built here, once for this worker, and closed at its end."""
    if function is None or not is_callable_class(function):
        yield function or nothing
        return
    made = function()
    try:
        yield made
    finally:
        close = getattr(made, "close", None)
        if callable(close):
            close()


def nothing() -> None: ...


def work(
    here: Worker,
    stage: Stage,
    ports: Ports,
    tell: Callable[[Event], None],
    sends: bool,
    predecessors: tuple[str, ...] = (),
    member: Any = None,
) -> bool:
    """Runs one worker to its end. Never raises: however it ends, ``tell`` hears it before the ports are
    closed. ``sends``: what is told crosses to another process. ``predecessors``: how those died with whose
    item it begins. ``member``: its own of the group that the stage's workers form. True when its process is
    to end without a word, to be replaced."""
    worker = WorkerId(here.stage, here.number)
    chance.enter(here)
    job = Job(kind=stage.kind, function=nothing)
    ended_by: BaseException | None = None
    tell_aborts(worker, ports, tell, sends)
    try:
        join_ports(ports, stage)
        with built(stage.function) as function:
            if sends and stage.timeout is not None:
                function = limits.limited(function, stage)
            job = job_of(worker, stage, ports, function, tell, sends)
            job.predecessors = predecessors
            job.too_late = limits.gives_up(stage, predecessors)
            if predecessors:
                _try_again(job, stage, ports)
            if stage.gang is not None:
                job.kwargs = {**job.kwargs, stage.gang.parameter: member.__enter__()}
            tell(Began(worker))
            stage.verb.run()(job, **ports.inputs, **ports.outputs)
    except BaseException as error:
        ended_by = let_go(error, ports)
    if sends and isinstance(ended_by, ItemFailed) and isinstance(ended_by.__cause__, Retires):
        for reader in ports.inputs.values():
            reader._leave_alone()
        return True
    try:
        end(worker, job, ports, ended_by, tell, sends)
    except BaseException as error:  # no worker may end without a word, or the run waits for it for ever
        with contextlib.suppress(Closed, Broken):  # a run that is over hears nobody any more
            tell(Failure(worker, Portable(error) if sends else error, None, os.getpid()))
    if member is not None:  # the others hear of it after the supervisor
        member.close()
    return False


def tell_aborts(worker: WorkerId, ports: Ports, tell: Callable[[Event], None], sends: bool) -> None:
    """From now on the supervisor hears when this thread or task aborts a channel of the worker, before
    anybody meets it."""

    pid = os.getpid()

    def aborting(channel: Channel[Any], cause: BaseException | None) -> None:
        forked = os.getpid() != pid  # by the user's code, and nothing of ours reaches that child
        if not forked and any(port.channel is channel for port in ports.everything()):
            error = Portable(cause) if sends and cause is not None else cause
            with contextlib.suppress(Closed, Broken):  # a run that is over hears nobody any more
                tell(Aborted(worker, channel._name, error, pid, time.monotonic_ns()))

    hears_aborts.set(aborting)


def job_of(
    worker: WorkerId,
    stage: Stage,
    ports: Ports,
    function: Callable[..., Any],
    tell: Callable[[Event], None],
    sends: bool,
) -> Job:
    job = Job(
        kind=stage.kind, function=function, args=stage.args, kwargs=stage.kwargs, options=stage.options,
        retries=stage.retries, retry_delay=stage.retry_delay, retry_on=stage.retry_on, errors=ports.errors,
        is_over=lambda: any(port.channel.broken for port in ports.everything()),
        on_retry=lambda: tell(Retried(worker)), on_result=lambda value: tell(Result(worker.stage, value)),
    )  # fmt: skip

    def trouble(text: str) -> None:
        with contextlib.suppress(Closed, Broken):  # a run that is over hears nobody any more
            tell(Troubled(worker, f"worker {worker}, {text}"))

    job.on_trouble = trouble
    if stage.asked and stage.verb.answers:
        job.answering = Answering(stage, worker, tell, sends)
        job.function = job.answering.around(function)
    for reader in ports.inputs.values():
        reader._wake_lazily()
        if stage.keeps_its_own:
            reader._read_alone()
        reader._on_poison(stage.max_deaths, job.poisoned)
    return job


def _try_again(job: Job, stage: Stage, ports: Ports) -> None:
    """The item with which the worker begins is given up when it took too long too often; those times do not
    count as deaths over it."""
    deaths = len(job.predecessors)
    died = deaths - job.predecessors.count(limits.exceeded(stage)) if stage.timeout is not None else deaths
    over = job.too_late or died >= stage.max_deaths
    for reader in ports.inputs.values():
        reader._on_poison(deaths if over else max(stage.max_deaths, deaths + 1), job.poisoned)


def end(
    worker: WorkerId,
    job: Job,
    ports: Ports,
    error: BaseException | None,
    tell: Callable[[Event], None],
    sends: bool,
) -> None:
    """Tells how the worker ended, then closes its ports."""
    for reader in ports.inputs.values():
        reader._on_poison(0, None)  # it holds the job, and so the run: without it no collector need end them
    failed = error is not None and not _clean_end(error, ports)
    if not failed and not chance.worker().host:
        job.unwanted += sum(map(job.let_go_of_the_rest, ports.inputs.values()))
    last: Event = Ended(worker, job.unwanted)
    if error is not None and failed:
        cause = error.__cause__ if isinstance(error, ItemFailed) and error.__cause__ else error
        item = short(error.item, 120) if isinstance(error, ItemFailed) else None
        last = Failure(worker, Portable(cause) if sends else cause, item, os.getpid())
    elif isinstance(error, Closed) and ports.inputs:
        last = Ended(worker, job.unwanted + 1)  # the readers have left, so nobody wants the item in hand
    try:
        tell(last)
    except (Closed, Broken):  # a run that is over hears nobody any more
        failed = False
    if failed:
        # The supervisor ends these ports once it has broken the channels. Ended here, they would let the
        # stages behind see a clean end of half the items, and another worker do the failed item again.
        return
    for port in ports.everything():
        port.close()


def let_go(error: BaseException, ports: Ports) -> BaseException:
    """``error``, in a clean end without what its traceback holds: so a source's generator is cleaned up here
    and now."""
    if _clean_end(error, ports):
        if isinstance(error, ItemFailed) and error.__cause__:
            error = error.__cause__
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return error


def _clean_end(error: BaseException, ports: Ports) -> bool:
    """Whether the error only says that one of the worker's own channels has ended. A task whose channels have
    ended is cancelled by us; tasks of the user's tell their ends together."""
    if isinstance(error, BaseExceptionGroup):
        return all(_clean_end(one, ports) for one in error.exceptions)
    cancelled = getattr(sys.modules.get("asyncio"), "CancelledError", ())  # nothing without asyncio
    if isinstance(error, ItemFailed) and isinstance(error.__cause__, cancelled):
        error = error.__cause__
    if isinstance(error, cancelled):
        return any(port.channel.broken for port in ports.everything()) or any(
            out.channel.closed for out in ports.outputs.values()
        )
    if isinstance(error, Closed):
        return any(
            out.channel.closed for out in (*ports.outputs.values(), *([ports.errors] if ports.errors else []))
        )
    if isinstance(error, Broken):
        return any(port.channel.broken for port in ports.everything())
    return False


def process_main(
    here: Worker,
    stage: bytes,
    ports: Ports,
    events: Any,
    parent: int,
    predecessors: tuple[str, ...],
    devices: str | None,
    member: Any,
    levels: Mapping[str, int],
) -> None:
    """What a worker's own process runs. ``predecessors``: how those died with whose item it begins.
    ``devices``: the GPUs that it is to see, if these were given to it. ``member``: of a group, if its stage
    is a gang. ``levels``: from which on the program's loggers want records."""
    _core._die_with(parent)
    _show_name(here)
    logs.send_logs(here, levels, events.put)
    see_only(devices)
    # The terminal sends Ctrl-C to the whole group; what it means is the supervisor's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # OpenMP's threads did not come along with a fork, and torch would wait for them for ever.
    if (torch := sys.modules.get("torch")) and multiprocessing.get_start_method() == "fork":
        torch.set_num_threads(1)
    chance.begin(here)
    try:
        loaded = pickle.loads(stage)
    except BaseException as error:
        with contextlib.suppress(Closed, Broken):
            events.put(Failure(WorkerId(here.stage, here.number), Portable(error), None, os.getpid()))
        return
    retires = work(here, loaded, ports, events.put, sends=True, predecessors=predecessors, member=member)
    crossing.only_ports_read(port.channel for port in ports.everything())
    if retires:
        sys.exit(RETIRED)


def _show_name(here: Worker) -> None:
    """What ``ps``, ``top`` and debuggers call this process: its stage and number. By the name that the kernel
    keeps, of 15 bytes: the command line stays the program's, by which people find and end it."""
    number = f" {here.number}"
    stage = here.stage.encode()[: 15 - len(number)].decode(errors="ignore")
    with contextlib.suppress(OSError):  # no /proc here
        Path("/proc/self/comm").write_text(stage + number)

"""Run one worker: build its callable, run the operator's loop over its ports, and report its end.

:func:`work` runs in threads of the program and in worker processes (``process_main``).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from flowchan.channel.channel import Channel, hears_aborts
from flowchan.declare.broadcast import end_pinning, pinning
from flowchan.declare.callables import is_async
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed
from flowchan.items.text import short
from flowchan.items.tracebacks import from_users_code
from flowchan.run.policy import seeds
from flowchan.run.policy.events import (
    Aborted,
    Began,
    Ended,
    ErrorSent,
    Event,
    Failure,
    Result,
    Retried,
    WorkerId,
)
from flowchan.run.policy.failures import UNSUSPECTED, ItemFailed, Portable, Retires, Suspicion
from flowchan.run.policy.seeds import Worker
from flowchan.run.worker import item_timeout
from flowchan.run.worker.gang_membership import NO_MEMBERSHIPS, GangMembership, Memberships
from flowchan.run.worker.item_recorder import end_following, follow_items
from flowchan.run.worker.items_in_transit import deliver_items
from flowchan.run.worker.keyed_call import route_outputs, with_key
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.operator_job import OperatorJob
from flowchan.run.worker.pace import paced
from flowchan.run.worker.port_release import PortRelease
from flowchan.run.worker.requests import Answering
from flowchan.run.worker.state_log import KeyedStates
from flowchan.run.worker.suspect_batch import SuspectBatch, can_try_members
from flowchan.run.worker.tracking import Tracking
from flowchan.run.worker.worker_callable import Function, built, nothing

Outcome = Literal["done", "failed", "retired"]
"""How a worker ended: without an error, with an error, or with a request to be replaced."""


def join_ports(ports: Ports, stage: Stage) -> None:
    """Connect the output ports of a worker to its input port, if it has exactly one.

    This keeps items in order, and lets a replacement find out which outputs of an item already exist. For a
    restartable source, all outputs count as outputs of one item.
    """
    if not ports.inputs and stage.restartable:
        for out in ports.outputs.values():
            out._replay()
    if len(ports.inputs) != 1:
        return
    (reader,) = ports.inputs.values()
    in_order = stage.ordered and stage.operator.ordered
    channel_per_worker = {output.port for output in stage.outputs if output.channel_per_worker}
    for port, out in ports.outputs.items():
        keeps = in_order and port not in channel_per_worker
        out._follow(reader, keeps and stage.workers > 1, stage.operator.one_output, later=keeps)
    if ports.errors is not None:
        ports.errors._follow(reader, False, False)


def work(
    info: Worker,
    stage: Stage,
    ports: Ports,
    tell: Callable[[Event], None],
    sends: bool,
    suspicion: Suspicion = UNSUSPECTED,
    memberships: Memberships = NO_MEMBERSHIPS,
    build: Callable[[Function | None], AbstractContextManager[Function]] = built,
) -> Outcome:
    """Run one worker to its end, and return how it ended.

    The function never raises; it reports every error with ``tell`` before the ports close. ``sends`` is true
    if events go to another process. ``suspicion`` describes earlier deaths on the first item. A worker of a
    gang uses ``memberships``. ``build`` builds the callable.
    """
    worker = WorkerId(info.stage, info.number)
    membership = None if stage.gang is None else GangMembership(worker, memberships, tell, ports)
    seeds.enter(info)
    job = OperatorJob(kind=stage.kind, function=nothing)
    ended_by: BaseException | None = None
    release = PortRelease(worker, ports, tell)
    tell_aborts(worker, ports, tell, sends)
    try:
        join_ports(ports, stage)
        with build(stage.function) as function:
            if sends and stage.timeout is not None:
                function = item_timeout.limited(function, stage)
            job = job_of(worker, stage, ports, function, tell, sends)
            if suspicion.deaths:
                _try_again(job, stage, ports, suspicion, tell)
            if membership is not None:
                membership.enter()
            tell(Began(worker))
            run_body(job, stage, ports, membership)
    except BaseException as error:
        ended_by = with_short_traceback(error, ports)
    if sends and isinstance(ended_by, ItemFailed) and isinstance(ended_by.__cause__, Retires):
        for reader in ports.inputs.values():
            reader._leave_alone()
        release.leave_open()
        return "retired"
    outcome: Outcome = "failed"
    try:
        end_pinning()
        outcome = end(worker, job, ports, release, ended_by, tell, sends)
    except BaseException as error:  # a worker that does not report its end would make the run wait forever
        with contextlib.suppress(Closed, Broken):  # raised after the end of the run
            tell(Failure(worker, Portable(error) if sends else error, None, os.getpid()))
    hears_aborts.set(None)  # clear this, because since Python 3.14 a thread keeps its context after its end
    release.done()
    # The supervisor must learn of this worker's end before the other members of the group do.
    if membership is not None:
        membership.close(ended_by)
    return outcome


def run_body(job: OperatorJob, stage: Stage, ports: Ports, membership: GangMembership | None) -> None:
    """Run the operator's loop once. In a gang, run it again with each new group."""
    body, ends = stage.operator.run(), ends_of(job, stage, ports)
    if membership is None:
        body(job, **ends)
        return
    assert stage.gang is not None
    parameter, kwargs = stage.gang.parameter, job.kwargs

    def call(member: Any) -> None:
        job.kwargs = {**kwargs, parameter: member}
        body(job, **ends)

    membership.work(call)


def ends_of(job: OperatorJob, stage: Stage, ports: Ports) -> dict[str, Any]:
    """Return the ports as arguments for the operator's loop.

    An item may be addressed to a worker that has ended. A general stage's function then gets an error; other
    operators only count the item.
    """
    return ports.by_parameter(None if stage.operator.calls == "ports" else job.count_unwanted)


def tell_aborts(worker: WorkerId, ports: Ports, tell: Callable[[Event], None], sends: bool) -> None:
    """Report to the supervisor when this thread or task aborts one of the worker's channels.

    The report is sent before the channel breaks.
    """
    pid = os.getpid()

    def aborting(channel: Channel[Any], cause: BaseException | None) -> None:
        forked = os.getpid() != pid  # a process that user code forked cannot reach the supervisor
        if not forked and any(port.channel is channel for port in ports.everything()):
            error = Portable(cause) if sends and cause is not None else cause
            with contextlib.suppress(Closed, Broken):  # raised after the end of the run
                tell(Aborted(worker, channel._name, error, pid, time.monotonic_ns()))

    hears_aborts.set(aborting)


def job_of(
    worker: WorkerId,
    stage: Stage,
    ports: Ports,
    function: Callable[..., Any],
    tell: Callable[[Event], None],
    sends: bool,
) -> OperatorJob:
    """Create the job for a worker's operator loop."""
    job = OperatorJob(
        kind=stage.kind, function=function, args=stage.args, kwargs=stage.kwargs, options=stage.options,
        retries=stage.retries, retry_delay=stage.retry_delay, retry_on=stage.retry_on, errors=ports.errors,
        is_over=lambda: any(port.channel.broken for port in ports.everything()),
        on_retry=lambda: tell(Retried(worker)), on_result=lambda value: tell(Result(worker.stage, value)),
    )  # fmt: skip

    def report_failed_item(text: str) -> None:
        with contextlib.suppress(Closed, Broken):  # raised after the end of the run
            tell(ErrorSent(worker, f"worker {worker}, {text}"))

    job.on_failed_item = report_failed_item
    shared = ports.shared
    if "key" in stage.options:
        if "state" in stage.options:
            job.states = KeyedStates(stage, ports.states, ports.inputs["items"])
        function = job.function = with_key(function, stage, job.states)
    if shared.pace is not None and not is_async(function):
        function = job.function = paced(function, shared.pace, job.is_over)
    if stage.may_get_requests and stage.operator.answers:
        job.answering = Answering(stage, worker, tell, sends)
        job.function = job.answering.around(function)
    if shared.finished is not None:
        job.tracking = Tracking(stage, shared.finished, tell)
        job.function = job.tracking.around(function)
    if shared.broadcasts and stage.operator.calls in ("item", "fold"):
        job.function = pinning(job.function)
    if "readers" in stage.options:
        route_outputs(ports.outputs["out"], stage, job.bare)
    job.recorder = follow_items(worker, ports, tell)
    for reader in ports.inputs.values():
        reader._wake_lazily()
        if stage.keeps_its_own:
            reader._read_alone()
        if stage.max_deaths == 1:
            reader._begin_once()
        reader._on_poison(stage.max_deaths, job.poisoned)
    return job


def _try_again(
    job: OperatorJob, stage: Stage, ports: Ports, suspicion: Suspicion, tell: Callable[[Event], None]
) -> None:
    """Decide whether to try the first item again, although workers have died while processing it.

    An item that has exceeded its time limit too often fails. Exceeded time limits do not count as deaths. A
    batch is tried again as long as each death reveals another member that kills its worker.
    """
    job.predecessors, deaths = suspicion.deaths, len(suspicion.deaths)
    late = 0 if stage.timeout is None else suspicion.deaths.count(item_timeout.exceeded(stage))
    hope = suspicion.members or suspicion.tried
    job.too_late = not hope and item_timeout.gives_up(stage, suspicion.deaths)
    over = job.too_late or (deaths - late >= stage.max_deaths and not hope)
    if can_try_members(stage):
        job.function = SuspectBatch(job, stage, list(ports.inputs.values()), suspicion, tell)
    for reader in ports.inputs.values():
        reader._on_poison(deaths if over else max(stage.max_deaths, deaths + 1), job.poisoned)


def end(
    worker: WorkerId,
    job: OperatorJob,
    ports: Ports,
    release: PortRelease,
    error: BaseException | None,
    tell: Callable[[Event], None],
    sends: bool,
) -> Outcome:
    """Report how the worker ended, then close its ports."""
    end_following(job.recorder, ports)
    for reader in ports.inputs.values():
        # Break the reference cycle through the callback, which refers to the job and so to the run.
        reader._on_poison(0, None)
    failed = error is not None and not _clean_end(error, ports)
    if not failed and not seeds.worker().host:
        unretired = [reader for reader in ports.inputs.values() if not reader._retired]
        job.unwanted += sum(map(job.drop_remaining, unretired))
    last: Event = Ended(worker, job.unwanted)
    if error is not None and failed:
        cause = error.__cause__ if isinstance(error, ItemFailed) and error.__cause__ else error
        item = short(error.item, 120) if isinstance(error, ItemFailed) else None
        last = Failure(worker, Portable(cause) if sends else cause, item, os.getpid())
    elif isinstance(error, Closed):  # the outputs have no readers, so the current item is unwanted
        last = Ended(worker, job.unwanted + bool(ports.inputs), early=True)
    if sends and not failed:
        deliver_items()
    reported = _told(tell, last)
    # The supervisor closes a failed worker's ports after it has broken the channels. If the worker closed
    # them now, later stages would take its partial output for complete output, and another worker would
    # process the failed item again.
    if not (failed and reported):
        release.close()
    elif sends:
        release.leave_open()
    return "failed" if failed else "done"


def _told(tell: Callable[[Event], None], last: Event) -> bool:
    """Report a worker's last event, or return False if the run has already ended."""
    try:
        tell(last)
    except (Closed, Broken):
        return False
    return True


def with_short_traceback(error: BaseException, ports: Ports) -> BaseException:
    """Shorten the traceback of ``error`` to the user's code, or remove it after a clean end.

    Without the traceback, the generator of a source is released and can clean up at once.
    """
    if _clean_end(error, ports):
        if isinstance(error, ItemFailed) and error.__cause__:
            error = error.__cause__
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    shown = error.__cause__ if isinstance(error, ItemFailed) and error.__cause__ else error
    shown.__traceback__ = from_users_code(shown.__traceback__)
    return error


def _clean_end(error: BaseException, ports: Ports) -> bool:
    """Return whether the error only means that one of the worker's channels has ended.

    flowchan cancels the task of an async worker when its channels have ended. If the user's own tasks notice
    this end first, they raise an exception group.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(_clean_end(one, ports) for one in error.exceptions)
    # The tuple is empty if asyncio has not been imported.
    cancelled = getattr(sys.modules.get("asyncio"), "CancelledError", ())
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

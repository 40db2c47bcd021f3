"""One worker: builds what the user declared, runs the operator's loop over its ports, and tells the
supervisor
how it ended.

The same :func:`work` runs on a thread of this process and in a process of its own (``worker_main``); what
differs is how it gets there.
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
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed
from flowchan.items.text import short
from flowchan.run.policy import seeds
from flowchan.run.policy.events import (
    Aborted,
    Began,
    Ended,
    Event,
    Failure,
    Result,
    Retried,
    Troubled,
    WorkerId,
)
from flowchan.run.policy.failures import ItemFailed, Portable, Retires
from flowchan.run.policy.seeds import Worker
from flowchan.run.worker import item_timeout
from flowchan.run.worker.gang_membership import GangMembership
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.operator_loops import OperatorJob
from flowchan.run.worker.port_release import PortRelease
from flowchan.run.worker.requests import Answering
from flowchan.run.worker.worker_callable import Function, built, nothing

Outcome = Literal["done", "failed", "retired"]
"""How a worker ended: cleanly, by an error, or so that its process is to end without a word and be
replaced."""


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
    in_order = stage.ordered and stage.operator.ordered
    apart = {output.port for output in stage.outputs if output.apart}
    for port, out in ports.outputs.items():
        keeps = in_order and port not in apart
        out._follow(reader, keeps and stage.workers > 1, stage.operator.one_output, later=keeps)
    if ports.errors is not None:
        ports.errors._follow(reader, False, False)


def work(
    here: Worker,
    stage: Stage,
    ports: Ports,
    tell: Callable[[Event], None],
    sends: bool,
    predecessors: tuple[str, ...] = (),
    member: Any = None,
    next_seats: Channel[Any] | None = None,
    build: Callable[[Function | None], AbstractContextManager[Function]] = built,
) -> Outcome:
    """Runs one worker to its end. Never raises: however it ends, ``tell`` hears it before the ports are
    closed. ``sends``: what is told crosses to another process. ``predecessors``: how those died with whose
    item it begins. ``member``: its own of the group that the stage's workers form; ``next_seats``: by which
    those of the groups after that come. ``build``: makes what it calls."""
    worker = WorkerId(here.stage, here.number)
    membership = None if stage.gang is None else GangMembership(worker, member, next_seats, tell, ports)
    seeds.enter(here)
    job = OperatorJob(kind=stage.kind, function=nothing)
    ended_by: BaseException | None = None
    leaving = PortRelease(worker, ports, tell)
    tell_aborts(worker, ports, tell, sends)
    try:
        join_ports(ports, stage)
        with build(stage.function) as function:
            if sends and stage.timeout is not None:
                function = item_timeout.limited(function, stage)
            job = job_of(worker, stage, ports, function, tell, sends)
            job.predecessors = predecessors
            job.too_late = item_timeout.gives_up(stage, predecessors)
            if predecessors:
                _try_again(job, stage, ports)
            if membership is not None:
                membership.enter()
            tell(Began(worker))
            run_body(job, stage, ports, membership)
    except BaseException as error:
        ended_by = let_go(error, ports)
    if sends and isinstance(ended_by, ItemFailed) and isinstance(ended_by.__cause__, Retires):
        for reader in ports.inputs.values():
            reader._leave_alone()
        leaving.leave_open()
        return "retired"
    outcome: Outcome = "failed"
    try:
        outcome = end(worker, job, ports, leaving, ended_by, tell, sends)
    except BaseException as error:  # no worker may end without a word, or the run waits for it for ever
        with contextlib.suppress(Closed, Broken):  # a run that is over hears nobody any more
            tell(Failure(worker, Portable(error) if sends else error, None, os.getpid()))
    hears_aborts.set(None)  # from Python 3.14 on a thread that has ended keeps its context
    leaving.done()
    if membership is not None:  # the others hear of it after the supervisor
        membership.close(ended_by)
    return outcome


def run_body(job: OperatorJob, stage: Stage, ports: Ports, membership: GangMembership | None) -> None:
    """Does the worker's work."""
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
    """What the operator's body is called with. Where the user's code puts, it hears itself of a worker that
    takes
    no more items."""
    return ports.by_parameter(None if stage.operator.calls == "ports" else job.count_unwanted)


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
) -> OperatorJob:
    job = OperatorJob(
        kind=stage.kind, function=function, args=stage.args, kwargs=stage.kwargs, options=stage.options,
        retries=stage.retries, retry_delay=stage.retry_delay, retry_on=stage.retry_on, errors=ports.errors,
        is_over=lambda: any(port.channel.broken for port in ports.everything()),
        on_retry=lambda: tell(Retried(worker)), on_result=lambda value: tell(Result(worker.stage, value)),
    )  # fmt: skip

    def trouble(text: str) -> None:
        with contextlib.suppress(Closed, Broken):  # a run that is over hears nobody any more
            tell(Troubled(worker, f"worker {worker}, {text}"))

    job.on_trouble = trouble
    if stage.asked and stage.operator.answers:
        job.answering = Answering(stage, worker, tell, sends)
        job.function = job.answering.around(function)
    for reader in ports.inputs.values():
        reader._wake_lazily()
        if stage.keeps_its_own:
            reader._read_alone()
        if stage.max_deaths == 1:
            reader._begin_once()
        reader._on_poison(stage.max_deaths, job.poisoned)
    return job


def _try_again(job: OperatorJob, stage: Stage, ports: Ports) -> None:
    """The item with which the worker begins is given up when it took too long too often; those times do not
    count as deaths over it."""
    deaths = len(job.predecessors)
    died = (
        deaths - job.predecessors.count(item_timeout.exceeded(stage)) if stage.timeout is not None else deaths
    )
    over = job.too_late or died >= stage.max_deaths
    for reader in ports.inputs.values():
        reader._on_poison(deaths if over else max(stage.max_deaths, deaths + 1), job.poisoned)


def end(
    worker: WorkerId,
    job: OperatorJob,
    ports: Ports,
    leaving: PortRelease,
    error: BaseException | None,
    tell: Callable[[Event], None],
    sends: bool,
) -> Outcome:
    """Tells how the worker ended, then closes its ports."""
    for reader in ports.inputs.values():
        reader._on_poison(0, None)  # it holds the job, and so the run: without it no collector need end them
    failed = error is not None and not _clean_end(error, ports)
    if not failed and not seeds.worker().host:
        left = [reader for reader in ports.inputs.values() if not reader._retired]
        job.unwanted += sum(map(job.let_go_of_the_rest, left))
    last: Event = Ended(worker, job.unwanted)
    if error is not None and failed:
        cause = error.__cause__ if isinstance(error, ItemFailed) and error.__cause__ else error
        item = short(error.item, 120) if isinstance(error, ItemFailed) else None
        last = Failure(worker, Portable(cause) if sends else cause, item, os.getpid())
    elif isinstance(error, Closed):  # the readers have left, so nobody wants the item in hand
        last = Ended(worker, job.unwanted + bool(ports.inputs), early=True)
    heard = True
    try:
        tell(last)
    except (Closed, Broken):  # a run that is over hears nobody any more
        heard = False
    # The supervisor ends the ports of one that failed once it has broken the channels. Ended here, they would
    # let the stages behind see a clean end of half the items, and another worker do the failed item again.
    if not (failed and heard):
        leaving.close()
    elif sends:
        leaving.leave_open()
    return "failed" if failed else "done"


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

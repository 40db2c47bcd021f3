"""Test watching worker processes: each end is reported exactly once, however it is detected."""

from __future__ import annotations

import errno
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Broken, Graph
from flowchan.run.crew.death_log import DeathLog
from flowchan.run.crew.process import WorkerProcess
from flowchan.run.crew.watch import Watch
from flowchan.run.policy.events import ProcessEnded, WorkerId

ONE, TWO = WorkerId("work", 1), WorkerId("work", 2)


def refuse(pid: int, flags: int = 0) -> int:
    raise OSError(errno.ENOSYS, "refused")


@pytest.fixture(params=["announced", "no pidfd_open", "no pidfd_send_signal"])
def _pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with pidfds, and on systems that forbid some of the system calls."""
    if request.param == "no pidfd_open":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    if request.param == "no pidfd_send_signal":
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)


@contextmanager
def watching() -> Iterator[tuple[Watch, queue.Queue[ProcessEnded]]]:
    reported: queue.Queue[ProcessEnded] = queue.Queue()
    watch = Watch(reported.put)
    thread = threading.Thread(target=watch.run)
    thread.start()
    yield watch, reported
    watch.stop()
    thread.join()
    watch.close()


def started(function: Callable[[], object]) -> WorkerProcess:
    return WorkerProcess("flowchan watched", function, ())


@pytest.mark.usefixtures("_pidfds")
def test_end_of_a_process_is_reported_once() -> None:
    gate = Gate()
    first, second = started(gate.wait), started(gate.wait)
    with watching() as (watch, reported):
        watch.add(ONE, first)
        watch.add(TWO, second)
        gate.wait_held(2)
        assert reported.empty()
        first.kill()
        assert reported.get() == ProcessEnded(ONE)
        assert first.ended()
        assert not second.ended()
        gate.open()
        assert reported.get() == ProcessEnded(TWO)
        assert reported.empty()
    assert (first.exitcode, second.exitcode) == (-9, 0)
    first.close()
    second.close()


@pytest.mark.usefixtures("_pidfds")
def test_process_that_ended_before_the_watch_is_reported() -> None:
    process = started(int)
    assert process.ended(60)
    with watching() as (watch, reported):
        watch.add(ONE, process)
        assert reported.get() == ProcessEnded(ONE)
    process.close()


def test_process_that_was_already_reaped_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may already belong to another process."""

    def has_vanished(pid: int, flags: int = 0) -> int:
        raise ProcessLookupError(errno.ESRCH, "no such process")

    monkeypatch.setattr(os, "pidfd_open", has_vanished)
    process = started(int)
    with watching() as (watch, reported):
        watch.add(ONE, process)
        assert reported.get() == ProcessEnded(ONE)
    process.close()


def test_process_is_removed_from_the_watch_before_it_is_closed() -> None:
    """A child may have inherited the pidfd. In that case, closing the pidfd would not remove the process from
    the watch."""
    gate = Gate()
    first = started(gate.wait)
    with watching() as (watch, reported):
        watch.add(ONE, first)
        second = started(gate.wait)  # inherits the first pidfd
        watch.add(TWO, second)
        gate.wait_held(2)
        first.kill()
        assert reported.get() == ProcessEnded(ONE)
        first.close()
        gate.open()
        assert reported.get() == ProcessEnded(TWO)
        wait_until(lambda: second.ended())
        assert reported.empty()
    second.close()


@pytest.mark.parametrize("whose", [(Watch, "_ended"), (DeathLog, "began")], ids=["watch", "mail"])
def test_internal_error_in_a_helper_thread_ends_the_run(
    whose: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(*whose, fail)
    graph = Graph("helped")
    graph.source([1]).map(os._exit, on="process").sink(abs)
    with pytest.raises(RuntimeError, match="failed to supervise"):
        graph.run()


def test_broken_channel_for_reports_ends_the_run_with_its_cause() -> None:
    """The run receives no more reports, so it would otherwise wait forever for the ends of its workers."""
    gate, graph = Gate(), Graph("unreported")
    graph.source([1]).map(gate.wait, on="process").sink(abs)
    run = graph.start()
    gate.wait_held()
    run._crew.local._mail.channel.abort(ValueError("damaged"))
    gate.open()
    with pytest.raises(RuntimeError, match="failed to supervise") as caught:
        run.wait()
    cause = caught.value.__cause__
    assert isinstance(cause, Broken)
    assert "damaged" in repr(cause.__cause__)

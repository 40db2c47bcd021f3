"""Test ``TaskPool``'s futures with the cases from CPython 3.11's tests of ``wait`` and ``as_completed``.

Each test has the name of the original test but none of its code.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from concurrent import futures

import pytest
from executors import Thing, cancelled, ended
from support.waiting import wait_freed
from support.worker_latch import Gate

from flowchan.pipelines import TaskPool

# --- WaitTests ---


def test_20369(pool: TaskPool) -> None:
    """One call waits for the same future twice."""
    future = pool.submit(abs, -1)
    done, left = futures.wait([future, future], return_when=futures.ALL_COMPLETED)
    assert (done, left) == ({future}, set())


def test_first_completed(pool: TaskPool, gate: Gate) -> None:
    first, held, dropped = pool.submit(pow, 21, 2), pool.submit(gate.wait), cancelled(notified=False)
    done, left = futures.wait([dropped, first, held], return_when=futures.FIRST_COMPLETED)
    assert (done, left) == ({first}, {dropped, held})


def test_first_completed_some_already_completed(pool: TaskPool, gate: Gate) -> None:
    held, dropped, there = pool.submit(gate.wait), cancelled(notified=True), ended(42)
    done, left = futures.wait([dropped, there, held], return_when=futures.FIRST_COMPLETED)
    assert (done, left) == ({dropped, there}, {held})


def test_first_exception(pool: TaskPool, gate: Gate) -> None:
    fine, failing, held = pool.submit(pow, 2, 21), pool.submit(divmod, 1, 0), pool.submit(gate.wait)
    fine.result()
    done, left = futures.wait([fine, failing, held], return_when=futures.FIRST_EXCEPTION)
    assert (done, left) == ({fine, failing}, {held})


def test_first_exception_some_already_complete(pool: TaskPool, gate: Gate) -> None:
    failing, held = pool.submit(divmod, 21, 0), pool.submit(gate.wait)
    there, unnotified, notified = ended(42), cancelled(notified=False), cancelled(notified=True)
    done, left = futures.wait(
        [there, unnotified, notified, failing, held], return_when=futures.FIRST_EXCEPTION
    )
    assert (done, left) == ({there, notified, failing}, {unnotified, held})


def test_first_exception_one_already_failed(pool: TaskPool, gate: Gate) -> None:
    failed, held = ended(error=OSError()), pool.submit(gate.wait)
    done, left = futures.wait([failed, held], return_when=futures.FIRST_EXCEPTION)
    assert (done, left) == ({failed}, {held})


def test_all_completed(pool: TaskPool) -> None:
    every = {
        pool.submit(divmod, 2, 0),
        pool.submit(pow, 2, 21),
        cancelled(notified=True),
        ended(42),
        ended(error=OSError()),
    }
    assert futures.wait(every, return_when=futures.ALL_COMPLETED) == (every, set())


def test_timeout(pool: TaskPool, gate: Gate) -> None:
    fine, held = pool.submit(pow, 6, 7), pool.submit(gate.wait)
    fine.result()
    done, left = futures.wait([fine, held], timeout=0.01)
    assert (done, left) == ({fine}, {held})


def test_pending_calls_race() -> None:
    """The interpreter switches constantly between many threads, each of which waits for all futures."""
    interval, event = sys.getswitchinterval(), threading.Event()
    with TaskPool(5) as pool:
        sys.setswitchinterval(1e-6)
        try:
            asked = {pool.submit(event.wait) for _ in range(100)}
            event.set()
            assert futures.wait(asked) == (asked, set())
        finally:
            sys.setswitchinterval(interval)


# --- AsCompletedTests ---


def test_no_timeout(pool: TaskPool) -> None:
    every = {
        pool.submit(pow, 2, 21),
        pool.submit(pow, 7, 6),
        cancelled(notified=True),
        ended(42),
        ended(error=OSError()),
    }
    assert set(futures.as_completed(every)) == every


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_future_times_out(pool: TaskPool, gate: Gate, timeout: float) -> None:
    there, held, seen = (
        {cancelled(notified=True), ended(42), ended(error=OSError())},
        pool.submit(gate.wait),
        set(),
    )
    completed = futures.as_completed(there | {held}, timeout)
    for _ in there:
        seen.add(next(completed))
    assert seen == there
    with pytest.raises(futures.TimeoutError):
        next(completed)


def test_duplicate_futures(pool: TaskPool) -> None:
    future = pool.submit(abs, -2)
    assert list(futures.as_completed(itertools.repeat(future, 3))) == [future]


def test_free_reference_yielded_future(pool: TaskPool) -> None:
    asked = [pool.submit(Thing) for _ in range(5)]
    for future in futures.as_completed(asked):
        asked.remove(future)
        gone = weakref.ref(future)
        del future
        wait_freed(gone)


def test_correct_timeout_exception_msg(pool: TaskPool, gate: Gate) -> None:
    asked = [cancelled(notified=True), pool.submit(gate.wait), pool.submit(gate.wait), ended(42)]
    with pytest.raises(futures.TimeoutError, match=r"^2 \(of 4\) futures unfinished$"):
        list(futures.as_completed(asked, timeout=0))

"""Test R6 for a start that fails at any point: all steps are undone, and the first error is raised."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import run_python, script
from support.child_processes import descendants
from support.waiting import wait_until

from flowchan import Channel, Graph, RunError, _core
from flowchan.run.crew import local_part

pytestmark = pytest.mark.usefixtures("by_fork")

MOST = 40
"""Number of calls, more than any start in this file makes."""


async def same(item: Any) -> Any:
    return item


def identity(item: Any) -> Any:
    return item


async def for_ever(item: Any) -> Any:
    await asyncio.Event().wait()


def mixed() -> Graph:
    """Return a graph with workers of every kind: threads, processes, tasks, and a thread that collects
    results."""
    graph = Graph("starts")
    numbers = graph.source(itertools.count).map(identity, on="process", workers=2)
    numbers.map(same, workers=2).map(for_ever).collect()
    return graph


class Refused:
    """Wrapper that makes a function raise in its n-th call from the main thread."""

    def __init__(self, usual: Callable[..., Any], n: int, error: BaseException) -> None:
        self.usual, self.remaining, self.error = usual, n, error

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            self.remaining -= 1
            if self.remaining == 0:
                # raise a new exception each time, because the traceback of an old one keeps objects alive
                raise type(self.error)(*self.error.args)
        return self.usual(*arguments, **named)

    def __get__(self, instance: object, owner: type) -> Any:
        """Bind the wrapper like a method."""
        return lambda *arguments, **named: self(instance, *arguments, **named)


def no_more(what: int) -> OSError:
    return OSError(what, os.strerror(what))


REFUSALS: dict[str, tuple[Any, str, BaseException]] = {
    "thread": (threading.Thread, "start", RuntimeError("can't start new thread")),
    "fork": (os, "fork", no_more(errno.EAGAIN)),
    "pipe": (os, "pipe", no_more(errno.EMFILE)),
    "channel": (_core.Channel, "__init__", no_more(errno.ENOMEM)),
    "reader": (Channel, "reader", MemoryError("no port")),
    "pickle": (local_part, "dumps_for_worker", ValueError("not to be sent")),
    "pidfd": (os, "pidfd_open", no_more(errno.EMFILE)),
    "epoll": (select, "epoll", no_more(errno.EMFILE)),
    "eventfd": (os, "eventfd", no_more(errno.EMFILE)),
}


def holdings() -> set[str]:
    gc.collect()
    found = {f"process {child}" for child in descendants()}
    found |= {f"thread {thread.name}" for thread in threading.enumerate()}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"descriptor {number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def start_of(graph: Graph) -> str:
    """Try to start the graph, and return the text of the error, or ``started``."""
    try:
        run = graph.start()
        run.abort()
        run.wait()
    except Exception as error:
        return repr(error)
    return "started"


@pytest.mark.parametrize("what", REFUSALS)
def test_failed_start_releases_all_resources_whichever_call_fails(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_of(mixed())  # the first start of a process creates some objects that are never freed
    before = holdings()
    owner, name, error = REFUSALS[what]
    for n in range(1, MOST):
        refused = Refused(getattr(owner, name), n, error)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, refused)
            end = start_of(mixed())
        wait_until(lambda: holdings() <= before, 20, what=lambda: holdings() - before)
        if refused.remaining > 0:
            break
        assert end == repr(error), n
    assert 1 < n < MOST


PROGRAM = """
    import errno, itertools, multiprocessing, os, sys, threading
    from flowchan import Graph

    def same(item):
        return item

    def refuse(owner, name, n, error):
        usual, calls = getattr(owner, name), itertools.count(1)
        def refusing(*arguments, **named):
            if next(calls) == n:
                raise type(error)(*error.args)  # a new one: a traceback keeps objects alive
            return usual(*arguments, **named)
        setattr(owner, name, refusing)
        return lambda: setattr(owner, name, usual)

    def descriptors():
        # The supervisor's thread keeps the run alive until the thread ends, a moment after the run.
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join()
        return len(os.listdir("/proc/self/fd"))

    def attempt():
        graph = Graph("starts")
        graph.source(range(3)).map(same, on="process", workers=2).sink(same)
        try:
            graph.run()
        except Exception as error:
            return repr(error)

    if __name__ == "__main__":
        multiprocessing.set_start_method(sys.argv[1])
        assert attempt() is None
        before = descriptors()
        for name in ("pipe", "dup"):
            for n in range(1, 30):
                again = refuse(os, name, n, OSError(errno.EMFILE, "too many"))
                end = attempt()
                again()
                # There are fewer if the forkserver has died.
                assert descriptors() <= before, (name, n, end, before, descriptors())
                if end is None:
                    break
                # After an incomplete start, Python's forkserver refuses the next start, or accepts it and
                # then ends.
                gone = "a worker process could not be started with the start method"
                refused = sys.argv[1] == "forkserver" and gone in end
                assert refused or end == repr(OSError(errno.EMFILE, "too many")), end
        for n in range(1, 6):  # the threads of a worker, the mail, the watch and the supervisor
            again = refuse(threading.Thread, "start", n, RuntimeError("can't start new thread"))
            print(attempt(), flush=True)
            again()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_failed_starts_leak_no_descriptor_under_every_start_method(method: str, tmp_path: Path) -> None:
    out = run_python(script(tmp_path, PROGRAM), method)
    assert out == 5 * 'RuntimeError("can\'t start new thread")\n'


def test_run_ends_if_the_thread_for_a_result_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that collects a result is started when the program waits for the run."""
    graph = Graph("starts")
    numbers = graph.source(itertools.count)
    remaining, right = numbers.tee(2)
    remaining.collect()
    right.collect()
    run = graph.start()
    monkeypatch.setattr(
        threading.Thread, "start", Refused(threading.Thread.start, 2, RuntimeError("no new thread"))
    )
    with pytest.raises(RuntimeError, match="no new thread"):
        run.wait()
    assert run.stats().state == "aborted"


def test_event_loop_that_cannot_be_created_fails_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise no_more(errno.EMFILE)

    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    graph = Graph("starts")
    graph.source(itertools.count).map(same, workers=2, name="awaits").sink(identity)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert {error.stage for error in caught.value.exceptions} == {"awaits"}
    assert [type(error.__cause__) for error in caught.value.exceptions] == [OSError, OSError]


def test_aget_raises_if_its_helper_thread_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def get(channel: Channel[int]) -> None:
        monkeypatch.setattr(
            threading.Thread, "start", Refused(threading.Thread.start, 1, RuntimeError("no thread"))
        )
        with pytest.raises(RuntimeError, match="no thread"):
            await channel.aget()
        monkeypatch.undo()
        waiting = asyncio.ensure_future(channel.aget())
        while not channel.stats().waiting_readers:
            await asyncio.sleep(0)
        await channel.aput(1)
        assert await waiting == 1

    asyncio.run(get(Channel()))


def test_worker_that_cannot_be_restarted_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(item: int) -> None:
        os._exit(3)

    usual = os.fork

    def fork() -> int:
        if threading.current_thread() is threading.main_thread():
            return usual()
        raise no_more(errno.EAGAIN)

    monkeypatch.setattr(os, "fork", fork)
    graph = Graph("starts")
    graph.source([1]).map(die, on="process", name="dies").sink(identity)
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert error.stage == "dies"
    assert isinstance(error.__cause__, OSError)

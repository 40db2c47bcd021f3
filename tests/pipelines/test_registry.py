"""Test that the name of a work queue is valid in all processes of a program."""

from __future__ import annotations

import gc
import hmac
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripts import start
from support.waiting import wait_blocked, wait_until

from flowchan import Channel, Closed, Drained
from flowchan.pipelines import registry, work_queue, workqueue

pytestmark = pytest.mark.usefixtures("forked_programs")

# First and last lines of the programs. Each program runs under every start method; main() selects the method.
BEGIN = """
import multiprocessing, os, signal, sys
from flowchan import Channel, Drained, Graph
from flowchan.pipelines import Barrier, map, workqueue

def named(name="queue"):
    return workqueue(name, across="processes")

def start(function, *args):
    child = multiprocessing.Process(target=function, args=args)
    child.start()
    return child

def echo():
    queue = named()
    assert not queue.creator and not queue.is_owner
    for item in queue:
        queue.put((item, os.getpid()))
"""
END = """
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    main()
    print("fine")
"""

PARENT_CREATES = """
def child_of_child():
    start(echo).join()

def main():
    for _ in range(2):  # the first queue is closed, so its owner creates a new one with the same name
        queue = named()
        assert queue.creator
        children = [start(echo), start(child_of_child)]
        queue.put_many(range(50))
        queue.close()
        answers = list(queue)
        assert sorted(item for item, pid in answers) == list(range(50))
        assert os.getpid() not in {pid for item, pid in answers}
        for child in children:  # a child may start only after all questions are answered
            child.join()
            assert child.exitcode == 0
"""

SIBLING_CREATES = """
def own(made, total, done):
    queue = named()
    made.put(queue.creator)
    queue.put_many(range(20))
    queue.close()
    total.put(sum(item for item, pid in queue))
    done.get()

def main():
    made, total, done = [Channel(across="processes") for _ in range(3)]
    owner = start(own, made, total, done)
    assert made.get()
    workers = [start(echo), start(echo)]
    assert total.get() == 190
    for worker in workers:
        worker.join()
    done.put(None)
    owner.join()
    for child in (owner, *workers):
        assert child.exitcode == 0
    assert named().creator  # the first owner has ended, so this process owns the queue
"""

FROM_THE_MAIN_PROCESS = """
def own(made):
    queue = named()
    queue.put("question")
    made.put(queue.creator)
    assert queue.get() == "answer"
    queue.close()

def main():
    made = Channel(across="processes")
    owner = start(own, made)
    assert made.get()
    queue = named()
    assert (queue.creator, queue.get()) == (False, "question")
    queue.put("answer")
    try:
        queue.get()
    except Drained:
        pass
    owner.join()
    assert owner.exitcode == 0
"""

IN_A_GRAPH = """
def ask(number):
    queue = named("squares")
    assert not queue.creator
    queue.put(number * number)
    return number

def main():
    queue = named("squares")
    graph = Graph("squares")
    numbers = graph.source(range(30)).map(ask, workers=2, on="process").collect()
    assert graph.run()[numbers] == list(range(30))
    assert sorted(queue.get_nowait() for _ in range(30)) == [number * number for number in range(30)]
"""

RACE = """
def race(barrier, worker):
    creators = []
    for number in range(20):
        barrier.wait()
        queue = named(f"race {number}")
        creators.append(queue.creator)
        if queue.creator:
            queue.put_many(range(7))
            assert sorted(queue.get() for _ in range(7)) == list(range(7))
        else:
            queue.put(queue.get())
            queue.close()
        barrier.wait()
    return creators

def main():
    creators = map(8, race, Barrier(8), on="process").join()
    assert [sum(one) for one in zip(*creators)] == [1] * 20
"""

KILLED = """
def own(made):
    queue = named()
    made.put(queue.creator)
    signal.pause()

def main():
    for _ in range(3):
        made = Channel(across="processes")
        owner = start(own, made)
        assert made.get()
        queue = named()
        assert not queue.creator
        os.kill(owner.pid, signal.SIGKILL)
        owner.join()
    assert named().creator
"""


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize(
    "body",
    [PARENT_CREATES, SIBLING_CREATES, FROM_THE_MAIN_PROCESS, IN_A_GRAPH, RACE, KILLED],
    ids=["parent creates", "sibling creates", "from the main process", "in a graph", "race", "killed owner"],
)
def test_names_are_valid_in_all_processes_of_a_program(body: str, method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BEGIN + body + END)
    with start(program, method) as process:
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "fine\n", "")


def forked(function: Callable[[], object]) -> Any:
    child = multiprocessing.get_context("fork").Process(target=function)
    child.start()
    return child


def end(child: Any) -> None:
    child.join()
    child.close()


def taken(name: str) -> bool:
    """Return True if a process of this program holds the name."""
    return registry._address(name) in Path("/proc/net/unix").read_text(errors="replace")


def test_name_is_free_after_owner_drops_the_queue() -> None:
    queue = workqueue("given up", across="processes")
    assert taken("given up")
    queue.close()
    again = workqueue("given up", across="processes")
    assert again.creator
    del queue
    gc.collect()
    assert taken("given up")
    del again
    gc.collect()
    assert not taken("given up")


def test_late_worker_sees_that_the_queue_is_closed() -> None:
    queue, reported = workqueue("late", across="processes"), Channel[object](across="processes")
    queue.close()
    assert list(queue) == []

    def late() -> None:
        found = workqueue("late", across="processes")
        reported.put((found.creator, list(found)))

    child = forked(late)
    assert reported.get() == (False, [])
    end(child)


def test_creator_killed_during_claim_does_not_keep_the_name() -> None:
    def killed() -> None:
        real, made = socket.socket, []

        def second(*args: Any) -> socket.socket:
            if made:
                os.kill(os.getpid(), signal.SIGKILL)
            made.append(1)
            return real(*args)

        socket.socket = second  # type: ignore[assignment, misc]
        workqueue("middle", across="processes")

    child = forked(killed)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    child.close()
    assert workqueue("middle", across="processes").creator


def test_other_processes_wait_for_creator_stopped_during_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "OWNER_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stopped:
        stopped.bind("\0" + registry._address("stopped"))
        with pytest.raises(TimeoutError, match="'stopped'"):
            workqueue("stopped", across="processes")
    assert workqueue("stopped", across="processes").creator


def test_forked_child_of_owner_does_not_keep_the_name() -> None:
    ready, go = Channel[bool](across="processes"), Channel[None](across="processes")

    def own() -> None:
        queue = workqueue("inherited", across="processes")
        if os.fork() == 0:
            ready.put(queue.creator)
            go.get()
            os._exit(0)
        signal.pause()

    owner = forked(own)
    assert ready.get()
    os.kill(owner.pid, signal.SIGKILL)
    end(owner)
    queue = workqueue("inherited", across="processes")
    assert queue.creator
    go.put(None)
    wait_until(lambda: not go.stats().readers)


def test_children_forked_during_claims_do_not_keep_the_name() -> None:
    reported, go = Channel[bool](across="processes"), Channel[None](across="processes")

    def fork() -> None:
        for _ in range(30):
            if os.fork() == 0:
                with pytest.raises(Closed):
                    go.get()
                os._exit(0)

    def own() -> None:
        kept, forking = True, threading.Thread(target=fork)
        forking.start()
        try:
            while forking.is_alive():
                workqueue("comes and goes", across="processes")
            wait_blocked(go, readers=30)
            kept = taken("comes and goes")
        finally:
            reported.put(kept)
        for _ in range(30):
            os.wait()

    child = forked(own)
    kept = reported.get()
    go.close()
    end(child)
    assert not kept


def test_name_of_thread_queue_is_valid_only_in_its_process() -> None:
    queue, reported = workqueue("threads"), Channel[object](across="processes")
    child = forked(lambda: reported.put(workqueue("threads", across="processes").creator))
    assert reported.get() is True
    end(child)
    assert not workqueue("threads").creator
    assert not taken("threads")
    queue.close()


def test_entry_without_valid_signature_is_ignored() -> None:
    address = registry._address("forged")
    with (
        os.fdopen(os.memfd_create("flowchan-name"), "wb", buffering=0) as card,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as where,
    ):
        card.write(hmac.digest(b"another key", address.encode(), "sha256") + b"not a pickle")
        where.bind(f"\0{address}-{os.getpid()}-{card.fileno()}")
        assert registry.find("forged") is None


def test_worker_finishes_closed_queue_opened_by_name() -> None:
    queue = workqueue("closed", across="processes")
    queue.put("last")
    queue.close()

    def work() -> None:
        found = workqueue("closed", across="processes")
        found.put(found.get())
        with pytest.raises(Drained):
            found.get()

    child = forked(work)
    assert list(queue) == ["last"]
    end(child)

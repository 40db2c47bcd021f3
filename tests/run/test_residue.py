"""Test R6 (No residue): no matter how a run ends, no process, thread, segment or descriptor remains."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import Gate, everywhere, run_python, script, start
from support.child_processes import descendants
from support.waiting import wait_until

from flowchan import Channel, Graph, In, Out, RunError

pytestmark = pytest.mark.usefixtures("forked_programs")


def same(item: Any) -> Any:
    return item


def fail(item: int) -> int:
    raise ValueError(item)


def die(item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def residue() -> set[str]:
    """Return the run resources that this process holds now."""
    found = {f"process {child}" for child in descendants()}
    found |= {
        f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("flowchan")
    }
    with open("/proc/self/maps") as maps:
        found |= {line.strip() for line in maps if "memfd:flowchan" in line}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"descriptor {number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


@pytest.fixture
def _nothing_left() -> Iterator[None]:
    """Check that a test leaves nothing behind once no object refers to its run."""
    gc.collect()
    before = residue()
    yield
    gc.collect()
    wait_until(lambda: residue() <= before, 10, what=lambda: residue() - before)


def endless(on: str) -> Graph:
    graph = Graph("r6")
    graph.source(itertools.count, on=on).map(same, on=on, workers=2).sink(same, on=on)
    return graph


def done(on: str) -> None:
    graph = Graph("r6")
    graph.source(range(100), on=on).map(same, on=on, workers=2).collect()
    graph.run()


def taken(on: str) -> None:
    graph = Graph("r6")
    graph.source(itertools.count, on=on).map(same, on=on, workers=2).take(3).collect()
    graph.run()


def failed(on: str) -> None:
    graph = Graph("r6")
    graph.source(itertools.count, on=on).map(fail, on=on, workers=2).sink(same, on=on)
    with pytest.raises(RunError):
        graph.run()


def failed_to_be_built(on: str) -> None:
    class Model:
        def __init__(self) -> None:
            raise ValueError

        def __call__(self, item: int) -> int:
            return item

    graph = Graph("r6")
    graph.source(itertools.count, on=on).map(Model, on=on).sink(same, on=on)
    with pytest.raises(RunError):
        graph.run()


def exited(on: str) -> None:
    graph = Graph("r6")
    graph.source(itertools.count, on=on).map(lambda _: exit(3), on=on).sink(same, on=on)
    with pytest.raises(RunError):
        graph.run()


def stopped(on: str) -> None:
    run = endless(on).start()
    run.stop()
    run.wait()


def aborted(on: str) -> None:
    run = endless(on).start()
    run.abort()
    run.wait()


def left_by_an_exception(on: str) -> None:
    with contextlib.suppress(LookupError), endless(on).start():
        raise LookupError


def loop_left(on: str) -> None:
    graph = Graph("r6")
    numbers = graph.source(itertools.count, on=on).map(same, on=on).collect()
    with graph.start() as run:
        for item in run.iter(numbers):
            if item == 5:
                break


def killed(on: str) -> None:
    graph = Graph("r6")
    graph.source(itertools.count).map(die, on="process", restarts=0).sink(same, on=on)
    with pytest.raises(RunError):
        graph.run()


def stuck(on: str) -> None:
    gate = Gate()
    graph = Graph("r6")
    graph.source(itertools.count, on=on).map(lambda _: gate.wait(), on="process").sink(same, on=on)
    run = graph.start()
    gate.wait_held()
    run.abort()
    run.wait()


def broadcast_value_changed(on: str) -> None:
    graph = Graph("r6")
    value = graph.broadcast(bytes(10_000))
    items = graph.input()
    versions = items.map(lambda _: value.version, on=on).collect()
    with graph.start() as run:
        found = run.iter(versions)
        for version in range(3):
            run[items].put(version)
            assert next(found) == version
            value.set(bytes(10_000))


ENDINGS: list[Callable[[str], None]] = [
    done,
    taken,
    failed,
    failed_to_be_built,
    exited,
    stopped,
    aborted,
    left_by_an_exception,
    loop_left,
    killed,
    stuck,
    broadcast_value_changed,
]


@everywhere
@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_each_way_to_end_a_run_releases_all_resources(ending: Callable[[str], None], on: str) -> None:
    ending(on)


@pytest.mark.usefixtures("_nothing_left")
def test_failed_start_releases_all_resources() -> None:
    graph = Graph("r6")
    graph.source(itertools.count, on="process").map(same, on="process").sink(same)
    real = BaseProcess.start
    starts = itertools.count()

    def start_once(process: BaseProcess) -> None:
        if next(starts) == 1:
            raise OSError("no more processes")
        real(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseProcess, "start", start_once)
        with pytest.raises(OSError, match="no more processes"):
            graph.start()


@pytest.mark.usefixtures("_nothing_left")
def test_failed_planning_releases_all_resources() -> None:
    graph = Graph("r6")
    graph.source(itertools.count).map(same, on="process", capacity=10**15).sink(same)
    with pytest.raises(Exception):  # noqa: B017, PT011 - GraphError or OSError, by the machine
        graph.start()


def test_run_without_references_is_freed() -> None:
    graph = Graph("r6")
    graph.source([1]).map(same, on="process").collect()
    run = graph.start()
    run.wait()
    reference = weakref.ref(run)
    del run
    gc.collect()
    assert reference() is None


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="its counts are merged by the collector"
)
@pytest.mark.parametrize("end", [done, failed, exited, killed])
def test_resources_of_process_runs_are_freed_without_garbage_collection(end: Callable[[str], None]) -> None:
    end("process")
    gc.collect()
    before = residue()
    gc.disable()
    try:
        end("process")
        wait_until(lambda: residue() <= before, 10, what=lambda: residue() - before)
    finally:
        gc.enable()


many = pytest.mark.parametrize("runs", [30, pytest.param(200, marks=pytest.mark.long)])
"""Parameter for the number of runs; more runs show leaks that are invisible in a few."""


def memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@many
def test_many_runs_leak_no_resources(runs: int) -> None:
    def once() -> None:
        graph = Graph("r6")
        total = graph.source(range(50)).map(same, workers=2).map(same, on="process").reduce(int.__add__, 0)
        assert graph.run()[total] == sum(range(50))

    for _ in range(20):
        once()
    before, size = residue(), memory()
    for _ in range(runs):
        once()
    gc.collect()
    wait_until(lambda: residue() <= before, 10, what=lambda: residue() - before)
    assert memory() - size < 16 << 20


@many
def test_many_failed_runs_leak_no_resources(runs: int) -> None:
    for _ in range(10):
        failed("thread")
    before, size = residue(), memory()
    for number in range(runs):
        (failed if number % 10 else killed)("thread")
    gc.collect()
    wait_until(lambda: residue() <= before, 10, what=lambda: residue() - before)
    assert memory() - size < 16 << 20


@pytest.mark.parametrize("across", ["threads", "processes"])
def test_thousand_channels_leak_no_resources(across: Any) -> None:
    def once() -> None:
        channel: Channel[bytes] = Channel(8, across=across)
        channel.put(b"x" * 10_000)
        channel.close()
        assert channel.get() == b"x" * 10_000

    for _ in range(50):
        once()
    before, size = residue(), memory()
    for _ in range(1000):
        once()
    gc.collect()
    assert residue() <= before
    assert memory() - size < 16 << 20


# --- the program itself exits ---

PROGRAM = """
    import itertools, os, sys
    from flowchan import Graph, In, Out

    def hold(item):
        os.write(1, b"%d\\n" % os.getpid())
        os.read(os.pipe()[0], 1)

    def wait_for_input(items: In[int], out: Out[int]):
        os.write(1, b"%d\\n" % os.getpid())
        for item in items:
            out.put(item)

    graph = Graph("orphans")
    numbers = graph.source(itertools.count, on="process", capacity=1)
    held = numbers.map(hold, on="process", workers=2)
    graph.stage(wait_for_input, held, on="process").sink(id)

    if __name__ == "__main__":
        import multiprocessing
        multiprocessing.set_start_method(sys.argv[1])
        run = graph.start()
        END
"""


def reference(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_a_killed_program_end(method: str, tmp_path: Path) -> None:
    with start(script(tmp_path, PROGRAM.replace("END", "run.wait()")), method) as process:
        assert process.stdout is not None
        try:
            workers = [int(process.stdout.readline()) for _ in range(3)]
            family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        finally:
            process.kill()
        wait_until(
            lambda: all(map(reference, {*workers, *family})),
            what=lambda: list(filter(psutil.pid_exists, family)),
        )


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise SystemExit", "pass", "del run", "os._exit(0)"])
def test_workers_end_if_the_program_does_not_wait(end: str, tmp_path: Path) -> None:
    end = "for _ in range(100): run.stats().stages\n        " + end
    with start(script(tmp_path, PROGRAM.replace("END", end)), "fork") as process:
        family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        out, err = process.communicate()
    assert process.returncode == 0, err
    wait_until(lambda: all(map(reference, {*map(int, out.split()), *family})))


def test_run_with_a_dropped_handle_does_not_delay_the_exit(tmp_path: Path) -> None:
    text = """
        import itertools
        from flowchan import Graph

        if __name__ == "__main__":
            graph = Graph("dropped")
            graph.source(itertools.count, on="process").sink(id)
            graph.start()
            print("end")
    """
    assert run_python(script(tmp_path, text)) == "end\n"


def test_ports_kept_by_a_stage_do_not_keep_runs_alive() -> None:
    kept: list[Any] = []

    def keep(items: In[int], out: Out[int]) -> None:
        for item in items:
            out.put(item)
        kept.append((items, out))

    graph = Graph("r6")
    numbers = graph.stage(keep, graph.source(range(3))).collect()
    assert graph.run()[numbers] == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flowchan")]


def test_no_thread_of_a_run_is_left_after_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """After reporting the end of the run, the thread may still hold channels of the run for a while."""
    own_thread, looked = threading.get_ident(), threading.Event()

    def we_join() -> bool:
        frame = sys._current_frames()[own_thread]
        while frame.f_back is not None and frame.f_code.co_name != "join":
            frame = frame.f_back
        return frame.f_code.co_name == "join"

    def warn_of(*_: object) -> None:
        wait_until(lambda: looked.is_set() or we_join())

    monkeypatch.setattr("flowchan.run.crew.local_part.LocalPart.warn_of", warn_of)
    graph = Graph("r6")
    graph.source(range(3)).sink(id)
    graph.run()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("flowchan")]
    looked.set()
    assert left == []

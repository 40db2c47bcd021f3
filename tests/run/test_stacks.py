"""Test ``run.stacks``: the Python stacks of the workers of a run, in each state and on each placement."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from runs import Gate, everywhere
from support.waiting import wait_until

from flowchan import Channel, Graph, RunError, hosts
from flowchan.run.crew import process_stacks
from flowchan.run.observe.stack_text import text_of_coroutine, text_of_dump
from flowchan.run.policy.events import WorkerId
from flowchan.run.worker import stack_file

by_each_method = pytest.mark.usefixtures("_method")


def last_calls(text: str) -> list[str]:
    """Return the names of the functions in a stack, the most recent call last."""
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File ")]


def now_in(run: Any, stage: str, function: str) -> str:
    """Wait until the first worker of a stage is in a function, and return its stack."""
    found: list[str] = []

    def is_in() -> bool:
        found[:] = run.stacks(stage).values()
        return bool(found) and function in last_calls(found[0])

    wait_until(is_in, what=lambda: found)
    return found[0]


# --- states of a worker process ---


def asleep(gate: Gate) -> None:
    while not gate.channel.closed:
        time.sleep(0.01)


def computing(gate: Gate) -> None:
    while not gate.channel.closed:
        sum(range(1000))


def holding_the_gil(gate: Gate) -> None:
    """``PyDLL`` does not release the GIL, so no Python code can run in this process."""
    ctypes.PyDLL(None).sleep(600)


def reading(gate: Gate) -> None:
    """A C function blocks in a system call, which must not fail with EINTR."""
    end, _other = os.pipe()
    ctypes.CDLL(None).read(end, ctypes.create_string_buffer(1), 1)


def waiting(gate: Gate) -> None:
    gate.wait()


@by_each_method
@pytest.mark.parametrize("state", [asleep, computing, holding_the_gil, reading, waiting])
def test_stacks_show_the_line_of_a_worker_process(state: Callable[[Gate], None]) -> None:
    gate = Gate()
    graph = Graph("states")
    graph.source([gate]).sink(state, on="process", name="work")
    run = graph.start()
    text = now_in(run, "work", state.__name__)
    assert last_calls(text)[0] == "serving_stacks"
    assert __file__ in text
    gate.open()
    run.abort()
    if state in (holding_the_gil, reading):
        for process in run._crew.local.processes.values():
            process.kill()
    run.wait()


@everywhere
def test_stacks_show_source_lines_with_the_most_recent_call_last(on: str) -> None:
    gate = Gate()

    def work(item: int) -> int:
        return gate.wait(item)  # type: ignore[no-any-return]

    graph = Graph("lines")
    out = graph.source([1]).map(work, on=on, name="work").collect()
    with graph.start() as run:
        gate.wait_held()
        text = run.stacks("work")["work 1"]
        calls = last_calls(text)
        assert calls.index("work") < calls.index("wait")
        assert "    return gate.wait(item)" in text
        gate.open()
        assert run.wait()[out] == [1]


def test_stacks_of_another_thread_of_a_process_are_separate() -> None:
    gate = Gate()

    def work(item: int) -> None:
        threading.Thread(target=helper, daemon=True).start()
        gate.wait()

    def helper() -> None:
        gate.wait()

    graph = Graph("threads")
    graph.source([1]).sink(work, on="process", name="work")
    with graph.start() as run:
        gate.wait_held(2)
        _, first, second = run.stacks("work")["work 1"].split("thread 0x")
        assert "work" in last_calls(first)
        assert "helper" in last_calls(second)
        gate.open()


# --- coroutines ---


def test_stacks_of_coroutines_show_everything_that_they_await() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    async def inner() -> None:
        begun.release()
        while not go_on.is_set():
            await asyncio.sleep(0.001)

    async def steps() -> AsyncIterator[int]:
        await inner()
        yield 1

    async def work(item: int) -> None:
        async for _ in steps():
            pass

    graph = Graph("coroutines")
    graph.source([1]).sink(work, workers=2, name="work")
    with graph.start() as run:
        begun.acquire()
        found = run.stacks("work")
        go_on.set()
        run.wait()
    assert sorted(found) == ["work 1", "work 2"]
    busy, idle = sorted(found.values(), key=lambda text: "in work\n" not in text)
    assert last_calls(busy)[0] == last_calls(idle)[0] == "run_worker"
    assert "async for _ in steps():" in busy
    assert "in work\n" not in idle


def test_coroutine_that_blocks_its_loop_shows_the_thread() -> None:
    gate = Gate()

    async def work(item: int) -> None:
        gate.wait()

    graph = Graph("blocking")
    graph.source([1]).sink(work, name="work")
    with graph.start() as run:
        gate.wait_held()
        calls = last_calls(run.stacks("work")["work 1"])
        gate.open()
    assert calls.index("work") < calls.index("wait")


def test_text_of_a_coroutine_follows_awaits_and_yields_from() -> None:
    import types

    @types.coroutine
    def bottom() -> Any:
        yield

    async def middle() -> None:
        await bottom()

    async def top() -> None:
        await middle()

    one = top()
    one.send(None)
    assert last_calls(text_of_coroutine(one)) == ["top", "middle", "bottom"]
    one.close()
    assert text_of_coroutine(one) == ""


# --- dumps ---


def test_text_of_a_dump_reverses_threads_and_calls() -> None:
    dump = (
        'Thread 0x0000002a (most recent call first):\n  File "/none.py", line 5 in <lambda>\n'
        '  File "/none.py", line 6 in run\n\n'
        "Current thread 0x0000002b (most recent call first):\n  <no Python frame>\n"
    )
    assert text_of_dump(dump) == (
        "thread 0x0000002b:\n  <no Python frame>\n\n"
        'thread 0x0000002a:\n  File "/none.py", line 6, in run\n  File "/none.py", line 5, in <lambda>\n'
    )


def test_text_of_a_dump_omits_the_start_of_the_process() -> None:
    dump = (
        'Current thread 0x0000002b (most recent call first):\n  File "/none.py", line 5 in f\n'
        '  File "/none.py", line 6 in serving_stacks\n  File "/none.py", line 7 in <module>\n'
    )
    calls = '  File "/none.py", line 6, in serving_stacks\n  File "/none.py", line 5, in f\n'
    assert text_of_dump(dump) == calls


def test_text_of_one_thread_has_only_its_calls() -> None:
    dump = (
        'Current thread 0x0000002b [name] (most recent call first):\n  File "/none.py", line 5 in f\n  ...\n'
    )
    assert text_of_dump(dump) == '  ...\n  File "/none.py", line 5, in f\n'


def test_text_that_is_not_a_dump_is_returned_unchanged() -> None:
    assert text_of_dump("") == ""
    assert text_of_dump("unknown\n") == "unknown\n"


def test_stack_file_ignores_dumps_that_are_incomplete() -> None:
    file = stack_file.StackFile()
    try:
        assert file.state == b""
        os.write(file._fd, stack_file.READY + b"\x02old\x03")
        assert file.state == stack_file.READY
        file.clear()
        assert file.answer() is None
        os.write(file._fd, b"rest of an old one\x03")
        assert file.answer() is None
        os.write(file._fd, b"\x02new")
        assert file.answer() is None
        os.write(file._fd, b"est\x03\x02la")
        assert file.answer() == "newest"
        assert file.last_words() == ""
        os.write(file._fd, b"\x01last\x03")
        assert file.last_words() == "last"
        assert file.state == stack_file.READY
    finally:
        file.close()


# --- which workers ---


def test_stacks_have_one_text_for_each_running_worker() -> None:
    gate = Gate()
    graph = Graph("several")
    numbers = graph.source(range(5), name="numbers").map(gate.wait, on="process", workers=2, name="first")
    numbers.map(abs, workers=11, name="second").sink(abs, name="third")
    with graph.start() as run:
        gate.wait_held(2)
        every = run.stacks()
        assert list(run.stacks(numbers)) == ["first 1", "first 2"]
        gate.open()
    second = [f"second {number}" for number in range(1, 12)]
    assert [name for name in every if not name.startswith("numbers")] == [
        "first 1", "first 2", *second, "third 1"
    ]  # fmt: skip


@pytest.mark.parametrize("stage", ["none", 3, Graph("other").source([1])])
def test_stacks_of_an_unknown_stage_name_the_stages(stage: Any) -> None:
    graph = Graph("known")
    graph.input("in").sink(abs, name="out")
    with graph.start() as run, pytest.raises(KeyError) as caught:
        run.stacks(stage)
    assert "graph 'known'" in str(caught.value)
    if isinstance(stage, str):
        assert "its stages are 'in', 'out'" in str(caught.value)


@everywhere
def test_stacks_are_empty_after_the_run(on: str) -> None:
    graph = Graph("over")
    graph.source(range(3)).sink(abs, on=on)
    run = graph.start()
    run.wait()
    assert run.stacks() == {}


@pytest.mark.filterwarnings("ignore:.*still running")
def test_stacks_after_an_abort_show_threads_still_running(short_grace: None) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stubborn(item: int) -> None:
        begun.set()
        go_on.wait()

    graph = Graph("stuck")
    graph.source([1]).sink(stubborn, name="stubborn")
    run = graph.start()
    begun.wait()
    run.abort()
    run.wait()
    assert "stubborn" in last_calls(run.stacks()["stubborn 1"])
    go_on.set()
    wait_until(lambda: not run.stacks())


def test_process_that_was_killed_is_left_out() -> None:
    gate = Gate()
    graph = Graph("killed")
    graph.source([1]).sink(gate.wait, on="process", name="work")
    with graph.start() as run:
        gate.wait_held()
        (process,) = run._crew.local.processes.values()
        process.kill()
        process.ended(60)
        assert process_stacks.stacks_of_processes({WorkerId("work", 1): process}) == {}
        gate.open()


# --- many calls ---


@by_each_method
@pytest.mark.parametrize("callers", [1, 2])
def test_stacks_disturb_no_item(callers: int) -> None:
    """The signals interrupt neither the user's code nor the waits of the channels."""

    def work(item: int) -> tuple[int, int]:
        end, other = os.pipe()
        os.write(other, b"x")
        assert os.read(end, 1) == b"x"
        os.close(end)
        os.close(other)
        return item, zlib.crc32(b"%d" % item)

    graph = Graph("calls")
    numbers = graph.input("numbers", capacity=8)
    done = numbers.map(work, on="process", workers=2, name="work").map(lambda pair: pair, name="same")
    out = done.collect()
    over = threading.Event()

    def feed() -> None:
        put = 0
        while not over.is_set():
            run[numbers].put(put)
            put += 1
        run[numbers].close()
        count.append(put)

    def ask() -> None:
        for _ in range(50 // callers):
            found = run.stacks("work")
            assert sorted(found) == ["work 1", "work 2"]
            texts.extend(found.values())

    count: list[int] = []
    texts: list[str] = []
    with graph.start() as run:
        feeder = threading.Thread(target=feed)
        feeder.start()
        askers = [threading.Thread(target=ask) for _ in range(callers)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        over.set()
        feeder.join()
        found = run.wait()[out]
    assert found == [(item, zlib.crc32(b"%d" % item)) for item in range(count[0])]
    assert len(texts) == 100
    assert all(last_calls(text)[0] == "serving_stacks" for text in texts)


def test_stacks_of_a_worker_that_is_added_appear() -> None:
    gate = Gate()
    graph = Graph("added")
    items = graph.input()
    items.sink(gate.wait, on="process", name="work")
    with graph.start() as run:
        run.scale("work", 2)
        wait_until(lambda: sorted(run.stacks("work")) == ["work 1", "work 2"], what=run.stacks)
        gate.open()


# --- pools and hosts ---


def test_stacks_of_pooled_workers_in_each_run() -> None:
    gates = [Gate(), Gate()]
    graph = Graph("pooled")
    items = graph.input()
    items.sink(lambda number: gates[number].wait(), on="process", name="work")
    with graph.pool() as pool:
        for number, gate in enumerate(gates):
            with pool.start() as run:
                run[items].put(number)
                gate.wait_held()
                calls = last_calls(run.stacks("work")["work 1"])
                assert calls[:2] == ["serving_stacks", "pooled_main"]
                assert calls[-2:] == ["<lambda>", "wait"]
                gate.open()


def test_stacks_of_workers_on_hosts() -> None:
    go_on: Channel[int] = Channel(1, across="hosts")

    def work(item: int) -> int:
        return go_on.get()

    graph = Graph("hosted")
    out = graph.source([1, 2]).map(work, on=hosts.local(2), workers=2, name="work").collect()
    with graph.start() as run:
        text = now_in(run, "work", "work")
        assert sorted(run.stacks("work")) == ["work 1", "work 2"]
        assert "return go_on.get()" in text
        go_on.put(1)
        go_on.put(2)
        assert sorted(run.wait()[out]) == [1, 2]


# --- processes that do not answer ---


@pytest.fixture
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stacks, "ANSWER_WITHIN_S", 0.1)


def stack_of(prepare: Callable[[], object]) -> str:
    """Return the stack of a worker that has called ``prepare`` and is waiting in ``gate``."""
    gate = Gate()

    def work(item: int) -> None:
        prepare()
        gate.wait()

    graph = Graph("silent")
    graph.source([1]).sink(work, on="process", name="work")
    with graph.start() as run:
        gate.wait_held()
        (text,) = run.stacks("work").values()
        gate.open()
    return text


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a program with the name ``py-spy`` in an otherwise empty ``PATH``."""
    monkeypatch.setenv("PATH", str(folder))
    (folder / "py-spy").write_text(f"#!{sys.executable}\n{text}")
    (folder / "py-spy").chmod(0o755)


def ignore() -> None:
    signal.signal(stack_file.SIGNAL, signal.SIG_IGN)


@pytest.mark.usefixtures("_quickly")
def test_process_that_ignores_the_signal_gives_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    text = stack_of(ignore)
    assert text.startswith("no stack of pid ")
    assert text.endswith(
        ": it did not answer; it may be stopped, or ignore the signal; py-spy is not installed\n"
    )


@pytest.mark.usefixtures("_quickly")
def test_py_spy_reads_the_stack_of_a_silent_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "import sys\nprint(sys.argv[1:])", monkeypatch)
    text = stack_of(ignore)
    assert text.startswith("['dump', '--pid', '")


@pytest.mark.usefixtures("_quickly")
def test_failure_of_py_spy_is_part_of_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "import sys\nsys.exit('Permission denied')", monkeypatch)
    assert stack_of(ignore).endswith("; py-spy failed: Permission denied\n")


@pytest.mark.usefixtures("_quickly")
def test_py_spy_that_hangs_is_part_of_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_stacks, "PY_SPY_WITHIN_S", 0.1)
    program(tmp_path, "import time\ntime.sleep(600)", monkeypatch)
    assert "; py-spy failed: Command " in stack_of(ignore)


def test_process_answers_if_its_main_thread_blocks_the_signal() -> None:
    text = stack_of(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [stack_file.SIGNAL]))
    assert "work" in last_calls(text)


@by_each_method
def test_process_answers_if_the_program_blocks_the_signal() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [stack_file.SIGNAL])
    try:
        assert "work" in last_calls(stack_of(int))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("by_fork", "_quickly")
def test_process_that_is_starting_is_not_sent_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would kill a process that has no handler for it."""
    monkeypatch.setattr(stack_file.StackFile, "serve", lambda _: None)
    assert ": it is starting; " in stack_of(int)


@pytest.mark.usefixtures("by_fork")
def test_signal_that_the_program_uses_keeps_its_handler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    heard: list[int] = []
    before = signal.signal(stack_file.SIGNAL, lambda number, _: heard.append(number))
    try:
        text = stack_of(lambda: signal.raise_signal(stack_file.SIGNAL))
    finally:
        signal.signal(stack_file.SIGNAL, before)
    assert f": it uses signal {stack_file.SIGNAL:d} for something else; " in text


@pytest.mark.usefixtures("by_fork")
def test_stacks_of_a_graph_that_runs_in_a_forked_worker() -> None:
    """The inner worker inherits the handler of the outer one."""

    def outer(item: int) -> str:
        return stack_of(int)

    graph = Graph("outer")
    out = graph.source([1]).map(outer, on="process").collect()
    (text,) = graph.run()[out]
    assert "work" in last_calls(text)
    assert "outer" not in last_calls(text)


# --- items that exceed their time limit ---


def slow(item: int) -> None:
    time.sleep(600)


def slow_in_c(item: int) -> None:
    ctypes.PyDLL(None).sleep(600)


@by_each_method
@pytest.mark.parametrize("function", [slow, slow_in_c])
def test_item_timeout_logs_the_stack_of_its_worker(
    function: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    graph = Graph("limited")
    items = graph.source([1])
    items.sink(function, on="process", timeout=0.2, name="work")
    with pytest.raises(RunError):
        graph.run()
    check_logged(caplog, function.__name__)


def test_item_timeout_logs_the_stack_of_a_remote_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = Graph("limited")
    graph.source([1]).sink(slow, on=hosts.local(1), timeout=0.2, name="work")
    with pytest.raises(RunError):
        graph.run()
    check_logged(caplog, "slow")


def check_logged(caplog: pytest.LogCaptureFixture, function: str) -> None:
    (record,) = (one for one in caplog.records if "its stack was" in one.getMessage())
    assert (record.name, record.levelno) == ("flowchan.run", logging.WARNING)
    assert last_calls(record.getMessage())[-1] == function
    assert "sleep(600)" in record.getMessage()


def test_death_does_not_log_the_stacks_of_earlier_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    graph = Graph("killed")
    graph.source([1]).sink(gate.wait, on="process", timeout=600, name="work")
    with graph.start() as run:
        gate.wait_held()
        assert "wait" in last_calls(run.stacks("work")["work 1"])
        (process,) = run._crew.local.processes.values()
        process.kill()
        wait_until(lambda: any("was killed by SIGKILL" in one.getMessage() for one in caplog.records))
        gate.open()
    assert not any("its stack was" in one.getMessage() for one in caplog.records)

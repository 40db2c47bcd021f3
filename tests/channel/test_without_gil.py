"""Threads share a port, an item or a loan without a GIL to protect it.

The tests run on any Python, but show more on a free-threaded build (``make test-pythons``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from flowchan import Channel, ChannelError, Graph
from flowchan.run.worker.async_worker import StageLoop, only_wait_for

AT_ONCE = 6
free_threaded = pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"),
    reason="this Python has a GIL: run the tests with a free-threaded build (python3.14t)",
)


def at_once(*functions: Callable[[], object]) -> None:
    """Run all functions at the same time, each in its own thread, and raise their errors."""
    together = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def call(function: Callable[[], object]) -> None:
        together.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@free_threaded
def test_importing_flowchan_keeps_the_gil_disabled() -> None:
    """Neither importing flowchan nor running a graph may enable the GIL."""
    code = """if True:
        import sys
        from flowchan import Graph
        graph = Graph("free")
        total = graph.source(range(100)).map(str, workers=2).map(len).reduce(int.__add__, 0)
        assert graph.run()[total] == 190
        assert not sys._is_gil_enabled()
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)


@pytest.mark.parametrize("across", ["threads", "processes"])
def test_threads_that_share_ports_transfer_every_item_once(across: str) -> None:
    channel = Channel[int](8, across=across)
    writer, reader = channel.writer(), channel.reader()
    got: list[list[int]] = [[] for _ in range(AT_ONCE)]

    def put(first: int) -> None:
        for number in range(first, first + 1000):
            writer.put(number)
        if leaving.wait() == 0:
            writer.close()

    leaving = threading.Barrier(AT_ONCE)
    puts = [lambda n=n: put(1000 * n) for n in range(AT_ONCE)]
    gets = [lambda own=own: own.extend(reader) for own in got]
    at_once(*puts, *gets)
    assert Counter(number for own in got for number in own) == Counter(range(1000 * AT_ONCE))
    reader.close()


@pytest.mark.parametrize("across", ["threads", "processes"])
def test_port_that_many_threads_close_at_once_is_closed_once(across: str) -> None:
    for _ in range(100):
        channel = Channel[int](across=across)
        closed, writer = channel.writer(), channel.writer()
        at_once(*[closed.close] * AT_ONCE)
        assert channel.stats().writers == 1
        assert not channel.closed
        writer.close()


def test_port_closed_while_threads_read_it_takes_no_more_items() -> None:
    for _ in range(100):
        channel = Channel[int]()
        channel.put_many(range(20))
        with channel.reader() as stays:
            reader = channel.reader()

            def read(reader=reader) -> None:
                with contextlib.suppress(ValueError, ChannelError):
                    for _ in range(21):
                        reader.get(timeout=0)

            at_once(read, read, reader.close)
            remaining = stays.get_many(30) if len(channel) else []
        assert remaining == list(range(20))[20 - len(remaining) :]


def test_an_item_may_change_while_it_is_put() -> None:
    """For ``max_bytes``, a put estimates the item's size while other threads change the item."""

    class Thing:
        pass

    for changed in ([], {}, Thing(), set()):
        channel = Channel[object](across="threads", max_bytes=1 << 40)
        done = threading.Event()

        def change(changed=changed, done=done) -> None:
            number = 0
            while not done.is_set():
                number += 1
                for key in range(number % 40):
                    if isinstance(changed, list):
                        changed.append([key])
                    elif isinstance(changed, dict):
                        changed[key, number] = [key]
                    elif isinstance(changed, set):
                        changed.add((key, number))
                    else:
                        setattr(changed, f"attribute{key}", [number])
                if isinstance(changed, Thing):
                    changed.__dict__.clear()
                else:
                    changed.clear()

        def put(changed=changed, channel=channel, done=done) -> None:
            for _ in range(2000):
                channel.put((changed, [changed]))
                channel.get()
            done.set()

        at_once(put, change)


def test_loans_put_by_many_threads_arrive_intact() -> None:
    channel = Channel[object](2, across="processes")
    got: list[object] = []

    def put(number: int) -> None:
        for _ in range(50):
            loan = channel._loan(20_000, None)
            memoryview(loan)[:] = bytes([number]) * 20_000
            channel.put(memoryview(loan))

    def get() -> None:
        for _ in range(50 * AT_ONCE):
            view = memoryview(channel.get())
            got.append(view[0] if bytes(view) == bytes(view[:1]) * 20_000 else "mixed")

    at_once(get, *[lambda n=n: put(n) for n in range(AT_ONCE)])
    assert Counter(got) == dict.fromkeys(range(AT_ONCE), 50)


def test_graph_on_threads_keeps_order_and_counts() -> None:
    graph = Graph("threads")
    for_squares, for_evens = graph.source(range(3000)).tee(2)
    squares = for_squares.map(lambda number: number * number, workers=4).collect()
    evens = for_evens.filter(lambda number: number % 2 == 0, workers=3).map(str, workers=3).batch(7).collect()
    results = graph.run()
    assert results[squares] == [number * number for number in range(3000)]
    assert [text for batch in results[evens] for text in batch] == [str(n) for n in range(0, 3000, 2)]


def test_running_event_loop_can_be_inspected() -> None:
    """A run's supervisor inspects the loop when it looks for deadlocks."""
    channel, over = Channel[int](), threading.Event()

    def count_items() -> None:
        while not over.is_set():
            only_wait_for([channel])

    async def one(future: asyncio.Future[None]) -> None:
        await asyncio.gather(future, asyncio.sleep(0))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        waiting = [asyncio.create_task(channel.aget()) for _ in range(3)]
        await asyncio.sleep(0)
        checks = threading.Thread(target=count_items)
        checks.start()
        for _ in range(3000):
            asyncio.gather(*waiting).add_done_callback(asyncio.Future.exception)
            waits = asyncio.create_task(asyncio.wait(waiting))
            futures = [loop.create_future() for _ in range(5)]
            tasks = [asyncio.create_task(one(future)) for future in futures]
            await asyncio.sleep(0)
            waits.cancel()
            for future in futures:
                future.set_result(None)
            await asyncio.gather(*tasks)
        over.set()
        channel.put_many(range(3))
        assert sorted(await asyncio.gather(*waiting)) == [0, 1, 2]
        checks.join()

    with asyncio.Runner(loop_factory=StageLoop) as runner:
        runner.run(main())

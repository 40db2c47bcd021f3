"""``run.explain()``: which stage waits on which channel, and on whom that depends. A run in which nobody can ever move
again ends with that explanation; one that only looks like it for a while goes on."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Gate, everywhere, script, start
from waiting import wait_until

from flowchan import Channel, Deadlock, Graph, In, Out, Run, RunError, StageError, _core, select
from flowchan.run import supervisor
from flowchan.run.supervisor import Supervisor


def same(item: Any) -> Any:
    return item


def line_of(run: Run, stage: str) -> str:
    """The line that explains one stage."""
    return next((line for line in run.explain().splitlines() if line.startswith(f"  '{stage}'")), "")


def waits(run: Run, channel: str, readers: int = 0, writers: int = 0) -> None:
    """Returns once exactly so many wait at a channel of the run."""

    def reached() -> bool:
        stats = run._plan.channels[channel].stats()
        return (stats.waiting_readers, stats.waiting_writers) == (readers, writers)

    wait_until(reached, what=run.explain)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often supervisors have looked for a deadlock. They look without a pause here."""
    count = itertools.count()
    seen = [0]
    real = Supervisor._look_for_deadlock

    def look(self: Supervisor) -> None:
        real(self)
        seen[0] = next(count)

    monkeypatch.setattr(Supervisor, "_look_for_deadlock", look)
    monkeypatch.setattr(supervisor, "LOOK", 0.001)
    monkeypatch.setattr(supervisor, "STILL", 0.001)
    return lambda: seen[0]


def goes_on(run: Run, looks: Callable[[], int]) -> bool:
    """Whether the run is still running after its supervisor has looked at it often enough to call it stuck."""
    after = looks() + 10
    wait_until(lambda: looks() > after or run._supervisor.ended.is_set())
    return run.stats().state == "running"


# the text


@everywhere
def test_a_blocked_graph_is_explained(on: Any) -> None:
    gate = Gate()
    graph = Graph("photos")
    resized = graph.source(itertools.count, on=on, name="photos", capacity=3)
    resized = resized.map(same, workers=4, on=on, name="resize", capacity=2, ordered=False)
    resized.sink(lambda _: gate.wait(), on=on, name="upload")
    run = graph.start()
    gate.wait_held()
    lines = [
        r"graph 'photos' \(running for \d+\.\d s\):",
        r"  'photos' waits to put into 'photos' \(3 of 3\) for \d+\.\d s, whose reader 'resize' is busy \d+ %",
        r"  'resize' ×4 waits to put into 'resize' \(2 of 2\) for \d+\.\d s, whose reader 'upload' is busy \d+ %",
        r"  'upload' works on 1 item \(busy \d+ %\)",
    ]
    wait_until(lambda: re.fullmatch("\n".join(lines), run.explain()) is not None, what=run.explain)
    gate.open()
    run.abort()
    run.wait()


def test_a_reader_names_the_writer_that_it_waits_for() -> None:
    gate = Gate()
    graph = Graph("explain")
    held = graph.source(range(3)).map(lambda _: gate.wait(), name="slow")
    held.map(same, workers=2, name="fast").sink(same)
    run = graph.start()
    gate.wait_held()
    waits(run, "slow", readers=2)
    line = line_of(run, "fast")
    assert re.match(r"  'fast' ×2 waits for an item from 'slow' \(0 of 64\) for .* whose writer 'slow' is busy", line)
    gate.open()
    run.wait()


def test_an_open_input_is_named_as_filled_from_outside() -> None:
    graph = Graph("explain")
    graph.input(name="orders").map(same, name="work").sink(same)
    with graph.start() as run:
        waits(run, "orders", readers=1)
        assert line_of(run, "work").endswith("whose writer 'orders' is filled from outside")


def test_stages_that_have_ended_are_left_out() -> None:
    gate = Gate()
    graph = Graph("explain")
    graph.source([1], name="short").sink(lambda _: gate.wait(), name="last")
    run = graph.start()
    gate.wait_held()
    wait_until(lambda: not line_of(run, "short"))
    assert line_of(run, "last").startswith("  'last' works on 1 item")
    gate.open()
    run.wait()
    assert run.explain() == f"graph 'explain' (done for {run.stats().elapsed:.1f} s):"


def test_sigquit_shows_it_while_the_command_runs(tmp_path: Path) -> None:
    text = """
        import itertools, os
        from flowchan import Graph

        def hold(item):
            print("holding", flush=True)
            os.read(os.pipe()[0], 1)

        graph = Graph("asked")
        graph.source(itertools.count, name="numbers", capacity=1).sink(hold, name="holder", on="process")
    """
    with start("-c", "from flowchan.cli import main; main()", "run", script(tmp_path, text)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "holding" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGQUIT)
        found = ""
        while "'holder'" not in found:
            line = process.stderr.readline()
            assert line, found
            found += line
        assert "graph 'asked' (running for" in found
        os.killpg(process.pid, signal.SIGKILL)


# a run that can never move again


def stuck_graph(capacity: int, on: Any = "thread") -> Graph:
    """A tee whose branches come together again: the zip waits for a whole batch, the tee for the other branch."""
    graph = Graph("stuck")
    left, right = graph.source(range(12), on=on).tee(2, name="tee", capacity=capacity)
    left.batch(4, name="fours").zip(right, name="pairs").sink(same, on=on)
    return graph


def deadlock_of(run: Run) -> tuple[StageError, Deadlock]:
    with pytest.raises(RunError) as caught:
        run.wait()
    (error,) = caught.value.exceptions
    cause = error.__cause__
    assert isinstance(cause, Deadlock)
    return error, cause


@everywhere
def test_a_tee_whose_branches_wait_for_each_other_is_recognised(on: Any) -> None:
    error, cause = deadlock_of(stuck_graph(1, on).start())
    text = str(cause)
    assert error.stage == "tee"
    assert "nobody can ever move again" in str(error)
    assert "every worker waits and nothing is in flight" in text
    assert "stream.buffer(n)" in text
    assert "'tee' waits to put into 'tee.1' (1 of 1)" in text
    assert "'pairs' waits for an item from 'fours' (0 of 64)" in text


def test_more_places_make_the_same_graph_run() -> None:
    stuck_graph(12).run()


def test_general_stages_that_wait_for_each_other_are_recognised() -> None:
    def give_left_only(left: Out[int], right: Out[int]) -> None:
        for number in itertools.count():
            left.put(number)

    def ask_right_only(left: In[int], right: In[int], out: Out[int]) -> None:
        for number in right:
            out.put(number)

    graph = Graph("stuck")
    left, right = graph.stage(give_left_only, name="giver")
    graph.stage(ask_right_only, left, right, name="asker").sink(same)
    _, cause = deadlock_of(graph.start())
    assert "'asker' waits for an item from 'giver.right'" in str(cause)


def test_a_result_that_is_waited_for_does_not_hide_a_deadlock() -> None:
    graph = Graph("stuck")
    left, right = graph.source(range(12)).tee(2, capacity=1)
    left.batch(4).zip(right).collect()
    deadlock_of(graph.start())


def test_a_deadlock_while_stopping_is_recognised(looks: Callable[[], int]) -> None:
    gate = Gate()

    def held() -> Iterator[int]:
        yield from range(6)
        gate.wait()

    graph = Graph("stuck")
    left, right = graph.source(held).tee(2, capacity=1)
    left.batch(4).zip(right).sink(same)
    run = graph.start()
    gate.wait_held()
    run.stop()
    gate.open()
    deadlock_of(run)


async def async_same(item: Any) -> Any:
    return item


@pytest.mark.parametrize("where", ["before", "left", "right", "behind"])
def test_a_deadlock_is_recognised_beside_async_stages(where: str) -> None:
    graph = Graph("stuck")
    numbers = graph.source(range(12))
    left, right = (numbers.map(async_same, workers=3) if where == "before" else numbers).tee(2, name="tee", capacity=1)
    fours = (left.map(async_same, name="same") if where == "left" else left).batch(4, name="fours")
    pairs = fours.zip(right.map(async_same, capacity=1, workers=2) if where == "right" else right, name="pairs")
    pairs.sink(async_same if where == "behind" else same)
    _, cause = deadlock_of(graph.start())
    assert "'pairs' waits for an item from 'fours' (0 of 64)" in str(cause)
    assert "raise the capacity of a channel with a blocked writer (`stream.buffer(n)`)" in str(cause)


def test_a_deadlock_of_helping_tasks_is_recognised() -> None:
    """A worker's task waits for two others, and they for the channels."""

    async def both(left: In[int], right: In[int], out: Out[int]) -> None:
        helper = asyncio.create_task(right.aget())
        await asyncio.gather(helper, left.aget())

    def only_left(left: Out[int], right: Out[int]) -> None:
        for number in itertools.count():
            left.put(number)

    graph = Graph("stuck")
    left, right = graph.stage(only_left, name="giver")
    graph.stage(both, left, right, name="asker").sink(same)
    _, cause = deadlock_of(graph.start())
    assert "'asker' waits for an item from 'giver.right'" in str(cause)


def feedback(first: Callable[..., Any]) -> Graph:
    """A loop in which each waits for what the other puts."""

    async def second(numbers: In[int], back: Out[int]) -> None:
        async for number in numbers:
            await back.aput(number)

    graph = Graph("loop")
    back = graph.feedback()
    forward = graph.stage(first, back, name="first")
    back.feed(graph.stage(second, forward, name="second"))
    return graph


def test_when_everybody_waits_to_get_the_remedy_is_to_put() -> None:
    def first(back: In[int], out: Out[int]) -> None:
        for number in back:
            out.put(number)

    _, cause = deadlock_of(feedback(first).start())
    assert "nobody puts: let one stage of the loop put before it gets, or end by returning" in str(cause)
    assert "stream.buffer" not in str(cause)


def test_the_time_that_an_async_stage_waits_is_told() -> None:
    graph = Graph("waiting")
    numbers = graph.input(name="numbers")
    numbers.map(async_same, name="same").sink(same)
    with graph.start() as run:
        waits(run, "numbers", readers=1)
        wait_until(lambda: run.stats().links[0].readers_waiting_for > 0.3)  # the watching thread has looked again
        found = re.search(r"for (\d+\.\d) s", line_of(run, "same"))
        assert found is not None
        assert 0.3 <= float(found[1]) <= run.stats().elapsed


# what only looks like it


def test_a_slow_stage_is_no_deadlock(looks: Callable[[], int]) -> None:
    """Everybody waits but one, which works on its item without moving any count."""
    gate = Gate()
    graph = Graph("slow")
    out = graph.source(range(5), capacity=1).map(lambda _: gate.wait(), capacity=1).map(same)
    result = out.collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    gate.wait_held()
    assert goes_on(run, looks)
    gate.open()
    waiting.join()
    assert run.wait()[result] == [None] * 5


def test_a_worker_that_waits_in_a_channel_of_its_own_is_no_deadlock(looks: Callable[[], int]) -> None:
    """Somebody outside may fill it."""
    mine: Channel[int] = Channel()
    graph = Graph("outside")
    result = graph.source(range(3)).map(lambda item: item + mine.get()).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    wait_until(lambda: mine.stats().waiting_readers == 1)
    assert goes_on(run, looks)
    mine.put_many([10, 20, 30])
    waiting.join()
    assert run.wait()[result] == [10, 21, 32]


def test_a_batch_whose_time_will_be_over_is_no_deadlock(looks: Callable[[], int]) -> None:
    """It goes out as it is then, and everybody moves on."""
    graph = Graph("patient")
    left, right = graph.source(range(2)).tee(2, capacity=1)
    result = left.batch(4, timeout=1).zip(right).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    waits(run, left.name, readers=1)
    waits(run, right.name, writers=1)
    assert goes_on(run, looks)
    waiting.join()
    pairs = run.wait()[result]
    assert [item for batch, _ in pairs for item in batch] == [0, 1][: sum(len(batch) for batch, _ in pairs)]
    assert [number for _, number in pairs] == list(range(len(pairs)))


async def a_timer(items: In[int]) -> list[int]:
    """Looks into its channel from time to time."""
    while True:
        try:
            return [await asyncio.wait_for(items.aget(), 0.2)]
        except TimeoutError:
            if over[0].is_set():
                return []


async def a_sleeping_task(items: In[int]) -> list[int]:
    """Another task of the same loop goes on by itself."""
    waiting = asyncio.create_task(items.aget())

    async def tick() -> None:
        while not over[0].is_set():
            await asyncio.sleep(0.01)
        waiting.cancel()

    await asyncio.gather(tick(), waiting, return_exceptions=True)
    return []


async def a_thread(items: In[int]) -> list[int]:
    """A callback will come from a helping thread."""
    waiting = asyncio.create_task(items.aget())
    helping = asyncio.get_running_loop().run_in_executor(None, over[0].wait)
    helping.add_done_callback(lambda _: waiting.cancel())
    await asyncio.gather(waiting, return_exceptions=True)
    return []


async def a_socket(items: In[int]) -> list[int]:
    """A callback will come when somebody writes."""
    waiting = asyncio.create_task(items.aget())
    here, there = socket.socketpair()
    with here, there:
        threading.Thread(target=lambda: (over[0].wait(), there.send(b"!"))).start()
        asyncio.get_running_loop().add_reader(here, waiting.cancel)
        await asyncio.gather(waiting, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(here)
    return []


async def an_event(items: In[int]) -> list[int]:
    """One of its two tasks waits for what no channel brings."""
    rings = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (over[0].wait(), loop.call_soon_threadsafe(rings.set))).start()
    waiting = asyncio.create_task(items.aget())
    await rings.wait()
    waiting.cancel()
    return []


over: list[threading.Event] = []  # of a test, for the functions above


@pytest.mark.parametrize("works", [a_timer, a_sleeping_task, a_thread, a_socket, an_event])
def test_a_loop_that_has_other_work_is_no_deadlock(works: Any, looks: Callable[[], int]) -> None:
    """Everybody waits for an item, but the async stage may go on by itself."""
    over[:] = [threading.Event()]

    async def first(back: In[int], out: Out[int]) -> None:
        for number in await works(back):
            await out.aput(number)

    run = feedback(first).start()
    waits(run, "first", readers=1)
    wait_until(lambda: run.stats().links[0].waiting_readers + run.stats().links[1].waiting_readers == 2)
    assert goes_on(run, looks)
    over[0].set()
    run.wait()


def test_coroutines_that_wait_in_a_channel_of_their_own_are_no_deadlock(looks: Callable[[], int]) -> None:
    mine: Channel[int] = Channel()

    async def add(item: int) -> int:
        return item + await mine.aget()

    graph = Graph("outside")
    result = graph.source(range(3)).map(add).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    wait_until(lambda: mine.stats().waiting_readers == 1)
    assert goes_on(run, looks)
    mine.put_many([10, 20, 30])
    waiting.join()
    assert run.wait()[result] == [10, 21, 32]


def test_a_stopped_process_is_no_deadlock(looks: Callable[[], int]) -> None:
    """It has been woken and can't look: the others wait for it, and it goes on when it is continued."""
    graph = Graph("stopped")
    numbers = graph.input(capacity=1)
    result = numbers.map(same, on="process", restarts=0).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    waits(run, numbers.name, readers=1)
    ((process,),) = [run._supervisor._processes.values()]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    run[numbers].put(1)
    run[numbers].close()
    assert goes_on(run, looks)
    os.kill(process.pid, signal.SIGCONT)
    waiting.join()
    assert run.wait()[result] == [1]


def test_an_open_input_is_no_deadlock(looks: Callable[[], int]) -> None:
    graph = Graph("open")
    numbers = graph.input()
    total = numbers.map(same, workers=3).reduce(int.__add__, 0)
    with graph.start() as run:
        waits(run, numbers.name, readers=3)
        assert goes_on(run, looks)
        run[numbers].put(5)
    assert run.wait()[total] == 5


def test_results_that_nobody_takes_yet_are_no_deadlock(looks: Callable[[], int]) -> None:
    graph = Graph("later")
    result = graph.source(range(100), capacity=1).map(same, capacity=1).collect()
    run = graph.start()
    waits(run, "source", writers=1)
    assert goes_on(run, looks)
    assert run.wait()[result] == list(range(100))


def test_a_user_who_pauses_between_two_results_is_no_deadlock(looks: Callable[[], int]) -> None:
    graph = Graph("paused")
    result = graph.source(range(100), capacity=1).map(same, capacity=1).collect()
    with graph.start() as run:
        items = run.iter(result)
        assert next(items) == 0
        waits(run, "source", writers=1)
        assert goes_on(run, looks)
        assert list(items) == list(range(1, 100))


def test_a_selecting_stage_is_no_deadlock(looks: Callable[[], int]) -> None:
    """It waits at two channels, one of them its own: the other stages must not be counted twice by that."""
    mine: Channel[int] = Channel()

    def choose(items: In[int], out: Out[int]) -> None:
        out.put(select([items, mine]).item)

    graph = Graph("selecting")

    def silent(out: Out[int]) -> None:
        gate.wait()

    gate = Gate()
    result = graph.stage(choose, graph.stage(silent)).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    wait_until(lambda: mine.stats().waiting_readers == 1)
    gate.wait_held()
    assert goes_on(run, looks)
    mine.put(7)
    gate.open()
    waiting.join()
    assert run.wait()[result] == [7]


def test_a_stage_that_waits_with_several_threads_does_not_stand_for_another(looks: Callable[[], int]) -> None:
    """One worker waits in two ports at once while another one works: two waits, two workers, and no deadlock."""
    gate = Gate()

    def both(left: In[int], right: In[int], out: Out[int]) -> None:
        helper = threading.Thread(target=lambda: out.put_many(right))
        helper.start()
        out.put_many(left)
        helper.join()

    def hold(left: Out[int], right: Out[int]) -> None:
        gate.wait()
        left.put(1)
        right.put(2)

    graph = Graph("threads")
    left, right = graph.stage(hold)
    graph.stage(both, left, right).sink(same)
    run = graph.start()
    waits(run, left.name, readers=1)
    waits(run, right.name, readers=1)
    assert goes_on(run, looks)
    gate.open()
    run.wait()


def test_a_run_that_waits_costs_its_supervisor_one_look_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is: the statistics of all stages are not gathered for that, and nothing else wakes it up."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, counted)

    monkeypatch.setattr(supervisor, "STILL", 0.02)
    monkeypatch.setattr(supervisor, "LOOK", 0.0001)
    graph = Graph("idle")
    numbers = graph.input()
    stream = numbers
    for _ in range(50):
        stream = stream.map(same)
    stream.sink(same)
    with graph.start() as run:
        wait_until(lambda: sum(link.waiting_readers for link in run.stats().links) == 51)
        for owner, name in ((supervisor, "summarise"), (_core, "_look_at"), (run._supervisor, "_cancel_tasks")):
            count(owner, name)
        wait_until(lambda: counts["_look_at"] > 10)
        seen = Counter(counts)
        run[numbers].close()
    assert seen["summarise"] == 0
    assert seen["_cancel_tasks"] <= seen["_look_at"] + 2, "turns of its loop"


def test_a_moving_run_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny channels, everybody waits nearly all the time, and the supervisor never stops looking."""
    monkeypatch.setattr(supervisor, "STILL", 0.0)
    monkeypatch.setattr(supervisor, "LOOK", 0.0001)
    graph = Graph("moving")
    left, right = graph.source(range(300), capacity=1).tee(2, capacity=1)
    result = left.map(same, capacity=1).zip(right.map(same, capacity=1), capacity=1).collect()
    assert graph.run()[result] == [(item, item) for item in range(300)]

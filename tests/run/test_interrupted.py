"""Test R5 (Stop) after Ctrl-C: ``Interrupted`` contains the finished results and the report."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path

import pytest
from runs import script, start
from support.waiting import wait_until

import flowchan
from flowchan import Graph, Interrupted, RunError
from flowchan.transport.interrupts import InterruptWatch

pytestmark = pytest.mark.usefixtures("forked_programs")

SUM = """
    import itertools, os, signal, sys, threading, time
    from flowchan import Graph, Interrupted, Out, RunError

    passed = threading.Event()

    def rest():  # signal.pause would miss a Ctrl-C that comes just before it
        while True:
            time.sleep(0.1)

    def numbers():
        for number in itertools.count():
            if number == ENOUGH:
                passed.set()
            yield number

    def announce():
        passed.wait()
        os.write(1, b"going\\n")  # unlike print(), takes no lock that could block the exit

    def add(total, number):
        return total + number

    graph = Graph("sum")
    stream, listed = graph.source(numbers).map(abs, on="process").tee(2)
    total = stream.reduce(add, 0)
    listed = listed.collect()
    seen = []

    def body_that_waits(run):
        rest()

    def loop_that_waits(run):
        for number in run.iter(listed):
            seen.append(number)

    def loop_that_works(run):
        for number in run.iter(listed):
            seen.append(number)
            if number == 500:
                rest()

    def loop_in_a_function_that_keeps_the_iterator(run):
        global items
        items = run.iter(listed)
        for number in items:
            seen.append(number)
            if number == 500:
                rest()

    def block(body):
        with graph.start() as run:
            body(run)

    if __name__ == "__main__":
        threading.Thread(target=announce, daemon=True).start()
        try:
            WAY
        except Interrupted as interrupted:
            results = interrupted.results
            whole = [*seen, *results[listed]]
            assert whole == list(range(len(whole))) and len(whole) > 20, (len(seen), len(whole))
            assert results[total] == sum(whole), (results[total], sum(whole))
            assert interrupted.report.startswith("graph 'sum': stopped after"), interrupted.report
            assert interrupted.__cause__ is None
            print("results", flush=True)
            raise
"""

VARIANTS = [
    "graph.run()",
    "graph.start().wait()",
    "graph.start().wait(timeout=1000)",
    "block(lambda run: None)",
    "block(lambda run: run.wait())",
    "block(body_that_waits)",
    "block(loop_that_waits)",
    "block(loop_that_works)",
    "block(loop_in_a_function_that_keeps_the_iterator)",
    "loop_that_waits(graph.start())",
    "loop_that_works(graph.start())",
    "loop_in_a_function_that_keeps_the_iterator(graph.start())",
]


def interrupted(
    process: subprocess.Popen[str], signum: signal.Signals = signal.SIGINT
) -> tuple[int, str, str]:
    """Send a signal to a program that is running. Return its exit code and output."""
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n", process.communicate()
    process.send_signal(signum)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("variant", VARIANTS)
def test_stop_signal_returns_the_finished_results(
    variant: str, signum: signal.Signals, tmp_path: Path
) -> None:
    # in the variants with "body", wait for fewer items, because no code reads results during that block
    text = SUM.replace("WAY", variant).replace("ENOUGH", "20" if "body" in variant else "500")
    with start(script(tmp_path, text)) as process:
        code, out, err = interrupted(process, signum)
    assert (code, out) == (-signum, "results\n"), err
    assert err.count("flowchan: stopping") == 1
    key, how = ("Ctrl-C", "interrupted") if signum == signal.SIGINT else ("SIGTERM", "ended by SIGTERM")
    assert f"press {key} again to discard them" in err
    assert f"flowchan.Interrupted: the run of graph 'sum' was {how}" in err


def test_ctrl_c_interrupts_a_waiting_iteration_outside_a_with_block(tmp_path: Path) -> None:
    text = """
        import os, threading
        from flowchan import Graph, Interrupted

        def announce():
            while not run.stats().edges[0].waiting_readers:
                threading.Event().wait(0.001)
            os.write(1, b"going\\n")  # unlike print(), takes no lock that could block the exit

        graph = Graph("loop")
        numbers = graph.input("numbers")
        listed = numbers.collect()
        run = graph.start()
        run[numbers].put_many([1, 2, 3])
        seen = []
        try:
            for number in run.iter(listed):
                seen.append(number)
                if number == 3:
                    threading.Thread(target=announce).start()
        except Interrupted as interrupted:
            print(seen, interrupted.results[listed], interrupted.report.split()[2], flush=True)
    """
    with start(script(tmp_path, text)) as process:
        code, out, err = interrupted(process)
    assert (code, out) == (0, "[1, 2, 3] [] stopped\n"), err


def test_second_ctrl_c_returns_partial_results_and_reports_discarded_items(tmp_path: Path) -> None:
    text = """
        import threading
        from flowchan import Graph, Interrupted

        held = threading.Event()

        def hold(item):
            for thread in threading.enumerate():
                if "/add" in thread.name:
                    thread.join()
            print("going", flush=True)
            held.wait()

        graph = Graph("stubborn")
        total = graph.source([1, 2]).reduce(int.__add__, 0)
        graph.source([1, 2, 3]).sink(hold)
        try:
            graph.WAY
        except Interrupted as interrupted:
            print(interrupted.results[total], interrupted.report.split()[2], flush=True)
    """
    for variant in ("run()", "start().wait()"):
        with start(script(tmp_path, text.replace("WAY", variant))) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "going\n", process.communicate()
            process.send_signal(signal.SIGINT)
            assert "stopping" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == "flowchan: aborted: items in flight were discarded\n"
            out, err = process.communicate()
        assert (process.returncode, out) == (0, "3 aborted\n"), err


def test_failure_during_an_interrupt_is_the_cause_of_interrupted() -> None:
    def fail_when_interrupted(item: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError(item)

    graph = Graph("r5")
    total = graph.source([1, 2]).reduce(int.__add__, 0)
    with pytest.raises(Interrupted) as caught, graph.start() as run:  # noqa: PT012
        wait_until(lambda: not run.stats().stages[-1].alive)
        graph_that_fails = Graph("failing")
        graph_that_fails.source([7]).sink(fail_when_interrupted)
        graph_that_fails.run()
    inner = caught.value.__context__
    assert caught.value.results[total] == 3
    assert isinstance(inner, Interrupted)
    assert isinstance(inner.__cause__, RunError)
    assert isinstance(inner.__cause__.exceptions[0].__cause__, ValueError)


def test_ctrl_c_caught_in_the_with_block_lets_program_continue() -> None:
    graph = Graph("r5")
    numbers = graph.source(iter(int, 1)).collect()
    with graph.start() as run:
        with pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT012
            for _ in run.iter(numbers):
                os.kill(os.getpid(), signal.SIGINT)
        assert caught.type is KeyboardInterrupt
    assert run.stats().state == "done"


def test_ctrl_c_caught_while_iterating_lets_the_program_continue() -> None:
    graph = Graph("r5")
    numbers = graph.source(range(100)).collect()
    run = graph.start()
    seen = []
    for number in run.iter(numbers):
        seen.append(number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert seen == list(range(100))
    run.wait()
    assert run.stats().state == "done"


def test_break_statement_after_ctrl_c_ends_the_run_without_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    graph = Graph("r5")
    numbers = graph.source(iter(int, 1)).collect()
    run = graph.start()
    for _ in run.iter(numbers):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            break
    assert numbers not in run.wait()
    assert run.stats().state == "done"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_nested_iterations_ends_both_runs() -> None:
    graph = Graph("r5")
    numbers = graph.source(itertools.count).collect()
    outer, inner = graph.start(), graph.start()
    with pytest.raises(Interrupted) as caught:  # noqa: PT012
        for _ in outer.iter(numbers):
            for _ in inner.iter(numbers):
                os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.results[numbers] == outer.wait()[numbers]
    assert [run.stats().state for run in (outer, inner)] == ["stopped", "stopped"]


def test_ctrl_c_handler_is_restored_after_an_iteration() -> None:
    before = signal.getsignal(signal.SIGINT)
    graph = Graph("r5")
    numbers = graph.source(range(3)).collect()
    run = graph.start()
    assert list(run.iter(numbers)) == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is before
    run.wait()


def test_ctrl_c_handler_is_restored_after_many_overlapping_iterations() -> None:
    """Iterations overlap in a ``zip`` of two datasets: each dataset starts an epoch during the other's
    epoch."""
    before = signal.getsignal(signal.SIGINT)
    one, other = InterruptWatch(lambda _: None), InterruptWatch(lambda _: None)
    one.open()
    for _ in range(1000):
        other.open()
        one.close()
        one, other = other, InterruptWatch(lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    one.close()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("variant", ["loop", "wait"])
def test_ctrl_c_in_an_event_loop_finishes_items_in_flight(variant: str, tmp_path: Path) -> None:
    text = """
        import asyncio, itertools
        from flowchan import Graph

        graph = Graph("later")
        listed = graph.source(itertools.count).map(abs, on="process").collect()
        seen = []

        async def wait(run):
            print("going", flush=True)
            await asyncio.Event().wait()

        async def loop(run):
            async for number in run.aiter(listed):
                seen.append(number)
                if number == 500:
                    await wait(run)

        async def main():
            global run
            with graph.start() as run:
                await WAY(run)

        if __name__ == "__main__":
            try:
                asyncio.run(main())
            except KeyboardInterrupt:
                whole = [*seen, *run.wait()[listed]]
                print(run.state, whole == list(range(len(whole))), flush=True)
    """
    with start(script(tmp_path, text.replace("WAY", variant))) as process:
        code, out, err = interrupted(process)
    assert (code, out) == (0, "stopped True\n"), err
    assert err.count("flowchan: stopping") == 1


def test_break_statement_without_ctrl_c_stops_earlier_stages() -> None:
    before = signal.getsignal(signal.SIGINT)
    graph = Graph("r5")
    numbers = graph.source(iter(int, 1)).collect()
    with graph.start() as run:
        for _ in run.iter(numbers):
            break
        assert numbers not in run.wait()
    assert signal.getsignal(signal.SIGINT) is before


def test_results_of_an_interrupted_run_can_be_read_again() -> None:
    graph = Graph("r5")
    numbers = graph.source(iter(int, 1)).collect()
    with pytest.raises(Interrupted) as caught, graph.start() as run:  # noqa: PT012
        for _ in run.iter(numbers):
            os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.results[numbers] == run.wait()[numbers]
    assert run.stats().state == "stopped"


def test_interrupted_is_a_keyboard_interrupt_and_not_an_exception() -> None:
    assert issubclass(flowchan.Interrupted, KeyboardInterrupt)
    assert not issubclass(flowchan.Interrupted, Exception)

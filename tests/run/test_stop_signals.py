"""Test R5 (Stop) with Ctrl-C and SIGTERM.

The first signal stops the sources, and all items in flight are finished. The second signal aborts the run at
once. An interrupted program prints one line.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from runs import everywhere, script, start

from flowchan import Graph

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAM = """
    import itertools, os, sys, threading
    from flowchan import Graph

    ready = threading.Event()
    seen = []

    def numbers():
        for number in itertools.count():
            if number == 100:
                ready.set()
            yield number

    def same(item):
        return item

    def save(item):
        seen.append(item)

    def announce():
        ready.wait()
        os.write(1, b"going\\n")  # unlike print(), takes no lock that could block the exit

    graph = Graph("endless")
    graph.source(numbers).map(same, on="process", workers=2).sink(save)

    if __name__ == "__main__":
        threading.Thread(target=announce, daemon=True).start()
        try:
            graph.run()
        except KeyboardInterrupt:
            assert seen == list(range(len(seen))), "something in flight was lost"
            print("interrupted after", "some" if len(seen) > 99 else "few", flush=True)
            raise
"""

STUBBORN = """
    import itertools, sys, threading
    from flowchan import Channel, Graph

    held = threading.Event()

    def hold(item):
        print("going", flush=True)
        held.wait()

    graph = Graph("stubborn")
    graph.source(itertools.count).sink(hold)

    if __name__ == "__main__":
        graph.run()
"""

BLOCKED_SOURCE = """
    import os
    from flowchan import Graph

    def camera():
        yield 1
        print("going", flush=True)
        os.read(os.pipe()[0], 1)

    graph = Graph("blocked")
    graph.source(camera, on="PLACE").sink(id)

    if __name__ == "__main__":
        graph.run()
"""


def going(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n", process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_first_stop_signal_finishes_items_in_flight(signum: signal.Signals, tmp_path: Path) -> None:
    with start(script(tmp_path, PROGRAM)) as process:
        going(process)
        process.send_signal(signum)
        code, out, err = ended(process)
    assert out == "interrupted after some\n", err
    assert code == -signum, err  # as if the program did not handle the signal
    assert err.count("flowchan: stopping: finishing the items in flight") == 1


def test_ctrl_c_at_a_terminal_does_not_kill_the_workers(tmp_path: Path) -> None:
    with start(script(tmp_path, PROGRAM)) as process:
        going(process)
        os.killpg(process.pid, signal.SIGINT)
        _, out, err = ended(process)
    assert out == "interrupted after some\n", err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_second_stop_signal_aborts_the_run(signum: signal.Signals, tmp_path: Path) -> None:
    with start(script(tmp_path, STUBBORN)) as process:
        going(process)
        process.send_signal(signum)
        assert process.stderr is not None
        assert "stopping" in process.stderr.readline()
        process.send_signal(signum)
        code, _, err = ended(process)
    assert code == -signum, err
    assert "flowchan.Interrupted" in err


@everywhere
def test_signal_ends_a_program_with_a_blocked_source(on: str, tmp_path: Path) -> None:
    with start(script(tmp_path, BLOCKED_SOURCE.replace("PLACE", on))) as process:
        going(process)
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
    assert code == -signal.SIGINT, err


def test_ctrl_c_after_a_with_block_finishes_items_in_flight(tmp_path: Path) -> None:
    text = """
        import itertools, os, threading
        from flowchan import Graph

        seen, enough = [], threading.Event()

        def save(number):
            seen.append(number)
            if number == 100:
                enough.set()

        def announce(channel):
            while not channel.stats().waiting_readers:  # until the main thread waits at the end of its block
                threading.Event().wait(0.001)
            os.write(1, b"going\\n")  # unlike print(), takes no lock that could block the exit

        graph = Graph("block")
        graph.source(itertools.count, name="numbers").map(abs, on="process").sink(save)
        if __name__ == "__main__":
            try:
                with graph.start() as run:
                    enough.wait()
                    threading.Thread(target=announce, args=[run._supervisor.ended._channel]).start()
            finally:
                print(len(seen) == run.stats().stages[0].items_out)
    """
    with start(script(tmp_path, text)) as process:
        going(process)
        process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
    assert (code, out) == (-signal.SIGINT, "True\n"), err
    assert err.count("flowchan: stopping") == 1


@pytest.mark.parametrize("variant", ["run()", "start().wait()"])
def test_second_ctrl_c_during_the_start_aborts_the_run(variant: str, tmp_path: Path) -> None:
    text = """
        import itertools, os, signal
        from flowchan import Graph, Interrupted
        from flowchan.run.crew.local_part import LocalPart

        usual = LocalPart.start_threads

        def start_threads(self):
            usual(self)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

        LocalPart.start_threads = start_threads
        graph = Graph("start")
        graph.source(itertools.count).map(abs, capacity=1).sink(abs)
        try:
            graph.WAY
        except Interrupted as interrupted:
            print(interrupted.report.split()[2], flush=True)
    """
    with start(script(tmp_path, text.replace("WAY", variant))) as process:
        code, out, err = ended(process)
    assert (code, out) == (0, "aborted\n"), err
    assert err == "flowchan: aborted: items in flight were discarded\n"


def test_ctrl_c_during_the_start_stops_the_run(tmp_path: Path) -> None:
    text = """
        import itertools, os, signal, threading
        from flowchan import Graph
        from flowchan.run.crew.local_part import LocalPart

        held, seen_by_us = threading.Event(), threading.Event()

        def camera():
            yield 1
            seen_by_us.set()
            held.wait()

        usual = LocalPart.start_thread

        def start_thread(self, id):
            usual(self, id)
            if id.stage == "camera":  # only once: a second Ctrl-C during the start aborts the run
                seen_by_us.wait()
                os.kill(os.getpid(), signal.SIGINT)

        LocalPart.start_thread = start_thread
        seen = []
        graph = Graph("start")
        graph.source(camera).sink(seen.append)
        try:
            graph.WAY()
        finally:
            print(seen, flush=True)
    """
    for variant, seen in (("run", "[1]"), ("start", None)):
        with start(script(tmp_path, text.replace("WAY", variant))) as process:
            code, out, err = ended(process)
        assert code == -signal.SIGINT, err
        assert seen is None or out == f"{seen}\n", err


def test_ctrl_c_while_iterating_in_with_block_stops_the_run(tmp_path: Path) -> None:
    text = """
        import itertools
        from flowchan import Graph

        graph = Graph("block")
        numbers = graph.source(itertools.count).collect()

        with graph.start() as run:
            for number in run.iter(numbers):
                if number == 10:
                    print("going", flush=True)
                seen = number  # otherwise, Python from 3.12 on may leave the block before it ends
    """
    with start(script(tmp_path, text)) as process:
        going(process)
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
    assert code == -signal.SIGINT, err
    assert err.count("flowchan: stopping") == 1


def test_program_keeps_its_own_sigterm_handler(tmp_path: Path) -> None:
    text = """
        import os, signal
        from flowchan import Graph

        signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
        graph = Graph("own")
        graph.source([1]).sink(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        graph.run()
    """
    with start(script(tmp_path, text)) as process:
        code, out, err = ended(process)
    assert (code, out) == (0, "mine\n"), err


def test_sigterm_handler_is_restored_after_the_run() -> None:
    graph = Graph("r5")
    graph.source([1]).sink(id)
    before = signal.getsignal(signal.SIGTERM)
    graph.run()
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_handler_is_restored_after_calls_of_started_run() -> None:
    graph = Graph("r5")
    listed = graph.source([1]).collect()
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL
    run = graph.start()
    assert signal.getsignal(signal.SIGTERM) is before
    assert run.ready(60)
    assert list(run.iter(listed)) == [1]
    run.wait()
    assert signal.getsignal(signal.SIGTERM) is before
    with graph.start() as run:
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_handler_set_in_the_block_stays() -> None:
    graph = Graph("r5")
    graph.source([1]).sink(id)

    def own(*_: object) -> None: ...

    try:
        with graph.start():
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_sigterm_kills_a_process_that_the_block_forks() -> None:
    graph = Graph("r5")
    graph.source([1]).sink(id)
    with graph.start():
        child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
        child.start()
        child.terminate()
        child.join()
    assert child.exitcode == -signal.SIGTERM


def test_second_sigterm_aborts_a_started_run(tmp_path: Path) -> None:
    with start(script(tmp_path, STUBBORN.replace("graph.run()", "graph.start().wait()"))) as process:
        going(process)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "stopping" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
    assert code == -signal.SIGTERM, err
    assert "aborted: items in flight were discarded" in err


def test_sigterm_ends_an_event_loop_as_before(tmp_path: Path) -> None:
    """If the signal handler raised in the middle of the event loop, the run could not be drained."""
    text = """
        import asyncio, os, signal
        from flowchan import Graph

        async def main():
            graph = Graph("loop")
            graph.input().sink(id)
            with graph.start():
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(1000)

        asyncio.run(main())
    """
    with start(script(tmp_path, text)) as process:
        code, out, err = ended(process)
    assert (code, out, err) == (-signal.SIGTERM, "", "")

"""Test all ways for a program with a run to exit (R5, R6, R7).

Each program exits under each start method, as a script and as ``python -c``. Afterwards, no process or
temporary file may be left, and Python's resource tracker must report nothing. There must be one readable
error and the right exit code.

All combinations of exits, start methods and kinds of program would take minutes. Each exit is therefore
tested with each start method, and the kind of program alternates, so that each pair of the three occurs.
``test_residue.py`` tests exits inside pytest itself. ``test_start_methods.py`` tests the objects that are
sent to the workers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import script, start
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAM = """
    import ctypes, itertools, multiprocessing, os, signal, sys
    from flowchan import Channel, Graph

    ENDING = sys.argv[1]
    reached = Channel(across="processes")

    def numbers():
        for number in range(40) if ENDING == "normal" else itertools.count():
            if number == 20 and ENDING == "source":
                raise LookupError("bad source")
            yield number

    def work(number):
        if number == 20:
            if ENDING == "map":
                raise LookupError("bad item")
            if ENDING == "worker killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if ENDING == "os._exit":
                os._exit(7)
            if ENDING == "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if ENDING in ("stubborn", "interrupted twice"):
                reached.put("stuck")
                while True:
                    os.read(os.pipe()[0], 1)
            if ENDING == "in C":
                reached.put("stuck")
                ctypes.PyDLL(None).sleep(1_000_000)  # with the GIL held
        return number

    def save(number):
        if number == 10:
            reached.put("going")
        if number == 20 and ENDING == "sink":
            raise LookupError("bad sink")

    def main():
        graph = Graph("ways")
        stream = graph.source(numbers).map(work, on="process", workers=2, max_deaths=3)
        if ENDING == "generator":
            result = stream.collect()
            with graph.start() as run:
                for number in run.iter(result):
                    if number == 5:
                        break
            print("left")
            return
        stream.sink(save)
        if ENDING == "body":
            with graph.start() as run:
                reached.get()
                raise KeyError("mine")
        if ENDING == "exit":
            run = graph.start()
            reached.get()
            return
        if ENDING in ("stubborn", "in C"):
            run = graph.start()
            while reached.get() != "stuck":
                pass
            run.abort()
            run.wait()
            return
        announcer.start()
        graph.run()
        announcer.join()  # a program that ends while a thread prints is aborted by Python
        print("done")

    def announce():
        word = "stuck" if ENDING == "interrupted twice" else "going"
        while reached.get() != word:
            pass
        print(word, flush=True)

    if __name__ == "__main__":
        import threading
        announcer = threading.Thread(target=announce, daemon=True)
        multiprocessing.set_start_method(sys.argv[2])
        main()
"""


@dataclass(frozen=True)
class Ending:
    """Way in which a program exits: the signals that it receives, its exit code, and its messages."""

    code: int
    says: str = ""
    out: str = ""
    signals: tuple[signal.Signals, ...] = ()


FAILED = r"RunError: graph 'ways' failed \(1 sub-exception\)"
STOPPING = "flowchan: stopping: finishing the items in flight"
INT, TERM = signal.SIGINT, signal.SIGTERM
ENDINGS = {
    "normal": Ending(0, out="done"),
    "source": Ending(1, FAILED + r"(?s:.*)LookupError: bad source"),
    "map": Ending(1, FAILED + r"(?s:.*)LookupError: bad item"),
    "sink": Ending(1, FAILED + r"(?s:.*)LookupError: bad sink"),
    "interrupted": Ending(-INT, STOPPING, signals=(INT,)),
    "interrupted twice": Ending(-INT, STOPPING, signals=(INT, INT)),
    "terminated": Ending(-TERM, STOPPING, signals=(TERM,)),
    "killed": Ending(-signal.SIGKILL, signals=(signal.SIGKILL,)),
    "worker killed": Ending(1, FAILED + r"(?s:.*)3 workers died .*: each was killed by SIGKILL"),
    "os._exit": Ending(1, FAILED + r"(?s:.*)3 workers died .*: each exited with code 7 without finishing"),
    "body": Ending(1, "KeyError: 'mine'"),
    "generator": Ending(0, out="left"),
    "exit": Ending(0),
    "stubborn": Ending(0),
    "in C": Ending(0),
}
GOING = ("going", "stuck")
METHODS = ("fork", "forkserver", "spawn")


def cases() -> Iterator[Any]:
    for place, ending in enumerate(ENDINGS):
        for number, method in enumerate(METHODS):
            kind = ("script", "-c")[(place + number) % 2]
            yield pytest.param(ending, method, kind, id=f"{ending}-{method}-{kind}".replace(" ", "_"))


def members(session: int) -> list[psutil.Process]:
    """Return the live processes of the session that the process ``session`` leads."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a short temporary folder for the program, because the path of a socket is limited to 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def run_to_its_end(command: list[Any], ending: Ending) -> tuple[subprocess.Popen[str], str, str]:
    """Run a program, send its signals, and return the program with its output."""
    with start(*command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        message = ""
        if ending.signals:
            assert process.stdout.readline().strip() in GOING, process.communicate()
        for number, signum in enumerate(ending.signals):
            if number:
                message = process.stderr.readline()
            process.send_signal(signum)
        out, err = process.communicate()
        return process, out, message + err


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "method", "kind"), list(cases()))
def test_every_kind_of_exit_leaves_no_resources_behind(
    name: str, method: str, kind: str, tmp_path: Path, temporary: Path
) -> None:
    ending = ENDINGS[name]
    command = [script(tmp_path, PROGRAM)] if kind == "script" else ["-c", textwrap.dedent(PROGRAM)]
    process, out, err = run_to_its_end([*command, name, method], ending)
    assert process.returncode == ending.code, err
    assert [line for line in out.split() if line not in GOING] == ending.out.split(), err
    if ending.says:
        assert len(re.findall(ending.says, err)) == 1, err
    else:
        assert err == ""
    for unwanted in (
        "resource_tracker",
        "leaked",
        "Exception ignored",
        "Fatal Python error",
        "WorkerDied: WorkerDied",
    ):
        assert unwanted not in err
    wait_until(lambda: not members(process.pid), 20, what=lambda: members(process.pid))
    if name != "killed":  # a killed program cannot remove Python's own socket
        assert os.listdir(temporary) == []


FORKSERVER = """
    import errno, multiprocessing, os, signal, sys
    from multiprocessing import forkserver
    from flowchan import Channel, Graph, RunError

    reached, go_on = Channel(across="processes"), Channel(across="processes")

    def work(number):
        if number == 3:
            reached.put(os.getpid())
            list(go_on)
        return number

    def refuse(pid, flags=0):
        raise OSError(errno.EPERM, "refused")

    if __name__ == "__main__":
        then, restarts = sys.argv[1], int(sys.argv[2])
        if then == "pidfds are refused":
            os.pidfd_open = refuse
        multiprocessing.set_start_method("forkserver")
        graph = Graph("orphaned")
        numbers = graph.source(range(2_000))
        stream = numbers.map(work, on="process", workers=2, restarts=restarts, name="work")
        result = stream.collect()
        run = graph.start()
        worker = reached.get()
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        if then == "killed":
            os.kill(worker, signal.SIGKILL)
        try:
            if then != "alone" and restarts:
                assert reached.get() != worker  # another one has taken up what it had in hand
            if restarts:
                go_on.close()
            print(run.wait()[result] == list(range(2_000)), run.stats().stages[1].restarts)
        except RunError as failed:
            print(failed.exceptions[0])
"""


def test_workers_continue_after_the_forkserver_is_killed(tmp_path: Path) -> None:
    """Python then reports that all its children have exited, although they are alive."""
    with start(script(tmp_path, FORKSERVER), "alone", "5") as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (0, "True 0\n"), err
    wait_until(lambda: not members(process.pid), 20, what=lambda: members(process.pid))


@pytest.mark.parametrize("then", ["killed", "pidfds are refused"])
@pytest.mark.parametrize("restarts", [0, 5])
def test_worker_that_dies_after_its_forkserver_is_replaced_or_reported(
    then: str, restarts: int, tmp_path: Path
) -> None:
    """Each item must still have its outputs exactly once.

    If the system refuses pidfds, the state of such workers is unknown, so all of them are killed.
    """
    with start(script(tmp_path, FORKSERVER), then, str(restarts)) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    replaced = 1 if then == "killed" else 2
    assert "forkserver was killed" in out if restarts == 0 else out == f"True {replaced}\n", err
    wait_until(lambda: not members(process.pid), 20, what=lambda: members(process.pid))


# --- notebook ---

CELLS = (
    """
    import itertools
    from flowchan import Graph, Run, RunError

    OFFSET = 100

    class Point:
        def __init__(self, x):
            self.x = x

    def move(x):
        return Point(x + OFFSET)
    """,
    """
    graph = Graph("cell")
    moved = graph.source(range(5)).map(move, on="process", workers=2).collect()
    points = graph.run()[moved]
    assert all(type(point) is Point for point in points)
    print([point.x for point in points])
    """,
    """
    graph = Graph("failing")
    graph.source(range(5)).map(lambda x: 1 // (x - 3), on="process").sink(print)
    try:
        graph.run()
    except RunError as failed:
        print(type(failed.exceptions[0].__cause__).__name__, failed.exceptions[0].item)
    """,
    """
    graph = Graph("interrupted")
    graph.source(itertools.count).map(move, on="process").sink(id)
    run = graph.start()
    print(*[process.pid for process in run._crew.local.processes.values()])
    """,
    """
    import _thread, sys, threading, traceback

    def press():  # the button that stops a cell
        while not any(frame.f_code is Run.wait.__code__ for frame, _ in traceback.walk_stack(cell())):
            pass
        _thread.interrupt_main()

    def cell():
        return sys._current_frames()[threading.main_thread().ident]

    threading.Thread(target=press).start()
    try:
        run.wait()
    except KeyboardInterrupt as interrupted:
        print(type(interrupted).__name__, run.stats().state)
    """,
)


NOTEBOOK = """
    import json, sys
    import nbclient, nbformat

    cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(open(sys.argv[1]))]
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=60, kernel_name="python3")
    done = client.execute()
    print(json.dumps(["".join(output.get("text", "") for output in cell.outputs) for cell in done.cells]))
"""


def test_graph_with_notebook_functions_leaves_no_processes_behind(tmp_path: Path) -> None:
    """The cells run in a real kernel. The cells define functions and classes, fail, and are interrupted."""
    for needed in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install {needed}")
    cells = json.dumps([textwrap.dedent(cell) for cell in CELLS])
    (tmp_path / "cells.json").write_text(cells)
    program = script(tmp_path, NOTEBOOK)
    with start(program, tmp_path / "cells.json") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    message = json.loads(out)
    assert message[1] == "[100, 101, 102, 103, 104]\n"
    assert message[2].splitlines()[-1] == "ZeroDivisionError 3"
    assert "Interrupted stopped" in message[4].splitlines()
    workers = [int(word) for word in message[3].split()]
    assert workers
    wait_until(lambda: not any(psutil.pid_exists(worker) for worker in workers), 20)
    wait_until(lambda: not members(process.pid), 20, what=lambda: members(process.pid))

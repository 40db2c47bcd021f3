"""Test runs whose workers come from Python's forkserver."""

from __future__ import annotations

import os
import threading
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from runs import run_python, script

from flowchan.run.crew import process_start


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("pass", "True False"),
        ("import numpy", "True True"),
        ("import numpy; multiprocessing.set_forkserver_preload(['json'])", "False False"),
    ],
)
def test_forkserver_preloads_modules_unless_the_program_chooses_them(
    before: str, found: str, tmp_path: Path
) -> None:
    """The forkserver preloads flowchan's native module, and NumPy's if the program has imported NumPy."""
    text = f"""
        import multiprocessing, os
        from pathlib import Path
        from flowchan import Graph

        def is_in_server(name):
            return name in Path(f"/proc/{{os.getppid()}}/maps").read_text()

        if __name__ == "__main__":
            {before}
            multiprocessing.set_start_method("forkserver")
            graph = Graph("imports")
            result = graph.source(["/_core.", "/numpy/"]).map(is_in_server, on="process").collect()
            print(*graph.run()[result])
    """
    assert run_python(script(tmp_path, text)) == f"{found}\n"


def test_only_one_thread_at_a_time_disconnects_from_parents_forkserver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads at once could close the forkserver's descriptor twice.

    The second close could hit another file with the same number.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    reader, writer = os.pipe()
    for name, value in {"pid": os.getppid(), "alive_fd": writer, "address": ""}.items():
        monkeypatch.setattr(server, f"_forkserver_{name}", value)
    others_may_come: list[bool] = []

    def check(*_: object) -> None:
        other = threading.Thread(target=lambda: others_may_come.append(server._lock.acquire(blocking=False)))
        other.start()
        other.join()
        raise ChildProcessError

    monkeypatch.setattr(os, "waitid", check)
    process_start._leave_the_parents_server()
    monkeypatch.undo()
    assert others_may_come == [False]
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_forked_child_of_the_program_has_its_own_forkserver(tmp_path: Path) -> None:
    """A child that used its parent's forkserver could not start any process."""
    program = """
        import multiprocessing, os
        from flowchan import Graph

        def total():
            graph = Graph("sum")
            added = graph.source(range(5)).map(abs, on="process").reduce(int.__add__, 0)
            return graph.run()[added]

        if __name__ == "__main__":
            multiprocessing.set_start_method("forkserver")
            assert total() == 10
            if (child := os.fork()) == 0:
                os._exit(total())
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
            assert total() == 10
    """
    run_python(script(tmp_path, program))


def test_forkserver_that_is_killed_while_a_worker_starts_is_named(tmp_path: Path) -> None:
    text = """
        import contextlib, multiprocessing, os, signal, sys, threading
        from multiprocessing import forkserver
        from flowchan import Graph

        def starts(frame):
            while frame is not None and frame.f_code.co_name != "read_signed":
                frame = frame.f_back
            return frame is not None

        def kill_it(server, starter):
            while not starts(sys._current_frames()[starter]):
                pass
            os.kill(server, signal.SIGKILL)

        if __name__ == "__main__":
            multiprocessing.set_start_method("forkserver")
            forkserver.ensure_running()
            server = forkserver._forkserver._forkserver_pid
            os.kill(server, signal.SIGSTOP)
            threading.Thread(target=kill_it, args=(server, threading.get_ident())).start()
            graph = Graph("killed")
            graph.source([1]).map(abs, on="process", name="work").collect()
            with graph.pool() if POOL else contextlib.nullcontext(graph) as runs:
                try:
                    runs.run()
                except OSError as error:
                    print(error)
    """
    for pool in (False, True):
        assert run_python(script(tmp_path, text.replace("POOL", str(pool)))) == (
            "stage 'work': a worker process could not be started with the start method 'forkserver', because "
            "Python's forkserver was killed by SIGKILL\n"
        )

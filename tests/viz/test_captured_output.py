"""Test output from any process while bars or a table are on the terminal, no matter how the drawing ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.scripts import script
from support.terminals import on_terminal

from flowchan.viz.live.terminal import Captured

PRINTED = """
    import subprocess, threading
    from flowchan.viz.live.terminal import Captured

    def show(line):
        if line == "wrong":
            raise OSError("the terminal has gone")
        seen.append(line)
        if line == "on":
            began.set()

    seen, began = [], threading.Event()
    with Captured(show) as captured:
        captured.start()
        print("wrong")
        print("right")
        captured.terminal.write("\\u25b6\\n")
        prints_on = subprocess.Popen("while echo on; do sleep 0.01; done 2>/dev/null", shell=True)
        began.wait()
    prints_on.wait()
    print("seen", "right" in seen)
"""


def test_capture_ends_even_if_showing_output_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LC_ALL", "C"), ("PYTHONCOERCECLOCALE", "0"), ("PYTHONUTF8", "0")):
        monkeypatch.setenv(name, value)
    lines, code = on_terminal([sys.executable, str(script(tmp_path, PRINTED))], tmp_path)
    assert code == 0, lines
    assert {"\\u25b6", "seen True"} <= set(lines)


ENDS = """
    import io, os, signal, sys, threading
    from rich.live import Live
    from flowchan import Graph
    from flowchan.viz.live import watching
    from flowchan.viz.live.terminal import LiveView

    class Stdout(io.StringIO):
        pid = 0

        def flush(self):
            if self.pid:
                os.kill(self.pid, signal.SIGINT)

    def state():
        return os.ttyname(1), os.ttyname(2), len(os.listdir("/proc/self/fd")), threading.active_count()

    def fails(*args, **options):
        raise ValueError("no")

    def fails_at_the_second_call(source, fd):
        called.append(fd)
        return fails() if called == [1, 2] else real(source, fd)

    def with_patch(view, owner, name, value):
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            with view():
                sys.stdout.pid = os.getpid() if name == "stdout" else 0
        except (ValueError, KeyboardInterrupt):
            pass
        finally:
            setattr(owner, name, before)
        assert state() == at_first, (state(), name, value)

    if __name__ == "__main__":
        with LiveView():
            pass  # by now, everything that is needed has been imported
        with watching(Graph("first")):
            pass  # the forkserver runs now, where it is the default
        sys.stdout = Stdout()
        at_first, real = state(), os.dup2
        for view in (LiveView, lambda: watching(Graph("watched"))):
            called = []
            with_patch(view, Live, "start", fails)
            with_patch(view, Live, "stop", fails)
            with_patch(view, os, "dup2", fails_at_the_second_call)
            with_patch(view, sys, "stdout", Stdout())
        one, other = watching(Graph("one")), watching(Graph("other"))
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        other.__exit__(None, None, None)
        assert state() == at_first, state()
        sys.stdout = sys.__stdout__
        print("all as at first")
"""


def test_output_streams_are_restored_however_drawing_ends(tmp_path: Path) -> None:
    """A drawing fails at its start or end, is interrupted by Ctrl-C, or overlaps with another drawing."""
    lines, code = on_terminal([sys.executable, str(script(tmp_path, ENDS))], tmp_path)
    assert (code, lines[-2:]) == (0, ["all as at first", ""]), lines


LATE = """
    import contextlib, sys, threading
    from rich.live import Live
    from flowchan.viz.live.terminal import Captured, draw_on

    came, ending = threading.Event(), threading.Event()
    process, stop, end_reader = Live.process_renderables, Live.stop, Captured._end_reader

    def drawn(live, renderables):
        made = process(live, renderables)
        if threading.current_thread() is not threading.main_thread():
            came.set()
            ending.wait()
        return made

    def stopped(live):
        stop(live)
        ending.set()

    def reader_ended(captured):
        ending.set()
        end_reader(captured)

    Live.process_renderables, Live.stop, Captured._end_reader = drawn, stopped, reader_ended
    with contextlib.ExitStack() as ends:
        bars, lock = draw_on(sys.stderr, True, ends)
        with lock:
            bars.update("bar", refresh=True)
        print("said last")
        came.wait()
    print("alone")
"""


def test_output_at_the_end_does_not_redraw_bars(tmp_path: Path) -> None:
    """Bars that are drawn again would appear in the next line that the program writes."""
    lines, code = on_terminal([sys.executable, str(script(tmp_path, LATE))], tmp_path)
    assert code == 0, lines
    assert {"said last", "alone"} <= set(lines), lines


AT_A_TIME = """
    import contextlib, sys, threading
    from rich.live import Live
    from flowchan.viz.live.terminal import draw_on

    drawing, process = [], Live.process_renderables

    def drawn(live, renderables):
        drawing.append(threading.current_thread().name)
        held.append(lock._is_owned())
        return process(live, renderables)

    with contextlib.ExitStack() as ends:
        bars, lock = draw_on(sys.stderr, True, ends)
        held = []
        Live.process_renderables = drawn
        print("said")
    Live.process_renderables = process
    print("flowchan terminal" in drawing, held[0])
"""


def test_output_is_drawn_while_holding_the_lock(tmp_path: Path) -> None:
    lines, code = on_terminal([sys.executable, str(script(tmp_path, AT_A_TIME))], tmp_path)
    assert code == 0, lines
    assert "True True" in lines, lines


def test_line_overwritten_by_carriage_returns_shows_its_last_state() -> None:
    shown: list[str] = []
    captured, text = Captured(shown.append), b""
    for percent in range(100):
        text = captured._pass_on(text + b"\r%d %%" % percent)
        assert len(text) < 10
    text = captured._pass_on(text + b"\r")
    assert captured._pass_on(text + b"\nnext") == b"next"
    assert shown == ["99 %"]


POOL = """
    import multiprocessing, sys
    from flowchan import Graph

    def log_item(number):
        print("x" * 2000)
        return number

    if __name__ == "__main__":
        multiprocessing.set_start_method(sys.argv[1])
        graph = Graph("pool")
        found = graph.source(range(100)).map(log_item, on="process").collect()
        with graph.pool() as pool:
            pool.run(progress=True)
            print("printed", len(pool.run()[found]))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pool_workers_can_print_after_progress_has_ended(method: str, tmp_path: Path) -> None:
    lines, code = on_terminal([sys.executable, str(script(tmp_path, POOL)), method], tmp_path)
    assert code == 0, lines
    assert "printed 100" in lines

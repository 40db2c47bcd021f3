"""Test ``run.stacks`` if a process does not answer the signal, or if the program uses the signal itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Gate, last_calls

from flowchan import Graph
from flowchan.run.crew import process_stacks
from flowchan.run.worker import stack_file


@pytest.fixture
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stacks, "ANSWER_WITHIN_S", 0.1)


def stack_of(prepare: Callable[[], object]) -> str:
    """Return the stack of a worker that has called ``prepare`` and now waits at a gate."""
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
    """Install a program named ``py-spy`` in ``folder``, and make that the only folder in ``PATH``."""
    monkeypatch.setenv("PATH", str(folder))
    (folder / "py-spy").write_text(f"#!{sys.executable}\n{text}")
    (folder / "py-spy").chmod(0o755)


def ignore() -> None:
    signal.signal(stack_file.SIGNAL, signal.SIG_IGN)


@pytest.mark.usefixtures("_quickly")
def test_process_that_ignores_signal_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    text = stack_of(ignore)
    assert text.startswith("no stack of pid ")
    assert text.endswith(
        ": it did not answer; it may be suspended or may ignore the signal; py-spy is not installed\n"
    )


@pytest.mark.usefixtures("_quickly")
def test_py_spy_reads_stack_of_unresponsive_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "import sys\nprint(sys.argv[1:])", monkeypatch)
    text = stack_of(ignore)
    assert text.startswith("['dump', '--pid', '")


@pytest.mark.usefixtures("_quickly")
def test_stacks_report_failure_of_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "import sys\nsys.exit('Permission denied')", monkeypatch)
    assert stack_of(ignore).endswith("; py-spy failed: Permission denied\n")


@pytest.mark.usefixtures("_quickly")
def test_stacks_report_py_spy_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_stacks, "PY_SPY_WITHIN_S", 0.1)
    program(tmp_path, "import time\ntime.sleep(600)", monkeypatch)
    assert "; py-spy failed: Command " in stack_of(ignore)


def test_process_answers_if_its_main_thread_blocks_signal() -> None:
    text = stack_of(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [stack_file.SIGNAL]))
    assert "work" in last_calls(text)


@pytest.mark.usefixtures("_method")
def test_process_answers_if_the_program_blocks_the_signal() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [stack_file.SIGNAL])
    try:
        assert "work" in last_calls(stack_of(int))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("by_fork", "_quickly")
def test_stacks_send_no_signal_to_starting_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would kill a process that has not installed a handler."""
    monkeypatch.setattr(stack_file.StackFile, "serve", lambda _: None)
    assert ": it is starting; " in stack_of(int)


@pytest.mark.usefixtures("by_fork")
def test_stacks_keep_signal_handler_of_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    heard: list[int] = []
    before = signal.signal(stack_file.SIGNAL, lambda number, _: heard.append(number))
    try:
        text = stack_of(lambda: signal.raise_signal(stack_file.SIGNAL))
    finally:
        signal.signal(stack_file.SIGNAL, before)
    assert f": it uses signal {stack_file.SIGNAL:d} for something else; " in text


@pytest.mark.usefixtures("by_fork")
def test_stacks_work_for_graph_that_runs_in_forked_worker() -> None:
    """The inner worker inherits the signal handler from the outer worker."""

    def outer(item: int) -> str:
        return stack_of(int)

    graph = Graph("outer")
    out = graph.source([1]).map(outer, on="process").collect()
    (text,) = graph.run()[out]
    assert "work" in last_calls(text)
    assert "outer" not in last_calls(text)

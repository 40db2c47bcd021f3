"""Test flowchan without its native module, as on macOS: threads work, and everything else raises a one-line
error.

The switch ``FLOWCHAN_PURE_PYTHON=1`` hides the module from the programs that these tests start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import run_python, script, start

HIDDEN = {"FLOWCHAN_PURE_PYTHON": "1"}
FLOWCHAN = ("-c", "from flowchan.cli.commands import main; main()")
LINE = "need flowchan's native module, which is available only on Linux"

GRAPH = """
    import asyncio
    from flowchan import Graph

    def square(n: int) -> int:
        return n * n

    async def half(n: int) -> float:
        await asyncio.sleep(0)
        return n / 2

    graph = Graph("squares")
    squares = graph.source(range(100), name="numbers").map(square, workers=3, on="{place}")
    halves = squares.map(half, workers=2).collect()
    """

MISSING = """
    import select
    del select.epoll, select.EPOLLIN  # first, because other modules use these names when they are imported
    import os, resource, signal, socket, sys, sysconfig
    sysconfig.get_config_vars()
    for module, names in [
        (os, "memfd_create MFD_CLOEXEC pidfd_open eventfd eventfd_read eventfd_write EFD_CLOEXEC"),
        (os, "EFD_NONBLOCK sched_getaffinity sched_setaffinity posix_fallocate waitid getresuid getresgid"),
        (signal, "pidfd_send_signal SIGRTMIN SIGRTMAX"),
        (socket, "SOCK_NONBLOCK SOCK_CLOEXEC SO_PEERCRED TCP_KEEPIDLE TCP_USER_TIMEOUT MSG_CMSG_CLOEXEC"),
        (resource, "RUSAGE_THREAD prlimit"),
    ]:
        for name in names.split():
            delattr(module, name)
    sys.platform = "darwin"
    import flowchan.cli.commands, flowchan.collective, flowchan.hosts, flowchan.pipelines, flowchan.viz
    """


def output(folder: Path, text: str, **options: object) -> str:
    return run_python(script(folder, text), env=HIDDEN, **options)


def test_program_uses_the_native_module_unless_it_is_hidden(tmp_path: Path) -> None:
    program = script(tmp_path, "from flowchan import native; print(native.is_compiled())")
    assert run_python(program, env={"FLOWCHAN_PURE_PYTHON": ""}) == "True\n"
    assert run_python(program, env=HIDDEN) == "False\n"


def test_graph_of_threads_and_coroutines_runs(tmp_path: Path) -> None:
    """R1: the results are complete and in order."""
    program = GRAPH.format(place="thread") + "\n    print(sum(graph.run()[halves]), graph.run()[halves][-1])"
    assert output(tmp_path, program) == f"{sum(n * n / 2 for n in range(100))} {99 * 99 / 2}\n"


def test_resumed_graph_skips_finished_items(tmp_path: Path) -> None:
    program = GRAPH.format(place="thread") + "\n    print(len(graph.run(resume='done')[halves]))"
    assert [output(tmp_path, program, cwd=tmp_path) for _ in range(2)] == ["100\n", "0\n"]


def test_imports_and_graphs_need_no_linux_names(tmp_path: Path) -> None:
    """The program first deletes the names that Python lacks on macOS."""
    program = MISSING + GRAPH.format(place="thread")
    program += "\n    run = graph.start(resume='done')"
    program += "\n    results, stats = run.wait(), run.stats()"
    program += (
        "\n    print(len(results[halves]), {stage.seconds.cpu for stage in stats.stages}, graph.check())"
    )
    assert output(tmp_path, program, cwd=tmp_path) == "100 {None} ()\n"


@pytest.mark.parametrize("place", ["thread", "process"])
def test_check_and_viz_accept_graphs_for_any_machine(tmp_path: Path, place: str) -> None:
    """A graph may be written on a laptop and run on another machine."""
    program = script(tmp_path, GRAPH.format(place=place))
    picture = tmp_path / "graph.svg"
    run_python(*FLOWCHAN, "check", program, env=HIDDEN)
    run_python(*FLOWCHAN, "viz", program, "-o", picture, env=HIDDEN)
    assert "numbers" in picture.read_text()


REFUSED = {
    "process": "Graph().source([1]).map(str, on='process').collect().graph.run()",
    "pool": "hosts.local(2).calibrate()",
    "stage on a pool": "ended(lambda g: g.source([1]).map(str, on=hosts.local(1)).collect())",
    "channel between processes": "Channel(across='processes')",
    "channel across hosts": "Channel(across='hosts')",
    "remote channel": "hosts.open_channel('127.0.0.1:1/1', b'0' * 32)",
    "group": "collective.members(2)",
    "group at an address": "collective.group(at='127.0.0.1:1', rank=0, size=2)",
    "task pool": "pipelines.TaskPool(2, on='process').__enter__()",
    "lock": "pipelines.Lock()",
}


def test_calls_that_need_the_native_module_raise_with_the_reason(tmp_path: Path) -> None:
    program = f"""
    from flowchan import Channel, Graph, collective, hosts, pipelines

    def ended(declare):
        graph = Graph("g")
        declare(graph)
        graph.run()

    for name, call in {REFUSED!r}.items():
        try:
            eval(call)
        except RuntimeError as error:
            print(f"{{name}}: {{error}}")
    """
    lines = output(tmp_path, program).splitlines()
    assert [line.partition(":")[0] for line in lines if line.endswith(LINE)] == list(REFUSED)


def test_uncaught_refusal_ends_at_the_callers_line(tmp_path: Path) -> None:
    program = script(tmp_path, GRAPH.format(place="process") + "\n    graph.run()")
    with start(program, env=HIDDEN) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "stage 'square': on must be 'thread', got 'process'" in errors
    assert errors.splitlines()[-1].endswith(LINE)

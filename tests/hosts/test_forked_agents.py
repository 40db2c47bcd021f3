"""Test the fork server of ``local``: its agents behave and end like newly started Python processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosted import agents, wait_ended, workers_of
from support.local_agents import agents_of, seeds_of
from support.scripts import run_python, script, start
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph
from flowchan.hosts import local
from flowchan.hosts.providers import forked_agents

SCRIPT = """
    import os, pathlib, resource, signal, sys, threading
    from flowchan import Graph
    from flowchan.hosts import local
    from flowchan.hosts.providers import forked_agents as forked

    def found(function, count=1):
        graph = Graph("script")
        result = graph.source(range(count)).map(function, on=local(count), workers=count).collect()
        return graph.run()[result]

    def pids():
        return [seed.pid for seed in forked.seeds()]
"""


pytestmark = pytest.mark.usefixtures("no_agent_stays")


def ran(function: Callable[[int], Any]) -> Any:
    """Return the result of ``function`` in a worker on a host."""
    graph = Graph("one")
    result = graph.source([0]).map(function, on=local(1)).collect()
    return graph.run()[result][0]


def seed() -> psutil.Process:
    (found,) = seeds_of(psutil.Process())
    return found


def program(folder: Path, text: str) -> str:
    """Return the output of a program that consists of SCRIPT and ``text``."""
    return run_python(script(folder, SCRIPT + text), folder)


def test_agents_of_several_runs_have_names_and_one_parent() -> None:
    gate = Gate()
    graph = Graph("named")
    graph.source(range(2)).map(gate.wait, on=local(2), workers=2).sink(abs)
    with graph.start():
        gate.wait_held(2)
        first = seed()
        assert [agent.name() for agent in agents()] == ["agent local-1", "agent local-2"]
        gate.open()
    assert first.children() == []
    assert ran(lambda _: os.getppid()) != first.pid
    assert seed() == first


def test_run_continues_when_the_fork_server_is_killed() -> None:
    gate = Gate()
    graph = Graph("lost")
    result = graph.source(range(4)).map(gate.wait, on=local(2), workers=4).collect()
    run = graph.start()
    gate.wait_held(4)
    lost, before = seed(), [one for agent in agents() for one in (agent, *workers_of(agent))]
    assert len(before) == 6
    lost.kill()
    wait_ended(lost, *before)
    gate.wait_held(4)
    gate.open()
    assert run.wait()[result] == [0, 1, 2, 3]
    deaths = [death for host in run.stats().hosts for death in host.deaths]
    assert [death.partition(" was ")[2] for death in deaths] == [
        "lost with the fork server, which was killed by SIGKILL"
    ] * 2
    assert seed() != lost


def test_killed_fork_server_is_replaced_at_the_next_start() -> None:
    ran(abs)
    lost = seed()
    lost.kill()
    wait_ended(lost)
    assert ran(abs) == 0
    assert seed() != lost


def test_workers_see_the_programs_current_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "first")
    assert ran(lambda _: os.environ.get("WORD")) == "first"
    before = seed()
    monkeypatch.setenv("WORD", "other \udc80")
    assert ran(lambda _: os.environ.get("WORD")) == "other \udc80"
    monkeypatch.delenv("WORD")
    assert ran(lambda _: os.environ.get("WORD")) is None
    assert seed() == before


def test_agents_get_the_current_process_settings_of_the_program(tmp_path: Path) -> None:
    """The settings are the working folder, the umask, the limits, and the variables that Python reads at
    start-up."""
    text = """
    def about(_):
        limit, _ = resource.getrlimit(resource.RLIMIT_CORE)
        return sys.path[0], os.getcwd(), os.umask(0), limit, sys.pycache_prefix

    os.umask(0o22)
    (first,) = found(about)
    before = pids()
    os.chdir(sys.argv[1])
    os.umask(0o27)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["PYTHONPYCACHEPREFIX"] = sys.argv[1]
    (second,) = found(about)
    print(second == (sys.argv[1], sys.argv[1], 0o27, 0, sys.argv[1]), first != second)
    print(len(before) == len(pids()) == 1, before != pids())
    """
    assert program(tmp_path, text) == "True True\nTrue True\n"


def test_replaced_fork_server_lives_until_its_last_agent_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = Gate()
    graph = Graph("long")
    result = graph.source([7]).map(gate.wait, on=local(1)).collect()
    run = graph.start()
    gate.wait_held()
    old = seed()
    monkeypatch.chdir(tmp_path)
    ran(abs)
    assert len(seeds_of(psutil.Process())) == 2
    gate.open()
    assert run.wait()[result] == [7]
    assert seed() != old


def test_output_follows_the_programs_current_stderr(tmp_path: Path) -> None:
    text = """
    def say(number):
        print("printed")
        os.write(2, b"written\\n")

    found(say)
    to = os.open(sys.argv[1] + "/errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(to, 2)
    found(say)
    """
    with start(script(tmp_path, SCRIPT + text), tmp_path) as process:
        out, err = process.communicate()
    assert out == ""
    assert sorted(err.split()) == sorted((tmp_path / "errors").read_text().split()) == ["printed", "written"]


def test_program_without_standard_streams_can_start_agents(tmp_path: Path) -> None:
    """In such a program, other files and sockets get the descriptor numbers of the standard streams."""
    text = """
    assert sys.stderr is None
    def say(number):
        print("printed")
        os.write(2, b"written")
        return number
    with open(sys.argv[1] + "/found", "w") as file:
        file.write(repr(found(say, 2)))
    """
    written = script(tmp_path, SCRIPT + text)
    shell = 'exec "$0" "$@" <&- >&- 2>&-'
    subprocess.run(("sh", "-c", shell, sys.executable, written, tmp_path), check=True)
    assert (tmp_path / "found").read_text() == "[0, 1]"


def test_forked_program_has_its_own_fork_server(tmp_path: Path) -> None:
    text = """
    found(abs)
    before = pids()
    child = os.fork()
    if child == 0:
        good = pids() == [] and found(abs, 2) == [0, 1] and pids() != before and len(pids()) == 1
        forked.end_seeds()
        os._exit(0 if good else 1)
    print(os.waitpid(child, 0)[1], found(abs, 2), pids() == before)
    """
    assert program(tmp_path, text) == "0 [0, 1] True\n"


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "os._exit(0)",
        "sys.exit(0)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.execlp('true', 'true')",
    ],
)
def test_fork_server_ends_with_its_program(end: str, tmp_path: Path) -> None:
    text = f"""
    found(abs, 2)
    print(*pids(), flush=True)
    {end}
    """
    with start(script(tmp_path, SCRIPT + text), tmp_path) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.communicate()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_program_that_ends_normally_reaps_the_fork_server(tmp_path: Path) -> None:
    text = """
    import atexit

    @atexit.register  # registered before flowchan's functions, so called after them
    def tell():
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no child is left")

    found(abs)
    """
    assert program(tmp_path, text) == "no child is left\n"


def test_run_still_active_at_exit_is_aborted_with_its_agents(tmp_path: Path) -> None:
    """The run does not fail because its agents are gone, and it starts no second fork server."""
    text = """
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    held = pathlib.Path(sys.argv[0]).with_name("held")

    def hold(_):
        held.touch()
        threading.Event().wait()

    begun = forked._Seed.__init__
    forked._Seed.__init__ = lambda *seed: print("a seed", flush=True) or begun(*seed)
    graph = Graph("goes on")
    graph.source([1]).map(hold, on=local(1)).sink(abs)
    run = graph.start()
    while not held.exists():
        pass
    """
    output = program(tmp_path, text)
    assert output.count("a seed") == 1
    assert "graph 'goes on' is aborted after" in output


def test_agents_end_with_a_killed_program_despite_its_forked_child(tmp_path: Path) -> None:
    text = """
    held = pathlib.Path(sys.argv[1], "held")

    def hold(_):
        held.touch()
        threading.Event().wait()

    running = threading.Thread(target=found, args=(hold,))
    running.start()
    while not held.exists():
        pass
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    running.join()
    """
    with start(script(tmp_path, SCRIPT + text), tmp_path) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        current = psutil.Process(process.pid)
        family = [*seeds_of(current), *agents_of(current), *map(workers_of, agents_of(current))]
        assert len(family) == 3
        *others, workers = family
        process.kill()
        try:
            wait_ended(*others, *workers)
            assert child.is_running()
        finally:
            child.kill()


def test_python_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowchan import HostError

    monkeypatch.setattr(forked_agents.sys, "executable", "/no/such/python")
    with pytest.raises(HostError, match="/no/such/python can't be started here: No such file"):
        ran(abs)


def test_python_that_fails_to_start_is_reported_with_its_error(tmp_path: Path) -> None:
    text = """
    from flowchan import HostError
    os.environ["PYTHONHOME"] = sys.argv[1]
    try:
        found(abs)
    except HostError as error:
        print(error)
    """
    with start(script(tmp_path, SCRIPT + text), tmp_path) as process:
        out, err = process.communicate()
    assert "lost with the fork server, which exited with code 1" in out
    assert "encodings" in err


def test_signal_to_the_fork_server_does_not_end_the_program(tmp_path: Path) -> None:
    ran(abs)
    seed().send_signal(signal.SIGTERM)
    assert ran(abs) == 0

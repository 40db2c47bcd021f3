"""Test the local processes that ``local`` starts, and those that hold remote agents.

The tests cover how these processes start, how their end is reported, and how their resources are freed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from support.local_agents import seeds_of
from support.waiting import wait_until

from flowchan.hosts.providers.child import AgentProcess
from flowchan.hosts.providers.local import local
from flowchan.hosts.providers.provider import Launch, Provider, StartedAgent
from flowchan.run.crew.process_exit import exit_text

ECHO = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
SLEEP = (
    "import signal, sys; print(sys.stdin.readline(), file=open(sys.argv[1], 'w'), flush=True); signal.pause()"
)


def launch(program: str, *arguments: object, stdin: bytes = b"a secret\n") -> Launch:
    return Launch(("-c", program, *map(str, arguments)), stdin)


@pytest.fixture
def started() -> Iterator[list[StartedAgent]]:
    """Yield a list, and close all agents that the test has added to it."""
    all_of_them: list[StartedAgent] = []
    yield all_of_them
    for one in all_of_them:
        one.close()


Starting = Callable[..., StartedAgent]


@pytest.fixture(params=["local", "child"])
def start(request: pytest.FixtureRequest, started: list[StartedAgent]) -> Starting:
    """Return a function that starts the agent on one of the hosts ``local-1``, ``local-2`` and so on."""

    def by_local(output: Launch, number: int = 0) -> StartedAgent:
        started.append(local(number + 1).start(number, output))
        return started[-1]

    def by_child(output: Launch, number: int = 0) -> StartedAgent:
        host = local(number + 1).hosts[number]
        command = (sys.executable, *output.arguments)
        started.append(
            AgentProcess(host, command, output, lambda code, _: f"the agent {host} {exit_text(code)}")
        )
        return started[-1]

    return by_local if request.param == "local" else by_child


@pytest.fixture
def processes() -> Callable[[], list[psutil.Process]]:
    """Return a function that lists the processes of this test and their children, without the fork
    servers."""
    current = psutil.Process()
    before = current.children(recursive=True)

    def found() -> list[psutil.Process]:
        others = [*before, *seeds_of(current)]
        return [child for child in current.children(recursive=True) if child not in others]

    return found


def end_of(one: StartedAgent) -> str:
    wait_until(lambda: one.ended() is not None)
    return one.ended() or ""


def test_provider_is_compared_and_pickled_by_value():
    assert local(2) == local(2) != local(3)
    assert hash(local(2)) == hash(local(2))
    assert pickle.loads(pickle.dumps(local(2))) == local(2)
    assert repr(local(2)) == "local(2)"
    provider: Provider = local(2)
    assert provider.hosts == ("local-1", "local-2")
    assert provider.listen_at() == "127.0.0.1"


@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError)]
)
def test_invalid_count_is_refused(count, error):
    with pytest.raises(error, match="local: count must be"):
        local(count)


def test_repr_of_a_launch_hides_its_secret():
    assert "secret" not in repr(launch("pass"))


def test_agent_gets_its_launch_line_on_standard_input(start, tmp_path):
    one = start(launch(ECHO, tmp_path / "got", stdin=b"the line\n"))
    assert end_of(one) == "the agent local-1 exited with code 0 without finishing"
    assert (tmp_path / "got").read_bytes() == b"the line\n"


def test_secret_is_absent_from_command_lines_and_environments(start, processes, tmp_path):
    start(launch(SLEEP, tmp_path / "up"))
    wait_until((tmp_path / "up").exists)
    (child,) = processes()
    assert "a secret" not in " ".join(child.cmdline())
    assert "a secret" not in str(child.environ())


def test_each_agent_reports_its_end(start):
    killed = start(launch("import os; os.kill(os.getpid(), 9)"))
    failed = start(launch("raise SystemExit(3)"), 1)
    assert end_of(killed) == "the agent local-1 was killed by SIGKILL"
    assert end_of(failed) == "the agent local-2 exited with code 3 without finishing"


def test_running_agent_is_not_reported_as_ended_until_killed(start, tmp_path):
    one = start(launch(SLEEP, tmp_path / "up"))
    wait_until((tmp_path / "up").exists)
    assert one.ended() is None
    one.kill()
    assert end_of(one) == "the agent local-1 was killed by SIGKILL"
    one.kill()


def test_close_kills_the_agent_and_its_children_without_zombies(start, processes, tmp_path):
    parent = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {SLEEP!r}, sys.argv[1]], stdin=subprocess.DEVNULL)\n"
    )
    one = start(launch(parent, tmp_path / "up"))
    wait_until((tmp_path / "up").exists)
    child, grandchild = processes()
    assert grandchild.ppid() == child.pid
    one.close()
    assert child not in processes()
    wait_until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
    one.close()
    assert one.ended() == "the agent local-1 was killed by SIGKILL"


def test_children_of_an_ended_agent_are_killed(start, tmp_path):
    parent = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}, sys.argv[1]], stdin=subprocess.DEVNULL)\n"
    )
    one = start(launch(parent, tmp_path / "up"))
    end_of(one)
    wait_until((tmp_path / "up").exists)
    mine = [p for p in psutil.process_iter() if str(tmp_path / "up") in " ".join(cmdline(p))]
    assert len(mine) == 1
    one.close()
    wait_until(lambda: not mine[0].is_running() or mine[0].status() == psutil.STATUS_ZOMBIE)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_ctrl_c_in_a_terminal_does_not_reach_an_agent(start, processes, tmp_path):
    """Ctrl-C reaches the foreground process group, but the driver decides when agents end."""
    start(launch(SLEEP, tmp_path / "up"))
    wait_until((tmp_path / "up").exists)
    (child,) = processes()
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


IGNORING = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from flowchan.hosts.providers.child import AgentProcess
from flowchan.hosts.providers.local import local
from flowchan.hosts.providers.provider import Launch
said = Launch(("-c", "print('hello')"), b"")
one = {start}
while one.ended() is None:
    pass
print(one.ended())
one.close()
"""
BY_LOCAL = "local(1).start(0, said)"
BY_CHILD = 'AgentProcess("gpu1", (sys.executable, *said.arguments), said, lambda code, said: "not told")'


@pytest.mark.parametrize(
    ("how", "message", "output"),
    [
        (BY_LOCAL, "the agent local-1 exited with code 0 without finishing", "hello"),
        (
            BY_CHILD,
            "gpu1: ended with an unknown exit code, because the program ignores SIGCHLD or reaps its "
            "child processes",
            "[gpu1] hello",
        ),
    ],
    ids=["local", "child"],
)
def test_agent_end_is_reported_when_the_program_ignores_sigchld(how, message, output):
    program = IGNORING.format(start=how)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{message}\n"
    assert done.stderr == f"{output}\n"


def test_report_of_a_killed_agent_names_the_signal(start, processes, tmp_path):
    one = start(launch(SLEEP, tmp_path / "up"))
    wait_until((tmp_path / "up").exists)
    (child,) = processes()
    child.send_signal(signal.SIGTERM)
    assert end_of(one) == "the agent local-1 was killed by SIGTERM"

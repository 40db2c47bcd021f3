"""Agents on this machine: what starts them, what tells their end, and that nothing of them is left."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from waiting import wait_until

from flowchan.hosts.local import local
from flowchan.hosts.provider import Launch, Provider, Started

ECHO = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
SLEEP = (
    "import signal, sys; print(sys.stdin.readline(), file=open(sys.argv[1], 'w'), flush=True); signal.pause()"
)


def launch(program: str, *arguments: object, stdin: bytes = b"a secret\n") -> Launch:
    return Launch(("-c", program, *map(str, arguments)), stdin)


@pytest.fixture
def started() -> Iterator[list[Started]]:
    """What is put in here is closed, whatever the test does."""
    all_of_them: list[Started] = []
    yield all_of_them
    for one in all_of_them:
        one.close()


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """The processes that the test has started: the forkserver of a test before it may be there too."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


def end_of(one: Started) -> str:
    wait_until(lambda: one.ended() is not None)
    return one.ended() or ""


def test_a_provider_is_a_value():
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
def test_a_count_that_is_none_is_refused(count, error):
    with pytest.raises(error, match="local: count must be"):
        local(count)


def test_a_launch_does_not_show_its_secret():
    assert "secret" not in repr(launch("pass"))


def test_the_launch_line_comes_by_standard_input_and_ends(started, tmp_path):
    started.append(local(1).start(0, launch(ECHO, tmp_path / "got", stdin=b"the line\n")))
    assert end_of(started[0]) == "the agent local-1 exited with code 0 without finishing"
    assert (tmp_path / "got").read_bytes() == b"the line\n"


def test_the_secret_is_in_no_command_line_and_no_environment(started, children, tmp_path):
    started.append(local(1).start(0, launch(SLEEP, tmp_path / "up")))
    wait_until((tmp_path / "up").exists)
    (child,) = children()
    assert "a secret" not in " ".join(child.cmdline())
    assert "a secret" not in str(child.environ())


def test_an_agent_is_told_apart_by_how_it_ended(started):
    killed, failed = "import os; os.kill(os.getpid(), 9)", "raise SystemExit(3)"
    started.extend(local(2).start(number, launch(code)) for number, code in enumerate((killed, failed)))
    assert end_of(started[0]) == "the agent local-1 was killed by SIGKILL"
    assert end_of(started[1]) == "the agent local-2 exited with code 3 without finishing"


def test_one_that_runs_has_not_ended_until_it_is_killed(started, tmp_path):
    one = local(1).start(0, launch(SLEEP, tmp_path / "up"))
    started.append(one)
    wait_until((tmp_path / "up").exists)
    assert one.ended() is None
    one.kill()
    assert end_of(one) == "the agent local-1 was killed by SIGKILL"
    one.kill()


def test_closing_kills_it_and_what_it_has_started_and_leaves_no_zombie(started, children, tmp_path):
    parent = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {SLEEP!r}, sys.argv[1]], stdin=subprocess.DEVNULL)\n"
    )
    one = local(1).start(0, launch(parent, tmp_path / "up"))
    started.append(one)
    wait_until((tmp_path / "up").exists)
    (child,) = children()
    (grandchild,) = child.children()
    one.close()
    assert children() == []
    wait_until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
    one.close()
    assert one.ended() == "the agent local-1 was killed by SIGKILL"


def test_what_an_agent_has_started_is_killed_after_the_agent_itself_has_ended(started, tmp_path):
    parent = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}, sys.argv[1]], stdin=subprocess.DEVNULL)\n"
    )
    one = local(1).start(0, launch(parent, tmp_path / "up"))
    started.append(one)
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


def test_ctrl_c_in_a_terminal_does_not_reach_an_agent(started, children, tmp_path):
    """It goes to the foreground's process group, and what becomes of the agents is for the driver to say."""
    started.append(local(1).start(0, launch(SLEEP, tmp_path / "up")))
    wait_until((tmp_path / "up").exists)
    (child,) = children()
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


IGNORING = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from flowchan.hosts.local import local
from flowchan.hosts.provider import Launch
one = local(1).start(0, Launch(("-c", "print('hello')"), b""))
while one.ended() is None:
    pass
print(one.ended())
one.close()
"""


def test_the_end_is_told_in_a_program_that_ignores_its_children_and_output_goes_to_standard_error():
    done = subprocess.run([sys.executable, "-c", IGNORING], capture_output=True, text=True, timeout=60)
    assert done.stdout == (
        "local-1: ended, and nobody knows how, because the program ignores SIGCHLD or collects its children\n"
    )
    assert done.stderr == "hello\n"


def test_the_death_of_an_agent_by_a_signal_from_outside_is_named(started, children, tmp_path):
    started.append(local(1).start(0, launch(SLEEP, tmp_path / "up")))
    wait_until((tmp_path / "up").exists)
    (child,) = children()
    child.send_signal(signal.SIGTERM)
    assert end_of(started[0]) == "the agent local-1 was killed by SIGTERM"

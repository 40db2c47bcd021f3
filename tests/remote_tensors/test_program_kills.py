"""Test K1: when a program with remote tensors is killed at any point, no node or shared memory remains."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.optional_packages import optional
from support.preloaded_programs import Template
from support.waiting import wait_until

torch = optional("torch")

HERE = Path(__file__).parent
PHASES = ("start", "idle", "issue", "full", "wait", "upload", "download", "copy", "failed", "close")

PROGRAM = f"""
import sys, torch
sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}
from pathlib import Path
from failing_operations import Latch
from flowchan.pipelines import RemoteNodes
phase, folder, where = sys.argv[1:]
on = where
if where == "local":
    from flowchan import hosts
    on = hosts.local(2, peer_timeout=2.0)
print("started", flush=True)
nodes = RemoteNodes(2, on=on)
print("ready", flush=True)
x, local = torch.ones(3, device=nodes[0]), torch.ones(1_000_000)
far = local.to(nodes[0])
latch = Latch(Path(folder) / "latch")
if phase in ("wait", "full", "close"):
    latch.occupy(x)
while True:
    if phase == "idle":
        sys.stdin.read()
    elif phase in ("issue", "full"):
        x = x + 1
    elif phase == "wait":
        nodes.sync()
    elif phase == "upload":
        local.to(nodes[1])
    elif phase == "download":
        far.cpu()
    elif phase == "copy":
        far.to(nodes[1]).to(nodes[0])
    elif phase == "failed":
        torch.ops.failing.fail(x, "value") + x
    elif phase == "close":
        nodes.close()
    else:
        nodes.close()
        nodes = RemoteNodes(2, on=on)
"""


def members(session: int) -> list[int]:
    """Return the running processes of a session."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(pid)
    return found


class Killed:
    """Program that the test kills.

    Args:
        programs: Template that starts the program.
        phase: Name of the call during which the program is killed.
        folder: Folder for the program's latch.
        where: Placement of the nodes: ``process`` or ``local``.
    """

    def __init__(self, programs: Template, phase: str, folder: Path, where: str = "process") -> None:
        self.program = programs.popen(
            "-c", PROGRAM, phase, folder, where,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, cwd=str(folder), env=dict(os.environ),
        )  # fmt: skip
        self.seen: set[int] = set()

    def wait_ready(self, phase: str) -> None:
        assert self.program.stdout is not None
        lines = ("started",) if phase == "start" else ("started", "ready")
        for expected in lines:
            line = self.program.stdout.readline()
            assert line == f"{expected}\n", self.program.communicate()

    def look(self) -> None:
        """Record all processes of the program, and check that their shared memory has no name."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen.update(child.pid for child in psutil.Process(self.program.pid).children(recursive=True))
        for pid in (*self.seen, self.program.pid):
            with contextlib.suppress(OSError):
                assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text()

    def left(self) -> list[int]:
        seen = {pid for pid in self.seen if is_running(pid)}
        return sorted(seen.union(members(self.program.pid)) - {self.program.pid})

    def close(self) -> None:
        self.program.kill()
        self.program.communicate()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def killed(*arguments: Any) -> Iterator[Killed]:
    program = Killed(*arguments)
    try:
        yield program
    finally:
        program.close()


def kill_and_check(program: Killed, phase: str, chance: random.Random, number: int) -> None:
    program.wait_ready(phase)
    threading.Event().wait(chance.uniform(0, 0.1))
    program.look()
    program.program.send_signal(number)
    program.program.wait(60)
    wait_until(lambda: not program.left(), what=program.left)


@pytest.mark.parametrize("phase", PHASES)
def test_k1_killed_program_leaves_no_node(
    phase: str, torch_programs: Template, tmp_path: Path, long_walk: bool
) -> None:
    for seed in range(20 if long_walk else 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with killed(torch_programs, phase, folder) as program:
            kill_and_check(program, phase, random.Random(f"{phase} {seed}"), signal.SIGKILL)


@pytest.mark.parametrize("phase", ["issue", "wait", "upload", "close"])
def test_k1_interrupted_program_leaves_no_node(phase: str, torch_programs: Template, tmp_path: Path) -> None:
    """The program has no ``with`` block, so only the exit of its process ends the nodes."""
    with killed(torch_programs, phase, tmp_path) as program:
        kill_and_check(program, phase, random.Random(phase), signal.SIGINT)


@pytest.mark.parametrize("phase", ["idle", "issue", "wait"])
def test_k1_killed_program_leaves_no_node_on_hosts(
    phase: str, torch_programs: Template, tmp_path: Path
) -> None:
    with killed(torch_programs, phase, tmp_path, "local") as program:
        kill_and_check(program, phase, random.Random(phase), signal.SIGKILL)


def test_program_that_ends_without_close_ends_its_nodes(torch_programs: Template, tmp_path: Path) -> None:
    program = PROGRAM.partition("while True")[0] + "print((x + 1).tolist())"
    found = torch_programs.run("-c", program, "idle", tmp_path, "process", start_new_session=True)
    assert (found.stdout.splitlines()[-1], found.stderr, found.returncode) == ("[2.0, 2.0, 2.0]", "", 0)

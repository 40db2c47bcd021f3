"""A program with children, and the class through which a test controls and kills it.

The program reads orders as one JSON object per line, and answers in the same format. For each order, the
program starts children and repeats a call to them until the call raises. The program then closes the
children, and reports leaked descriptors, threads and shared memory. All processes of the program inherit a
token in their environment, by which the test finds survivors.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

TOKEN = "FLOWCHAN_TEST_FAMILY"
PEER_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 60.0
KIDS = 4
HELPERS = ("flowchan.hosts.fork_server", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Modules of helper processes, which run until their program exits."""


# --- the program ---


def main() -> None:
    from flowchan import ChildDied
    from flowchan.pipelines import children

    report(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        before = holdings()
        kids = children.start(order.get("kids", KIDS), on=placement(order["on"]))
        kids.run(work, order["call"], order.get("deep", False))
        kids.join(timeout=CALL_TIMEOUT_S)
        report(kids=[(kid.number, kid.host, kid.pid) for kid in kids])
        if order.get("end") == "return":
            return
        if order.get("end") == "exception":
            raise ZeroDivisionError
        with kids:
            try:
                while True:
                    CALLS[order["call"]](kids)
            except ChildDied as error:
                report(died=(error.number, error.host, error.pid, error.signal))
        del kids
        report(left=left_since(before))


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def placement(on: str) -> Any:
    from flowchan import hosts

    if on == "local":
        return hosts.local(2, peer_timeout=PEER_TIMEOUT_S)
    if on == "ssh":
        return hosts.ssh({"a": 2, "b": 2}, python=sys.executable, peer_timeout=PEER_TIMEOUT_S)
    return on


def work(parent: Any, call: str, deep: bool) -> None:
    """Answer the parent's calls until this child is killed. If ``deep`` is set, start a grandchild first."""
    from flowchan.pipelines import children

    if deep:
        grandchild = children.start(1)
        grandchild.run(work, "wait", False)
        grandchild.join(timeout=CALL_TIMEOUT_S)
    parent.pause(timeout=CALL_TIMEOUT_S)
    while True:
        if call == "join":
            parent.pause()
        elif call == "send":
            parent.receive()
        elif call == "receive":
            parent.send(bytes(1000))
        elif call == "talk":
            parent.pause()
            parent.send(parent.receive())
        elif call == "busy":
            pass
        else:
            threading.Event().wait()


def talk(kids: Any) -> None:
    kids.join("again", timeout=CALL_TIMEOUT_S)
    kids.send([1, 2, 3], timeout=CALL_TIMEOUT_S)
    kids.receive(timeout=CALL_TIMEOUT_S)


CALLS: dict[str, Callable[[Any], Any]] = {
    "join": lambda kids: kids.join("again", timeout=CALL_TIMEOUT_S),
    "send": lambda kids: kids.send(bytes(100_000), timeout=CALL_TIMEOUT_S),
    "receive": lambda kids: kids.receive(timeout=CALL_TIMEOUT_S),
    "talk": talk,
    "wait": lambda kids: kids.wait(timeout=CALL_TIMEOUT_S),
    "busy": lambda kids: kids.wait(timeout=CALL_TIMEOUT_S),
}
"""Maps names to the calls that the program repeats until a child dies."""


def holdings() -> set[str]:
    found = {f"thread {task}" for task in os.listdir("/proc/self/task")}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            found.add(f"descriptor {number} ({os.readlink(f'/proc/self/fd/{number}')})")
    maps = Path("/proc/self/maps").read_text().splitlines()
    return found | {f"mapping {line.split()[0]}" for line in maps if "memfd:" in line}


def left_since(before: set[str]) -> list[str]:
    """Return what this process has acquired since ``before`` and does not release within 10 s."""
    if forked := sys.modules.get("flowchan.hosts.providers.forked_agents"):
        forked.end_seeds()
    from support.waiting import wait_until

    def nothing_left() -> bool:
        gc.collect()
        return not holdings() - before

    with contextlib.suppress(AssertionError):
        wait_until(nothing_left, 10)
    return sorted(holdings() - before)


# --- control by the test ---


class Family:
    """The running program and all processes that it started."""

    def __init__(self) -> None:
        self._mark = f"{TOKEN}={secrets.token_hex(8)}"
        name, _, token = self._mark.partition("=")
        here = Path(__file__).parent
        path = os.pathsep.join((str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])))
        self.program = subprocess.Popen(
            [sys.executable, str(here / "family.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, name: token, "PYTHONPATH": path},
            start_new_session=True,
            text=True,
        )
        # During start-up, Python may ignore a SIGINT, so wait until the program is ready.
        assert self.answer() == {"ready": True}

    def order(self, **values: Any) -> None:
        assert self.program.stdin is not None
        print(json.dumps(values), file=self.program.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.program.stdout is not None
        line = self.program.stdout.readline()
        assert line, f"the program has ended with code {self.program.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of the program, without its helpers."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if pid != self.program.pid and self._mark.encode() in environment:
                    process = psutil.Process(pid)
                    command = " ".join(process.cmdline())
                    is_helper = any(helper in command for helper in HELPERS)
                    if not (is_helper and process.ppid() == self.program.pid):
                        found.append(process)
        return found

    def ssh_clients(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.Process(self.program.pid).children()
            if any(word.endswith("/bin/ssh") for word in process.cmdline())
        ]

    def close(self) -> None:
        """Kill the program and all its processes."""
        self.program.kill()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.program.communicate()


if __name__ == "__main__":
    main()

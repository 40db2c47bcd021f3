"""Count what each system loses when one of its workers is killed with ``kill -9``.

Run it with ``python -m benchmarks.losses [ITEMS]``. The program of each system sends numbers to three worker
processes, which spend 1 ms on each number. After a third of the results, this process kills the worker that
sent the latest result. This process also counts the results, so no system counts its own losses.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

ITEMS = 3_000
QUIET_S = 40.0
"""Seconds without a new result after which a program counts as hanging."""
SET_CHILD_SUBREAPER = 36
"""Request of prctl(2)."""
ERROR = re.compile(rb"^([\w.]+(?:Error|BrokenProcessPool))\b", re.MULTILINE)
RESULT = re.compile(rb"(\d+) (\d+)")
SYSTEMS = {
    "flowchan": ("flowchan", "flowchan: map on processes"),
    "multiprocessing.Queue": ("", "multiprocessing: two queues"),
    "multiprocessing.Pool": ("", "multiprocessing.Pool.imap_unordered"),
    "concurrent.futures": ("", "ProcessPoolExecutor.map"),
    "ray-tasks": ("ray", "Ray tasks"),
    "ray-actors": ("ray", "Ray ActorPool"),
    "pyzmq": ("zmq", "pyzmq PUSH and PULL"),
    "dora": ("dora", "dora-rs dataflow"),
}
"""For each program, the module that the system needs and the system's name in the table."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Number of arrived, missing and repeated results, and how the program ended."""

    arrived: int
    missing: int
    repeated: int
    end: str


def main() -> None:
    """Print the table of all systems that are installed."""
    _adopt_orphans()
    items = int(sys.argv[1]) if len(sys.argv) > 1 else ITEMS
    table = Table(title=f"{items:,} items, 3 workers; one worker is killed after a third of the results")
    for heading in ("system", "arrived", "missing", "repeated", "end of the program"):
        table.add_column(
            heading, justify="right" if heading in ("arrived", "missing", "repeated") else "left"
        )
    for program, (module, name) in SYSTEMS.items():
        if module and importlib.util.find_spec(module) is None:
            table.add_row(name, "", "", "", "not installed")
            continue
        found = run(program, items)
        table.add_row(name, f"{found.arrived:,}", f"{found.missing:,}", f"{found.repeated:,}", found.end)
    Console(width=120).print(table)


def run(program: str, items: int) -> Outcome:
    """Run the program of one system, kill one of its workers, and count its results."""
    counts: collections.Counter[int] = collections.Counter()
    command = (sys.executable, "-m", "benchmarks.loss_programs", program, str(items))
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            for number, pid in _results(process):
                counts[number] += 1
                if counts.total() == items // 3:
                    os.kill(pid, signal.SIGKILL)
            code = process.wait(QUIET_S)
            errors.seek(0)
            raised = ERROR.findall(errors.read())
            end = f"exit code {code}" + (f", {raised[-1].decode()}" if code and raised else "")
        except (TimeoutError, subprocess.TimeoutExpired):
            end = f"hangs: nothing in {QUIET_S:g} s"
        finally:
            _kill_children()
    return Outcome(counts.total(), items - len(counts), counts.total() - len(counts), end)


def _results(process: subprocess.Popen[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the results that the program prints, until it ends.

    Raises:
        TimeoutError: The program printed nothing for a while.
    """
    assert process.stdout is not None
    rest = b""
    while True:
        if not select.select([process.stdout], [], [], QUIET_S)[0]:
            raise TimeoutError
        read = os.read(process.stdout.fileno(), 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            if found := RESULT.fullmatch(line):  # other lines are log messages of the system
                yield int(found[1]), int(found[2])


def _kill_children() -> None:
    """Kill all processes below this one."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
            child.wait()


def _adopt_orphans() -> None:
    """Become the parent of processes whose parent ends, such as the daemons of a system."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    main()

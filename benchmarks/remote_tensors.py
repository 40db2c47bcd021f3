"""Measure operations on remote tensors: their CPU time in the program, copies, waits and training steps.

The peers are Monarch's tensor engine on CPUs, chains of ``rpc.remote``, and local operations.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Effort, Report, Result, Row, at_most, in_words

ISOLATES = (
    "There is one node, or two for copies between nodes. A node is a process on this machine with one "
    "compute thread. Operations on 64 × 64 float32 values are issued many times, and the results are "
    "dropped. The figure for an operation is CPU time, either of the calling thread or of all the program's "
    "threads. The measurement ends when the node has finished all commands. For `rpc.remote`, the arguments "
    "are two RRefs, and the worker applies the operation to their local values. Monarch runs in its own "
    "Python if `MONARCH_PYTHON` names one; without Monarch, its rows are missing. The local program includes "
    "the kernels. Copies are timed by the wall clock. The receiver reads each copy once per page. The memory "
    "copy is read in the same way, and its pages are already allocated. The training step uses a network "
    "with layer sizes 64-128-10 and a batch size of 32. Each round starts new processes."
)
MICROSECOND = 1e-6
PYTHON_S, NATIVE_S, ITEM_S = 8 * MICROSECOND, 3 * MICROSECOND, 60 * MICROSECOND
OPERATIONS = ("add", "mm", "view", "add_", "a + 1.5")
KINDS = {"thread": "CPU of the thread", "process": "CPU of the program", "worker": "CPU of the node"}
TITLES = {
    "flowchan": "flowchan",
    "flowchan_in_python": "flowchan in Python",
    "local": "local",
    "rpc_remote": "rpc.remote",
    "monarch": "Monarch",
}
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def measure(effort: Effort) -> Report:
    report = Report()
    results = _Results(report)
    count = 2_000 if effort.full else 50
    systems = [system for system in TITLES if _can_run(system)]
    for _ in range(effort.rounds):
        for system in systems:
            fewer = 8 if system == "monarch" else 1
            for name, seconds in _program(system, count // fewer).items():
                operation, kind = name.split(": ")
                results.add(f"{operation}, {KINDS[kind]}", TITLES[system], seconds)
        for name, seconds in _program("waits", count // 2).items():
            results.add(f"wait: {name}", "flowchan", seconds)
        for name, seconds in _program("copies", 5 if effort.full else 1).items():
            size, _, work = name.partition(": ")
            results.add(f"copy of {size}", work, seconds)
        for name, seconds in _program("training", count // 50).items():
            optimizer, where, clock = name.split(": ")
            results.add(f"training step with {optimizer}, {CLOCKS[clock]}", where, seconds)
    _operation_rows(report, results)
    _other_rows(report, results)
    return report


CLOCKS = {
    "thread_time": KINDS["thread"],
    "process_time": KINDS["process"],
    "perf_counter": "elapsed time",
}


class _Results:
    """All results of the report, by workload and case."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._found: dict[tuple[str, str], Result] = {}

    def add(self, work: str, case: str, seconds: float) -> None:
        """Add one sample."""
        if (work, case) not in self._found:
            self._found[work, case] = Result(work, case, "s")
            self._report.results.append(self._found[work, case])
        result = self._found[work, case]
        result.samples.append(seconds)
        result.cpu_seconds_per_million_items.append(seconds * 1e6)

    def of(self, work: str, case: str = "flowchan") -> Result:
        """Return the result of a case."""
        return self._found[work, case]

    def peers(self, work: str, among: Sequence[str]) -> list[Result]:
        """Return the results of the peers that were measured."""
        return [self._found[work, name] for name in among if (work, name) in self._found]


def _operation_rows(report: Report, results: _Results) -> None:
    native = _has_native()
    for operation in OPERATIONS:
        work = f"{operation}, {KINDS['thread']}"
        mine = results.of(work)
        report.rows.append(_absolute(mine, NATIVE_S if native else PYTHON_S))
        report.rows += [
            _absolute(python, PYTHON_S, "in Python") for python in results.peers(work, ["flowchan in Python"])
        ]
        for kind in ("thread", "process"):
            for peer, least in (("Monarch", 50), ("rpc.remote", 5)):
                work = f"{operation}, {KINDS[kind]}"
                report.rows += [
                    at_most(1 / least, results.of(work), one) for one in results.peers(work, [peer])
                ]
    for operation in OPERATIONS:
        report.rows.append(_plain(results.of(f"{operation}, {KINDS['worker']}")))


def _other_rows(report: Report, results: _Results) -> None:
    for size in ("4 MB", "64 MB"):
        work = f"copy of {size}"
        for name in ("to a node", "from a node", "from node to node"):
            row = at_most(1 / 0.8, results.of(work, name), results.of(work, "memcpy"))
            report.rows.append(
                Row(f"{work} {name}", row.target, row.flowchan, row.peer, row.ratio, row.reached)
            )
    report.rows.append(_absolute(results.of("wait: item()"), ITEM_S))
    report.rows += [_plain(results.of(f"wait: {name}")) for name in ("sync()", "cpu() of 4 x 4 values")]
    for optimizer in ("SGD", "Adam"):
        for clock in CLOCKS.values():
            work = f"training step with {optimizer}, {clock}"
            report.rows.append(_plain(results.of(work), results.of(work, "local")))


def _absolute(mine: Result, most: float, how: str = "") -> Row:
    took = mine.figure()
    work = f"{mine.work}, {how}" if how else mine.work
    return Row(work, f"≤ {in_words(most, 's')}", in_words(took, "s"), "", "", took <= most)


def _plain(mine: Result, peer: Result | None = None) -> Row:
    other = in_words(peer.figure(), "s") if peer else ""
    return Row(
        mine.work, f"none; {peer.name}" if peer else "none", in_words(mine.figure(), "s"), other, "", True
    )


def _has_native() -> bool:
    """Return whether remote operations have a native part on this machine."""
    if not importlib.util.find_spec("flowchan_torch.native"):
        return False
    import flowchan_torch.native

    return flowchan_torch.native.load(flowchan_torch.native.COMMANDS) is not None


def _can_run(system: str) -> bool:
    if system == "flowchan_in_python":
        return _has_native()
    return system != "monarch" or "MONARCH_PYTHON" in os.environ or bool(importlib.util.find_spec("monarch"))


def _program(system: str, count: int) -> dict[str, Any]:
    """Run one of the programs in a new process, and return its figures."""
    python, environment = sys.executable, dict(os.environ)
    if system == "monarch":
        python = environment.get("MONARCH_PYTHON", python)
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # Monarch's Python may lack flowchan's backend
    command = [python, "-m", "benchmarks.remote_operations", system, str(max(1, count))]
    done = subprocess.run(command, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures

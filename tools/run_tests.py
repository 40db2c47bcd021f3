"""Run test files in several pytest processes, then run each failed test once more, alone.

usage: run_tests.py [--large WHICH] [--ignore FOLDER]... [PYTEST OPTIONS] [--files FILE...]

The files are dealt out in groups. Each group runs in one pytest process, several processes at a time. A
process thus collects only its own files, and its forks copy little memory. A group never mixes files that
load large libraries with others. Groups become smaller towards the end, so that all processes end together.

After all groups have ended, each failed test runs once more in its own pytest process. A test that fails in
both runs fails the whole run. A test that passes alone does not fail the run, but is listed with its duration
and the load average. Either the test or the product depends on the machine's load.

The whole run also fails if some tests have not run. Examples are a crashed process, a file that cannot be
collected, and a run that selects no tests.

Ctrl-C or SIGTERM ends the run and all its processes. A second one kills the processes at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import psutil

TESTS = Path(__file__).parents[1] / "tests"
sys.path.append(str(TESTS))
from support.long_files import LONG_FILES  # noqa: E402
from support.optional_packages import loads_large  # noqa: E402
from support.preloaded_programs import TORCH, SharedTemplate  # noqa: E402

# This is more than two cores can run at once, because tests wait for about half of the time. A test that
# hangs ends its process.
SIDE_BY_SIDE = 5
LEAST_BYTES = 80_000
"""Size of the last groups. The size of a file is a rough measure of the time that its tests take."""
MOST = 20
"""Maximum number of failed tests to run again. More failures are due to a change, not to load."""
END_WITHIN_S = 20.0
"""Seconds that interrupted pytest processes have for their teardown."""
PASSED, FAILED, NO_TESTS = 0, 1, 5
"""Exit statuses with which pytest reports that all tests of its files have run."""


@dataclass
class Test:
    """Failed test, with the duration and load average of its first run.

    If the run alone ended, its figures are included.
    """

    name: str
    first: tuple[float, float]
    alone: tuple[float, float] | None = None
    passed_alone: bool = False

    def __str__(self) -> str:
        alone = f"; alone {seconds_at(*self.alone)}" if self.alone else ""
        return f"  {self.name}: {seconds_at(*self.first)}{alone}"


def seconds_at(seconds: float, load: float) -> str:
    return f"{seconds:.1f} s at load {load:.1f}"


@dataclass
class Total:
    """The results of all groups."""

    began: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failed: list[Test] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, status: int, outcomes: dict[str, Any] | None) -> None:
        if outcomes is None or status not in (PASSED, FAILED, NO_TESTS):
            self.broken.append(f"pytest ended with status {status} before all tests had run")
        elif status == FAILED and not outcomes["failed"] and not outcomes["broken"]:
            self.broken.append("pytest failed, although none of its tests did")
        if outcomes is not None:
            self.broken += outcomes["broken"]
            self.failed += [Test(name, tuple(first)) for name, first in outcomes["failed"].items()]
            self.counts.update(outcomes["counts"])
            self.reasons.update(outcomes["reasons"])

    def show(self) -> int:
        """Print the lists and, as the last line, the totals in pytest's format. Return the exit status."""
        both = [test for test in self.failed if not test.passed_alone]
        first_only = [test for test in self.failed if test.passed_alone]
        for reason, count in self.reasons.most_common():
            print(f"skipped {count}: {reason}")
        if not self.failed and not self.broken and not self.counts.total():
            self.broken.append("no tests were selected")
        show_list("failed next to other tests, but passed alone:", first_only)
        show_list("failed:" if len(self.failed) > MOST else "failed next to other tests and alone:", both)
        show_list("not all tests have run:", [f"  {reason}" for reason in self.broken])
        passed = self.counts["passed"] + len(first_only)
        counts = {"failed": len(both), "passed": passed, "skipped": self.counts["skipped"]}
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        seconds = time.monotonic() - self.began
        print(f"{text or 'nothing'} in {seconds:.2f}s ({timedelta(seconds=int(seconds))})")
        return 1 if both or self.broken else 0


def show_list(title: str, lines: list[Any]) -> None:
    if lines:
        print(title)
    for line in lines:
        print(line)


def test_files(given: list[str], ignored: list[str]) -> Iterator[str]:
    """Yield the test files in the given files and folders; a file may be followed by ``::`` and a test."""
    left_out = [Path(one).resolve() for one in ignored]
    for one in given:
        path = Path(one.partition("::")[0])
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            if not any(file.resolve().is_relative_to(other) for other in left_out):
                yield str(file) if path.is_dir() else one


def groups(files: list[str]) -> Iterator[list[str]]:
    """Deal out the files: those that take longest first, one at a time, then groups of decreasing size."""
    sizes = {file: Path(file.partition("::")[0]).stat().st_size for file in files}
    long = [file for file in files if Path(file).name in LONG_FILES]
    yield from ([file] for file in long)
    others = [file for file in files if file not in long]
    left = sum(sizes[file] for file in others)
    group: list[str] = []
    for file in others:
        group.append(file)
        if sum(sizes[one] for one in group) >= max(left / (2 * SIDE_BY_SIDE), LEAST_BYTES):
            left -= sum(sizes[one] for one in group)
            yield group
            group = []
    if group:
        yield group


class Processes:
    """The pytest processes that are running."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._ends = False

    def call(self, command: list[str], output: IO[bytes]) -> int:
        """Run a command and return its exit status; run nothing after ``end()``."""
        with self._starting:
            if self._ends:
                return -signal.SIGKILL
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C must reach it only once, through end()
            )
            self._running.append(process)
        status = process.wait()
        self._running.remove(process)
        return status

    def end(self) -> None:
        """Interrupt all processes, and kill those that are left later, together with their descendants."""
        with self._starting:
            self._ends = True
        running, family = list(self._running), set(descendants())
        give_up = time.monotonic() + END_WITHIN_S
        with contextlib.suppress(RunInterrupted, subprocess.TimeoutExpired):
            for process in running:
                process.send_signal(signal.SIGINT)
            for process in running:
                process.wait(max(0.0, give_up - time.monotonic()))
        for left in family | set(descendants()):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


processes = Processes()


class RunInterrupted(KeyboardInterrupt):
    """Raised when SIGINT or SIGTERM arrives; ``args[0]`` is the signal's number."""


def interrupt(number: int, _: object) -> None:
    raise RunInterrupted(number)


def pytest_run(*arguments: str) -> tuple[int, dict[str, Any] | None, str]:
    """Run pytest; return its exit status, its outcomes and its output. The outcomes are ``None`` if pytest
    was killed before it wrote them."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "outcomes"
        command = [sys.executable, "-m", "pytest", f"--outcomes={kept}", *arguments]
        output = Path(folder) / "output"  # a leftover process of a test would keep a pipe open
        with output.open("wb") as file:
            status = processes.call(command, file)
        outcomes = json.loads(kept.read_text()) if kept.exists() else None
        return status, outcomes, output.read_text(errors="replace")


def run_alone(test: Test, options: list[str]) -> None:
    """Run a test in its own process."""
    print(f"running once more, alone: {test.name}", flush=True)
    load = os.getloadavg()[0]
    # Drop --only-long: pytest needs all parameters of a test to find the longer ones, but collects only one
    # here.
    options = [option for option in options if option != "--only-long"]
    status, outcomes, output = pytest_run(*options, test.name)
    print(output, end="", flush=True)
    if outcomes is not None:
        test.alone = outcomes["in_tests"], load
        test.passed_alone = status == PASSED and outcomes["counts"]["passed"] == 1


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, usage=__doc__)
    parser.add_argument("--large", choices=["with", "without"])
    parser.add_argument("--ignore", action="append", default=[])
    parser.add_argument("--files", nargs="*", default=["tests"])
    known, options = parser.parse_known_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore SIGINT
        signal.signal(number, interrupt)
    ignored = known.ignore if "--hosts" in options else [*known.ignore, str(TESTS / "hosts_real")]
    files = list(test_files(known.files, ignored))
    loading = {file for file in files if loads_large(Path(file.partition("::")[0]))}
    runs = []
    if known.large != "with":
        runs += [("without", group) for group in groups([file for file in files if file not in loading])]
    if known.large != "without":
        runs += [("with", group) for group in groups([file for file in files if file in loading])]
    total = Total()
    with contextlib.closing(SharedTemplate(*TORCH)) as template, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        options = [f"--torch-programs={template.name.hex()}", *options]
        running = [pool.submit(pytest_run, "--large", large, *options, *group) for large, group in runs]
        try:
            for ended in as_completed(running):
                status, outcomes, output = ended.result()
                print(output, end="", flush=True)
                total.add(status, outcomes)
            if len(total.failed) <= MOST:
                for test in total.failed:
                    run_alone(test, options)
        except RunInterrupted as interrupted:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()
            return 128 + int(interrupted.args[0])
    return total.show()


sys.exit(main())

"""Run test files in several pytest processes, then run each failed test once more, alone.

usage: run_tests.py [--large WHICH] [--ignore FOLDER]... [PYTEST OPTIONS] [--files FILE...]

The files are dealt out in groups. Each group runs in one pytest process, several processes at a time. A
process thus collects only its own files, and its forks copy little memory. A group never mixes files that
load large libraries with others. Groups become smaller towards the end, so that all processes end together.
The processes are forks of a program that has already imported pytest, flowchan and, for files that need it,
torch.

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import psutil

Popen = Callable[..., subprocess.Popen[Any]]
TESTS = Path(__file__).parents[1] / "tests"
sys.path.append(str(TESTS))
from support.long_files import LONG_FILES  # noqa: E402
from support.optional_packages import loads_large  # noqa: E402
from support.preloaded_programs import TORCH, SharedTemplate, Template  # noqa: E402

# The number of processes exceeds the two cores, because tests spend about half of their time waiting. If a
# test hangs, pytest ends its process.
SIDE_BY_SIDE = 5
LEAST_BYTES = 50_000
"""Size of the last groups. The size of a file is a rough measure of the time that its tests take."""
MOST = 20
"""Maximum number of failed tests to run again. More failures are due to a change, not to load."""
SMALL = (
    "pytest",
    "psutil",
    "cloudpickle",
    "numpy",
    "flowchan.hosts",
    "flowchan.pipelines.barriers",
    "flowchan.pipelines.client_server",
    "flowchan.pipelines.parameter_server",
    "flowchan.pipelines.task_pool",
    "flowchan.pipelines.work_queue",
)
IMPORTED = {
    "without": SMALL,
    "with": (*SMALL, "torch", "flowchan.pipelines.sequential"),
}
"""Modules to import once for all groups. pytest's plugins are missing, because pytest must rewrite them."""
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
        if sum(sizes[one] for one in group) >= max(left / (3 * SIDE_BY_SIDE), LEAST_BYTES):
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

    def call(self, start: Popen, arguments: list[str], output: IO[bytes]) -> int:
        """Run ``python *arguments`` and return its exit status; run nothing after ``end()``."""
        with self._starting:
            if self._ends:
                return -signal.SIGKILL
            process = start(
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach it only once, through end()
            )
            self._running.append(process)
        status = process.wait()
        self._running.remove(process)
        return status

    def end(self) -> None:
        """Interrupt all processes, and later kill those that remain, together with their descendants."""
        with self._starting:
            self._ends = True
        running, family = list(self._running), set(descendants())
        give_up = time.monotonic() + END_WITHIN_S
        with contextlib.suppress(RunInterrupted):
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)
            while self._running and time.monotonic() < give_up:  # other threads wait for these processes
                time.sleep(0.02)
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


def new_program(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, *arguments], **options)


def pytest_run(start: Popen, *arguments: str) -> tuple[int, dict[str, Any] | None, str]:
    """Run pytest; return its exit status, its outcomes and its output. The outcomes are ``None`` if pytest
    was killed before it wrote them."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "outcomes"
        command = ["-m", "pytest", f"--outcomes={kept}", *arguments]
        output = Path(folder) / "output"  # a leftover process of a test would keep a pipe open
        with output.open("wb") as file:
            status = processes.call(start, command, file)
        outcomes = json.loads(kept.read_text()) if kept.exists() else None
        return status, outcomes, output.read_text(errors="replace")


def run_alone(test: Test, options: list[str]) -> None:
    """Run a test in its own process, which imports all modules itself."""
    print(f"running once more, alone: {test.name}", flush=True)
    load = os.getloadavg()[0]
    # Drop --only-long: pytest needs all parameters of a test to find the longer ones, but collects only one
    # here.
    options = [option for option in options if option != "--only-long"]
    status, outcomes, output = pytest_run(new_program, *options, test.name)
    print(output, end="", flush=True)
    if outcomes is not None:
        test.alone = outcomes["in_tests"], load
        test.passed_alone = status == PASSED and outcomes["counts"]["passed"] == 1


@contextlib.contextmanager
def forking(*modules: str) -> Iterator[Popen]:
    """Provide a function that starts programs as forks of a program that has imported these modules."""
    template = Template(*modules)
    try:
        yield template.popen
    finally:
        template.kill()


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
    with contextlib.ExitStack() as templates, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        starts = {
            large: templates.enter_context(forking(*IMPORTED[large])) if count > 1 else new_program
            for large, count in Counter(large for large, _ in runs).items()
        }
        shared = templates.enter_context(contextlib.closing(SharedTemplate(*TORCH)))
        options = [f"--torch-programs={shared.name.hex()}", *options]
        running = [
            pool.submit(pytest_run, starts[large], "--large", large, *options, *group)
            for large, group in runs
        ]
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

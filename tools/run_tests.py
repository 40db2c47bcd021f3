"""Run tests in several processes, then run each failed test once more, alone.

usage: run_tests.py [--part OPTIONS]... [PYTEST OPTIONS] [--files FILE...]

Each part is one pytest run with its own options; the parts run one at a time. After all of them have ended,
each failed test runs once more in its own pytest process. A test that fails in both runs fails the whole run.
A test that passes alone does not fail the run, but it is listed with its duration and the load average. In
this case, the test or the product depends on the machine's load.

The whole run also fails if some tests have not run. This happens if a worker crashes, if a file cannot be
collected, or if a pytest process exits abnormally.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

# Use more processes than the two cores can run at once, because tests wait for about half of the time. If a
# test hangs, its process is ended.
SIDE_BY_SIDE = ("-n", "5", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")
MOST = 20
"""Maximum number of failed tests that are run again. More failures are caused by a change, not by load."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest that mean that all tests have run."""


@dataclass
class Test:
    """Failed test, with the duration and load average of its first run and, if it ended, of the run alone."""

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
    """Results of all parts."""

    seconds: float = 0
    counts: dict[str, int] = field(default_factory=dict)
    failed: list[Test] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, status: int, outcomes: dict[str, Any] | None) -> None:
        if outcomes is None or status not in (PASSED, FAILED):
            self.broken.append(f"pytest ended with status {status} before all tests had run")
        elif status == FAILED and not outcomes["failed"] and not outcomes["broken"]:
            self.broken.append("pytest failed, although none of its tests did")
        if outcomes is not None:
            self.seconds += outcomes["seconds"]
            self.broken += outcomes["broken"]
            self.failed += [Test(name, tuple(first)) for name, first in outcomes["failed"].items()]
            for outcome, count in outcomes["counts"].items():
                self.counts[outcome] = self.counts.get(outcome, 0) + count

    def show(self) -> int:
        """Print the lists and, as the last line, the totals in pytest's format. Return the exit status."""
        both = [test for test in self.failed if not test.passed_alone]
        first_only = [test for test in self.failed if test.passed_alone]
        show_list("failed next to other tests, but passed alone:", first_only)
        show_list("failed:" if len(self.failed) > MOST else "failed next to other tests and alone:", both)
        show_list("not all tests have run:", [f"  {reason}" for reason in self.broken])
        passed = self.counts.get("passed", 0) + len(first_only)
        counts = {"failed": len(both), "passed": passed, "skipped": self.counts.get("skipped", 0)}
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        print(f"{text or 'nothing'} in {self.seconds:.2f}s ({timedelta(seconds=int(self.seconds))})")
        return 1 if both or self.broken else 0


def show_list(title: str, lines: list[Any]) -> None:
    if lines:
        print(title)
    for line in lines:
        print(line)


def pytest_run(*arguments: str) -> tuple[int, dict[str, Any] | None]:
    """Run pytest. Return its exit status and its outcomes, or None if pytest was killed before it wrote
    them."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "outcomes"
        status = subprocess.call([sys.executable, "-m", "pytest", f"--outcomes={kept}", *arguments])
        return status, json.loads(kept.read_text()) if kept.exists() else None


def run_alone(test: Test, options: list[str]) -> float:
    """Run a test in its own process, and return how many seconds it took."""
    print(f"running once more, alone: {test.name}", flush=True)
    load = os.getloadavg()[0]
    # pytest decides from all parameters of a test which ones are longer, and here it collects only one
    options = [option for option in options if option != "--only-long"]
    status, outcomes = pytest_run(*options, "-n", "0", test.name)
    if outcomes is not None:
        test.alone = outcomes["in_tests"], load
        test.passed_alone = status == PASSED and outcomes["counts"]["passed"] == 1
    return outcomes["seconds"] if outcomes else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, usage=__doc__)
    parser.add_argument("--part", action="append", default=[])
    parser.add_argument("--files", nargs="*", default=[])
    known, options = parser.parse_known_args()
    total = Total()
    for part in known.part or [""]:
        total.add(*pytest_run(*SIDE_BY_SIDE, *shlex.split(part), *options, *known.files))
    if len(total.failed) <= MOST:
        for test in total.failed:
            total.seconds += run_alone(test, options)
    return total.show()


sys.exit(main())

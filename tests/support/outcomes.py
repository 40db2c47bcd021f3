"""Record the outcomes of a pytest run, so that ``tools/run_tests.py`` can run each failed test once more."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path

import pytest


class Outcomes:
    """Collect the reports of one run, and write them to ``file`` when the session ends.

    Under pytest-xdist, the controller runs this plugin and gets the reports of all workers. A crashed worker
    makes the run ``broken``, and so does a file that cannot be collected. In that case, some tests have not
    run, and repeating a test would reveal nothing more.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.began = time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)
        self.ended: dict[str, set[str]] = {"passed": set(), "skipped": set()}
        self.failed: dict[str, float] = {}
        """Load average at each failure."""
        self.broken: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid} could not be collected")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if error:
            self.broken.append(f"a worker crashed: {error}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += getattr(report, "duration", 0)  # the report of a crash has no duration
        if report.failed:
            self.failed.setdefault(report.nodeid, os.getloadavg()[0])
        elif report.skipped or report.when == "call":
            self.ended[report.outcome].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        found = {
            "seconds": time.monotonic() - self.began,
            "in_tests": sum(self.seconds.values()),
            "counts": {outcome: len(tests - self.failed.keys()) for outcome, tests in self.ended.items()},
            "failed": {test: (self.seconds[test], load) for test, load in self.failed.items()},
            "broken": self.broken,
        }
        self.file.write_text(json.dumps(found))

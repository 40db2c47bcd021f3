"""Record the outcomes of a pytest run, so that ``tools/run_tests.py`` can run each failed test once more."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest


class Outcomes:
    """Collect the reports of one run, and write them to ``file`` when the session ends.

    If a file cannot be collected, the run is ``broken``: some tests have not run, and repeating a failed test
    would not change that.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, float] = defaultdict(float)
        self.ended: dict[str, set[str]] = {"passed": set(), "skipped": set()}
        self.failed: dict[str, float] = {}
        """Load average at each failure."""
        self.broken: list[str] = []
        self.reasons: Counter[str] = Counter()
        """Number of skipped tests by reason."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid} could not be collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.setdefault(report.nodeid, os.getloadavg()[0])
        elif report.skipped or report.when == "call":
            self.ended[report.outcome].add(report.nodeid)
            if report.skipped and isinstance(report.longrepr, tuple):
                self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self) -> None:
        found = {
            "in_tests": sum(self.seconds.values()),
            "counts": {outcome: len(tests - self.failed.keys()) for outcome, tests in self.ended.items()},
            "failed": {test: (self.seconds[test], load) for test, load in self.failed.items()},
            "broken": self.broken,
            "reasons": self.reasons,
        }
        self.file.write_text(json.dumps(found))

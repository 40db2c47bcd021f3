"""Run tests of PyTorch's own suite of torch.distributed with some backends, and print their outcomes.

    python torch_suite.py FOLDER BACKEND,… [TEST…]

The tests come from ``torch.testing._internal.distributed.distributed_test`` in the installed torch. All tests
run if none is named. Each test runs on three ranks. The last line of the output is a JSON object. For each
backend, it has the outcome of each test: "passed", "skipped: REASON" or "failed: ERROR".
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import flowchan.collective.torch.backend  # noqa: F401 - once, before the ranks are forked

RANKS = 3
SECONDS = 120
"""Time limit of one test."""
GATE = "gloo"
"""Backend that the suite selects its tests for. Other backends can run these tests."""


def suite_in(folder: Path) -> type[unittest.TestCase]:
    """Return the suite's test case, with its files in ``folder``."""
    os.environ |= {
        "BACKEND": GATE,
        "WORLD_SIZE": str(RANKS),
        "INIT_METHOD": f"file://{folder}/store",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    # torch's tests import this module to compare recorded output, which this suite never does
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore
    suite: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")

    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchSuite


_init_of_torch = torch.distributed.init_process_group


def _init(actual: str, *, backend: str, **options: Any) -> None:
    assert backend == GATE
    _init_of_torch(actual, **options)


class Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._add(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._add(test, f"skipped: {reason}")

    def addFailure(self, test: Any, error: Any) -> None:  # noqa: N802
        self._add(test, f"failed: {error[1]}")

    addError = addFailure  # noqa: N815

    def _add(self, test: Any, outcome: str) -> None:
        self.found[test._testMethodName] = outcome
        print(test._testMethodName, outcome, file=sys.stderr, flush=True)


def main(folder: str, backends: str, *names: str) -> None:
    case, found = suite_in(Path(folder)), {}
    for backend in backends.split(","):
        # tests check the backend's name, so they see GATE, while their process groups use ``backend``
        torch.distributed.init_process_group = functools.partial(_init, backend)  # type: ignore[assignment]
        outcomes = Outcomes()
        for name in names or unittest.TestLoader().getTestCaseNames(case):
            case(name).run(outcomes)
        found[backend] = outcomes.found
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run the contract suite on the Python queue, which serves threads if the native module is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
LEAST = 330
"""Minimum number of contract tests for channels between threads. Fewer tests mean that the selection is
wrong."""


@pytest.mark.timeout(900)
def test_contract_suite_passes_on_the_python_queue(tmp_path: Path) -> None:
    """C1 to C15: only the tests of channels between threads can run."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "tests/contract", "-k", "threads", f"--junitxml={report}"]
    env = os.environ | {"FLOWCHAN_PURE_PYTHON": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    (found,) = ElementTree.parse(report).getroot()
    assert int(found.attrib["tests"]) - int(found.attrib["skipped"]) >= LEAST

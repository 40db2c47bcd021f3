"""A new transport needs only an entry in the factory for the contract suite to run on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.timeout(500)
def test_toy_transport_passes_the_whole_contract() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    command = [sys.executable, "-m", "pytest", "-p", "toy", "-k", "toy", str(HERE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 400


@pytest.mark.timeout(500)
def test_a_new_transport_runs_every_test_per_transport() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    options = ["-p", "toy", "-o", "addopts=", "-q", "--collect-only"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    transports: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        test, _, parameters = line.partition("[")
        transports.setdefault(test, set()).update(re.findall(r"\b(?:threads|processes|toy)\b", parameters))
    on_each = [test for test in transports if {"threads", "processes"} <= transports[test]]
    assert len(on_each) > 200
    assert not [test for test in on_each if "toy" not in transports[test]]

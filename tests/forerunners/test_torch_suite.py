"""PyTorch's own suite of torch.distributed passes with flowchan wherever it passes with gloo.

``make test`` runs part of the suite, and ``--long`` runs all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
from support.preloaded_programs import Template

PROGRAM = Path(__file__).with_name("torch_suite.py")
PART = [
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_all_gather_coalesced_complex",
    "test_barrier_timeout_full_group",
    "test_get_backend",
    "test_monitored_barrier_gloo_subgroup",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
]
EXCEPTIONS = {"test_get_backend": "expects the name gloo"}
"""Tests that pass only with gloo, with the reason."""


def outcomes(programs: Template, folder: Path, names: list[str]) -> list[dict[str, str]]:
    """Run the tests of the suite with gloo and with flowchan, and return each outcome."""
    program = programs.popen(
        *("-W", "ignore", PROGRAM, folder, "gloo,flowchan", *names),
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    output, _ = program.communicate()
    found = json.loads(output.splitlines()[-1])
    return [found["gloo"], found["flowchan"]]


def compare(programs: Template, folder: Path, names: list[str]) -> int:
    """Compare the outcomes with both backends, and return the number of tests that pass with gloo."""
    gloo, ours = outcomes(programs, folder, names)
    passed = {name for name, outcome in gloo.items() if outcome == "passed"}
    worse = {name: ours[name] for name in passed if ours[name] != "passed"}
    unexpected = [f"{name} {outcome}" for name, outcome in worse.items() if name not in EXCEPTIONS]
    assert not unexpected, "\n".join(unexpected)
    assert not [name for name in EXCEPTIONS if name in passed and name not in worse]
    return len(passed)


def test_part_of_the_torch_suite_passes_as_with_gloo(torch_programs: Template, tmp_path: Path) -> None:
    assert compare(torch_programs, tmp_path, PART) == len(PART)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_whole_torch_suite_passes_as_with_gloo(torch_programs: Template, tmp_path: Path) -> None:
    """Torch 2.13 without GPUs runs 91 of its 285 tests on three ranks, and skips the other tests."""
    assert compare(torch_programs, tmp_path, []) >= 90

"""Test that the parameter server example trains, answers queries, and survives a killed trainer."""

from __future__ import annotations

import re
from pathlib import Path

from support.preloaded_programs import Template

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"
BATCHES = 44  # per epoch


def test_inference_follows_the_training_even_if_a_trainer_is_killed(torch_programs: Template) -> None:
    done = torch_programs.run(EXAMPLE, "--epochs", 8)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines.count("a trainer was killed") == 1
    lines.remove("a trainer was killed")
    found = [
        re.fullmatch(r"loss \d\.\d+, weights (\d+): (\d+\.\d)% of held-out digits are correct", line)
        for line in lines
    ]
    assert all(found)
    versions, right = zip(*(match.groups() for match in found if match), strict=True)
    assert [int(version) for version in versions] == list(range(1, 8 * BATCHES // 40 + 1))
    assert float(right[-1]) >= 80
    pushes = re.fullmatch(r"(\d+) pushes, at most \d+ versions late", last)
    assert pushes
    assert int(pushes[1]) >= 8 * BATCHES

"""Test that the remote training example trains on both nodes, with the same result as locally."""

from __future__ import annotations

import re
from pathlib import Path

from support.preloaded_programs import Template

EXAMPLE = Path(__file__).parents[2] / "examples" / "remote_training.py"
EPOCHS = 3


def test_each_layer_runs_on_its_node_and_training_equals_local(torch_programs: Template) -> None:
    done = torch_programs.run(EXAMPLE, "--epochs", EPOCHS)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    losses, layers, nodes = lines[:EPOCHS], lines[EPOCHS : EPOCHS + 7], lines[EPOCHS + 7 : EPOCHS + 9]
    right, *local, last = lines[EPOCHS + 9 :]
    assert [line.split(":")[0] for line in losses] == [f"epoch {number + 1}" for number in range(EPOCHS)]
    assert local == losses
    placed = [re.fullmatch(r"(first|second)\.\d \w+\(.*\) ran on remote:(\d)", line) for line in layers]
    assert [match and match.groups() for match in placed] == [("first", "0")] * 4 + [("second", "1")] * 3
    for number, line in enumerate(nodes):
        counts = re.fullmatch(rf"node {number}: (\d+) commands, (\d+) waits", line)
        assert counts
        assert int(counts[1]) > 200
        assert int(counts[2]) < 2 * EPOCHS
    assert float(right.partition("%")[0]) > 60
    assert last == "the parameters are equal to those of local training"

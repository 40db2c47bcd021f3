"""Run the training example as a user would.

The losses are equal with and without a pipeline, and the network recognises held-out digits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.preloaded_programs import Template

EXAMPLE = Path(__file__).parents[2] / "examples" / "sequential_training.py"


def lines_of(programs: Template, *arguments: object) -> list[str]:
    done = programs.run(EXAMPLE, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_plain_and_pipelined_training_have_equal_losses(
    torch_programs: Template, tmp_path: Path, long_walk: bool
) -> None:
    number, loss, share = (8, 0.1, 95) if long_walk else (5, 0.5, 85)
    head, *epochs, plain, in_parts, same, picture = lines_of(
        torch_programs, "--epochs", number, "--picture", tmp_path / "steps.json"
    )
    assert head == "epoch  plain loss  in parts"
    rows = [line.split() for line in epochs]
    assert [int(epoch) for epoch, _, _ in rows] == list(range(1, number + 1))
    assert all(one == other for _, one, other in rows)
    assert float(rows[-1][1]) < loss < float(rows[0][1])
    for name, line in (("plain", plain), ("in parts", in_parts)):
        found = re.fullmatch(rf"{name}: (\d+\.\d)% of the held-out digits, \d+\.\d s", line)
        assert found, line
        assert float(found[1]) >= share
    assert same.startswith("the same curve from Sequential: part 0 (layers '0' to ")
    assert picture == f"{tmp_path / 'steps.json'} shows the last steps"
    names = {event["name"] for event in json.loads((tmp_path / "steps.json").read_text())["traceEvents"]}
    assert {"F 0", "B 3", "update"} <= names


def test_pipe_with_different_options_has_equal_losses(torch_programs: Template) -> None:
    arguments = ("--epochs", 1, "--on", "thread", "--parts", 3, "--schedule", "gpipe")
    _, *rows, _, _, same = lines_of(torch_programs, *arguments)
    assert [one == other for _, one, other in map(str.split, rows)] == [True]
    assert same.count("part ") == 3

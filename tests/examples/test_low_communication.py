"""Run a short version of the low-communication training example as a user would."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from support.preloaded_programs import Template

EXAMPLE = Path(__file__).parents[2] / "examples" / "low_communication.py"
NAMES = ["plain SGD, one process", "Downpour", "ElasticAveraging", "DiLoCo", "AsySGInCon"]


def test_each_algorithm_learns_the_digits(torch_programs: Template, tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    done = torch_programs.run(EXAMPLE, "--workers", 2, "--steps", 80, "--curves", picture)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert last == f"wrote the curves to {picture}"
    found = [
        re.fullmatch(r"(.*): (\d+\.\d)% of the held-out digits are misclassified after 80 steps", line)
        for line in lines
    ]
    assert [one[1] for one in found if one] == NAMES
    assert all(float(one[2]) < 50 for one in found if one)  # an untrained model misclassifies 90 %
    drawn = ElementTree.parse(picture).getroot()
    curves = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(curve.attrib["points"].split()) for curve in curves] == [17] * 5

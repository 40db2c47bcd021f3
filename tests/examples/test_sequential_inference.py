"""The example is run as a user runs it; what it prints is compared with the plain network's answers, computed
here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sequential_inference.py"

PLAIN = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from sequential_inference import digits, learn, network
torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = digits()
module = network()
learn(module, images[::2], labels[::2])
right = (module(images[1::2]).argmax(1) == labels[1::2]).double()
print(f"{torch.cat([right, right[:512]]).mean():.2%}")
"""


def python(*arguments: object) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def plain_share() -> str:
    """How many of the answers are right without a pipeline."""
    return python("-c", PLAIN, EXAMPLE.parent).strip()


@pytest.mark.parametrize(("on", "parts"), [("process", 2), ("thread", 3)])
def test_sequential_inference_gives_the_answers_of_the_plain_network(
    on: str, parts: int, plain_share: str
) -> None:
    head, sequential, pipelined, last = python(
        EXAMPLE, "--batches", 3, "--on", on, "--parts", parts
    ).splitlines()
    assert head == "1,410 images in 3 batches"
    share = re.fullmatch(r"sequential (\d+\.\d\d%) right in \d+\.\d\d s", sequential)
    assert share, sequential
    assert share[1] == plain_share
    assert re.fullmatch(rf"pipelined  {share[1]} right in \d+\.\d\d s", pipelined)
    assert float(share[1][:-1]) > 90
    assert last.startswith("the same answers from Sequential: part 0 (layers '0' to ")
    assert last.count("part ") == parts

"""Run the inference example as a user would, and compare its output with the plain network's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from support.preloaded_programs import Template

EXAMPLE = Path(__file__).parents[2] / "examples" / "sequential_inference.py"


@pytest.fixture(scope="module")
def plain_share(one_compute_thread: None) -> str:
    """Return the accuracy without a pipeline, as text."""
    example = runpy.run_path(str(EXAMPLE))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, labels = example["digits"]()
        module = example["network"]()
        example["learn"](module, images[::2], labels[::2])
    right = (module(images[1::2]).argmax(1) == labels[1::2]).double()
    return f"{torch.cat([right, right[:512]]).mean():.2%}"


@pytest.mark.parametrize(("on", "parts"), [("process", 2), ("thread", 3)])
def test_sequential_inference_matches_the_plain_network(
    torch_programs: Template, on: str, parts: int, plain_share: str
) -> None:
    done = torch_programs.run(EXAMPLE, "--batches", 3, "--on", on, "--parts", parts)
    assert (done.returncode, done.stderr) == (0, "")
    head, sequential, pipelined, last = done.stdout.splitlines()
    assert head == "1,410 images in 3 batches"
    share = re.fullmatch(r"sequential (\d+\.\d\d%) right in \d+\.\d\d s", sequential)
    assert share, sequential
    assert share[1] == plain_share
    assert re.fullmatch(rf"pipelined  {share[1]} right in \d+\.\d\d s", pipelined)
    assert float(share[1][:-1]) > 90
    assert last.startswith("the same answers from Sequential: part 0 (layers '0' to ")
    assert last.count("part ") == parts

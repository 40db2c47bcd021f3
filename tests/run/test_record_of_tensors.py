"""Test recordings of tensors. A recording is read without the memory of the run that wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import run_python, script
from support.optional_packages import optional

from flowchan import Graph, Recording

torch = optional("torch")


@pytest.mark.usefixtures("torch_programs")
def test_tensors_are_recorded_with_their_contents(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import torch
        from flowchan import Graph


        def made(number):
            shared = torch.full((3,), number).share_memory_()
            return shared, torch.full((2, 3), number).T, torch.ones(2, requires_grad=True), torch.empty(0)


        def total(tensors):
            return int(tensors[0].sum())


        graph = Graph()
        made = graph.source(range(5)).map(made, on="process", name="made")
        totals = made.map(total, on="process").collect()
        graph.record("made", "items.rec")
        print(graph.run()[totals])
        """,
    )
    assert run_python(program, cwd=tmp_path) == "[0, 3, 6, 9, 12]\n"
    recording = Recording(tmp_path / "items.rec")
    for number, (shared, turned, leaf, empty) in enumerate(recording):
        assert shared.tolist() == [number] * 3
        assert turned.tolist() == [[number] * 2] * 3
        assert (leaf.requires_grad, leaf.tolist(), empty.shape) == (True, [1, 1], (0,))
        shared += 1  # the tensor is a copy, so the file does not change
    assert int(recording[4][0][0]) == 4


def test_shared_tensor_of_the_program_stays_shared_with_the_readers(tmp_path: Path) -> None:
    tensor = torch.zeros(4).share_memory_()
    graph = Graph()
    graph.source([tensor], name="tensors").sink(lambda shared: shared.fill_(1), on="process")
    graph.record("tensors", tmp_path / "items.rec")
    graph.run()
    assert tensor.tolist() == [1] * 4
    assert Recording(tmp_path / "items.rec")[0].tolist() == [0] * 4

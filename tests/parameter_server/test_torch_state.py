"""Test that a parameter server stores torch tensors of any dtype and fills modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
from support.optional_packages import optional
from support.waiting import WAIT_LIMIT_S

from flowchan.pipelines import ParameterServer

torch = optional("torch")


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("on", ["thread", "process"])
def test_pull_fills_a_module_with_one_version(on: str, shards: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    with ParameterServer(model.state_dict(), on=on, shards=shards) as server:
        client = server.client()
        steps = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        client.push(steps, scale=-0.5).wait(WAIT_LIMIT_S)
        assert client.pull(out=model) is model
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name] - (0.5 if name in steps else 0))


@pytest.mark.usefixtures("one_compute_thread")
@pytest.mark.parametrize("rule", ["add", "copy"])
def test_push_of_tensors_takes_no_private_pages_in_the_server(rule: str) -> None:
    pushes, size = 4, 16 << 20
    ones = np.ones(size // 4, np.float32)
    with ParameterServer({"w": torch.zeros(size // 4)}, on="process") as server:
        client = server.client()

        def page_faults(count: int) -> int:
            before = faults_of_children()
            for _ in range(count):
                client.push({"w": torch.from_numpy(ones)}, rule=rule).wait(WAIT_LIMIT_S)
            return faults_of_children() - before

        # A push faults on memory of the channel that no earlier push has used. How many pushes do so depends
        # on how fast the server frees memory, so use the lowest of five counts.
        lowest = min(page_faults(pushes) for _ in range(5))
        # The kernel maps at most 16 pages of 4 KB per fault.
        assert lowest < pushes * size / (16 * 4096) / 4


def faults_of_children() -> int:
    """Return how many page faults without I/O all children of this process have had."""
    stats = [
        Path(f"/proc/{child.pid}/stat").read_text() for child in psutil.Process().children(recursive=True)
    ]
    return sum(int(line.rpartition(")")[2].split()[7]) for line in stats)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int64", "bool"])
def test_pull_returns_tensors_of_each_dtype_unchanged(dtype: str) -> None:
    first = torch.tensor([0, 1, 1]).to(getattr(torch, dtype))
    with ParameterServer({"x": first, "none": first[:0], "one": first[1]}) as server:
        client = server.client()
        found = client.pull()
        assert torch.equal(found["x"], first)
        assert found["x"].dtype == first.dtype
        assert found["none"].shape == (0,)
        assert found["one"].shape == ()
        client.push({"x": first.flip(0)}, rule="copy").wait(WAIT_LIMIT_S)
        assert torch.equal(client.pull()["x"], first.flip(0))


def test_parameters_and_arrays_can_be_pushed_to_tensors() -> None:
    with ParameterServer({"x": torch.zeros(2)}) as server:
        client = server.client()
        client.push({"x": torch.nn.Parameter(torch.ones(2))})
        client.push({"x": np.ones(2, np.float32)}).wait(WAIT_LIMIT_S)
        assert client.pull()["x"].tolist() == [2, 2]
        out = {"x": np.zeros(2, np.float32)}
        client.pull(out=out)
        assert out["x"].tolist() == [2, 2]

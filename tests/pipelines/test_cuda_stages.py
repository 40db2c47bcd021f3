"""Use a CUDA device in stages, data sets, and messages between a server and a client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.optional_packages import optional
from support.peers import ThreadPeer
from support.waiting import WAIT_LIMIT_S

from flowchan import Graph
from flowchan.pipelines import Client, Server, dataset

torch = optional("torch")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run the tests on a machine that has one"
)


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """Replace the check for leftovers: once CUDA has been used, it keeps threads and descriptors."""


SHARED_DEVICE = """
import multiprocessing, torch
from flowchan import Graph

class Scale:
    def __init__(self):
        self.factor = torch.full((1000,), 3.0, device="cuda:0")

    def __call__(self, x):
        return x.to("cuda:0") * self.factor

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    graph = Graph("devices")
    items = graph.source([torch.full((1000,), float(n)) for n in range(40)])
    scaled = items.map(Scale, on="process", workers=2, gpus=0.5)
    totals = scaled.map(lambda x: (x.device.type, float(x.sum()))).collect()
    found = graph.run()[totals]
    assert found == [("cuda", 3000.0 * n) for n in range(40)], found
    print("equal")
"""


def test_two_workers_share_a_device_and_pass_tensors_on_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARED_DEVICE)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=2 * WAIT_LIMIT_S, check=False
    )
    assert done.stdout.endswith("equal\n"), done.stderr


def test_dataset_pins_its_tensors() -> None:
    data = dataset(Graph("pinned").source([{"x": torch.ones(4)}]), pin_memory=True)
    (item,) = list(data)
    assert item["x"].is_pinned()


def grid() -> torch.Tensor:
    return torch.arange(360.0).reshape(3, 4, 5, 6)


VIEWS = {
    "whole": grid,
    "sliced": lambda: grid()[1:, ::2, 1:4, 2:5],
    "transposed": lambda: grid().transpose(0, 2),
    "no elements": lambda: torch.zeros(0, 3),
    "no dimensions": lambda: torch.tensor(7.0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_host_tensors_can_be_received_into_device_tensors(view: str) -> None:
    """testCUDAStoragePingPong, testCUDATensor, testNoncontiguousCUDATensor."""
    with Server() as server:

        def send() -> None:
            with Client(server.address, server.secret) as client:
                client.send(VIEWS[view]())

        peer = ThreadPeer(send)
        (client,) = server.clients(1)
        into = torch.full_like(VIEWS[view](), -1, device="cuda")
        assert torch.equal(client.recv(into=into).cpu(), VIEWS[view]())
        peer.result()

"""Test nodes on hosts and on this machine, separately and together, and the path of copies between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.optional_packages import optional
from support.preloaded_programs import ONE_THREAD

from flowchan.hosts import local

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

WAIT_S = 60
ROW = 1 << 18
"""Number of float32 elements in 1 MB."""


@pytest.fixture(autouse=True, scope="module")
def _agents_share_one_import_of_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Import torch once, in the agents' fork server."""
    folder = tmp_path_factory.mktemp("preload")
    (folder / "sitecustomize.py").write_text("import torch\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():  # a process can be forked only while it has a single thread
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def two_nodes(one_compute_thread: None) -> Iterator[Any]:
    """Provide two nodes on this machine. The agents' fork server outlives the nodes."""
    from flowchan.pipelines import RemoteNodes

    with RemoteNodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def host_nodes(two_nodes: Any) -> Iterator[Any]:
    """Provide a node on each of three hosts."""
    from flowchan.pipelines import RemoteNodes

    with RemoteNodes(3, on=local(3)) as nodes:
        yield nodes


def numbers(size: int, start: int = 0) -> Any:
    return torch.arange(start, start + size, dtype=torch.float32)


def test_operations_and_autograd_run_on_hosts(host_nodes: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    x = torch.randn(4, 6)
    found = []
    for device in ("cpu", host_nodes[1]):
        model.to(device).zero_grad()
        loss = (model(x.to(device)) ** 2).mean()
        loss.backward()
        gradients = [one.grad.cpu().clone() for one in model.parameters()]
        found.append([loss.detach().cpu(), *gradients])
    assert all(map(torch.equal, *found))


def test_copies_between_hosts_work_in_both_directions_and_around_ring(host_nodes: Any) -> None:
    a, b, c = host_nodes
    source = numbers(2 * ROW).to(a)
    there = source.to(b)
    source.zero_()
    for _ in range(10):
        ring = (there.to(c) + 1).to(a)
        there = (ring + there.to(a)).to(b)
    expected = numbers(2 * ROW)
    for _ in range(10):
        expected = (expected + 1) + expected
    assert torch.equal(there.cpu(), expected)


def test_gradient_flows_from_host_to_host(host_nodes: Any) -> None:
    a, b, c = host_nodes
    w = numbers(4).to(a).requires_grad_()
    ((w * 2).to(b) ** 2).to(c).sum().backward()
    assert w.grad.device == a
    assert w.grad.tolist() == [0.0, 8.0, 16.0, 24.0]


def test_copies_between_hosts_do_not_pass_through_the_program(host_nodes: Any) -> None:
    """The program's network traffic does not grow with the size of the copies."""
    a, b, c = host_nodes
    copied = torch.ones(8 * ROW, device=a)
    copied.to(b).to(c)[0].item()
    before = received_and_sent()
    for target in (b, c, a, b):
        copied = copied.to(target)
    assert copied.sum().item() == 8 * ROW
    assert received_and_sent() - before < ROW


def received_and_sent() -> int:
    """Return the number of bytes that this process has read and written, over sockets or not."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


def test_copies_work_between_hosts_and_this_machine(host_nodes: Any, two_nodes: Any) -> None:
    source = numbers(ROW).to(two_nodes[0])
    there = (source.to(host_nodes[1]) + 1).to(host_nodes[2])
    back = (there * 2).to(two_nodes[1])
    assert torch.equal(back.cpu(), (numbers(ROW) + 1) * 2)


def test_copies_work_between_nodes_on_two_pools(host_nodes: Any) -> None:
    from flowchan.pipelines import RemoteNodes

    with RemoteNodes(1, on=local(1)) as others:
        there = (numbers(ROW).to(host_nodes[0]) + 1).to(others[0])
        assert torch.equal((there * 2).to(host_nodes[1]).cpu(), (numbers(ROW) + 1) * 2)


class UnreachableNode:
    """Client of a node with an inbox that no other node can connect to."""

    def __init__(self, id: str, reach: Any) -> None:
        from flowchan.pipelines.remote_tensors.node_copies import NodePlace

        self.place, self.device = NodePlace(id, None, reach), id
        self.introduced: dict[str, Any] = {}
        self.relay: Any = None
        self.sent: list[Any] = []

    def ask(self, *question: Any) -> None:
        from flowchan.pipelines import RemoteError

        raise RemoteError("no route to the inbox")

    def send(self, *message: Any) -> None:
        self.sent.append(message)


def test_unreachable_inbox_is_replaced_by_a_channel_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    from flowchan.hosts.pool_channels import Reach
    from flowchan.pipelines.remote_tensors.introductions import introduce

    reach = Reach("127.0.0.1", False, 10.0)
    sender, receiver = UnreachableNode("a", reach), UnreachableNode("b", reach)
    for _ in range(2):
        introduce(sender, receiver)  # type: ignore[arg-type]
    assert receiver.sent == [("relay", receiver.relay)]
    assert sender.sent == [("peer", "b", receiver.relay)]
    assert "copies from a to b go through this program: no route to the inbox" in caplog.text
    receiver.relay.close()


def test_nodes_are_distributed_over_all_hosts(host_nodes: Any) -> None:
    assert len({row.host for row in host_nodes.stats()}) == 3


def test_device_option_places_the_kernels_of_each_node() -> None:
    from flowchan.pipelines import RemoteNodes

    with RemoteNodes(2, device=["cpu", "cpu"]) as nodes:
        assert torch.ones(2, device=nodes[1]).to(nodes[0]).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"RemoteNodes: device must be .*got"):
        RemoteNodes(2, device=["cpu"])
    with pytest.raises((ValueError, RuntimeError), match="device"):
        RemoteNodes(1, device="nonsense")

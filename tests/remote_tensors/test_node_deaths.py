"""Test that every later use of a killed node raises ``NodeDied``, and that other nodes keep working."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from failing_operations import Latch, pid_of
from support.optional_packages import optional

from flowchan import hosts
from flowchan.pipelines import NodeDied, RemoteError, RemoteNodes

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

MEGABYTES_16 = 4_000_000  # number of elements


@pytest.fixture
def nodes() -> Iterator[Any]:
    nodes = RemoteNodes(2)
    yield nodes
    with contextlib.suppress(NodeDied):  # the tests of close() have separate nodes
        nodes.close()


@pytest.fixture
def latch(tmp_path: Path) -> Iterator[Latch]:
    latch = Latch(tmp_path / "latch")
    yield latch
    latch.release()


def ones(device: Any) -> Any:
    return torch.ones(3, device=device)


def check_others(nodes: Any, dead: int = 0) -> None:
    """Check that the other node still works."""
    other = nodes[1 - dead]
    assert (ones(other) + 1).tolist() == [2, 2, 2]


class KillWhenBusy(threading.Thread):
    """Thread that kills a node as soon as the node runs the latch's operation."""

    def __init__(self, latch: Latch) -> None:
        super().__init__()
        self.latch, self.pid = latch, 0
        self.start()

    def run(self) -> None:
        self.pid = self.latch.wait()
        os.kill(self.pid, signal.SIGKILL)


# --- what the error says ---


@pytest.mark.parametrize(
    ("how", "number", "code"),
    [("kill", signal.SIGKILL, None), ("limit", signal.SIGXCPU, None), ("_exit", None, 3)],
)
def test_node_died_names_the_operation_that_killed_it(
    nodes: Any, how: str, number: int | None, code: int | None
) -> None:
    x = ones(nodes[0])
    pid = pid_of(nodes[0])
    for _ in range(100):
        x = x + 1
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    y = torch.ops.failing.fail(x, how)

    def issue_more() -> None:
        nonlocal y
        for _ in range(1000):
            y = y + 1
        y.cpu()

    with pytest.raises(NodeDied) as caught:
        issue_more()
    error = caught.value
    assert (error.node, error.host, error.pid, error.signal, error.exitcode) == (0, "", pid, number, code)
    assert "failing::fail" in error.operation
    text = str(error)
    assert f"issued at {__file__}:{line} in test_node_died_names_the_operation_that_killed_it" in text
    assert str(pid) in text
    if number:
        assert signal.Signals(number).name in text
    check_others(nodes)


def test_node_died_can_be_pickled(nodes: Any) -> None:
    with pytest.raises(NodeDied) as caught:
        torch.ops.failing.fail(ones(nodes[0]), "kill").cpu()
    error, copy = caught.value, pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is NodeDied
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_idle_node_that_was_killed_raises_at_the_next_use(nodes: Any) -> None:
    x = ones(nodes[0])
    os.kill(pid_of(nodes[0]), signal.SIGKILL)
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(NodeDied) as caught:
        torch.mul(x, 3.0).cpu()
    assert caught.value.signal == signal.SIGKILL
    assert "mul" in caught.value.operation
    assert f"{__file__}:{line}" in str(caught.value)
    for _ in range(2):  # later uses raise the same error
        with pytest.raises(NodeDied):
            x.cpu()
        with pytest.raises(NodeDied):
            (x + 1).cpu()
        with pytest.raises(NodeDied):
            ones(nodes[0]).sum().item()
    check_others(nodes)


# --- where the program is when the node dies ---


@pytest.mark.parametrize(
    "fetch",
    [
        lambda nodes, y: y.cpu(),
        lambda nodes, y: y.sum().item(),
        lambda nodes, y: y.nonzero(),
        lambda nodes, y: nodes.sync(),
        lambda nodes, y: nodes.sync(timeout=60),
        lambda nodes, y: torch.remote.synchronize(nodes[0]),
        lambda nodes, y: y.to(nodes[1]).cpu(),
        lambda nodes, y: print(y),
    ],
    ids=["cpu", "item", "nonzero", "sync", "sync with timeout", "synchronize", "copy", "print"],
)
def test_waiting_call_raises_node_died(nodes: Any, latch: Latch, fetch: Callable[[Any, Any], Any]) -> None:
    y = latch.occupy(ones(nodes[0]))
    killer = KillWhenBusy(latch)
    with pytest.raises(NodeDied) as caught:
        fetch(nodes, y)
    killer.join()
    assert (caught.value.node, caught.value.pid, caught.value.signal) == (0, killer.pid, signal.SIGKILL)
    assert "failing::wait" in caught.value.operation
    check_others(nodes)


def test_program_that_issues_into_a_full_channel_raises_node_died(nodes: Any, latch: Latch) -> None:
    """The node executes nothing, so its channel fills up and the program must wait for room."""
    y = latch.occupy(ones(nodes[0]))
    killer = threading.Timer(0.3, lambda: os.kill(latch.wait(), signal.SIGKILL))
    killer.start()

    def issue() -> None:
        nonlocal y
        while True:
            y = y + 1

    with pytest.raises(NodeDied) as caught:
        issue()
    killer.join()
    assert "failing::wait" in caught.value.operation
    check_others(nodes)


@pytest.mark.parametrize("way", ["upload", "download", "copy out", "copy in"])
@pytest.mark.parametrize("seed", range(3))
def test_node_killed_during_a_large_transfer_raises_node_died(nodes: Any, way: str, seed: int) -> None:
    local = torch.ones(MEGABYTES_16)
    far, other = local.to(nodes[0]), local.to(nodes[1])
    pid = pid_of(nodes[0])
    killer = threading.Timer(random.Random(seed).uniform(0, 0.1), os.kill, (pid, signal.SIGKILL))
    killer.start()

    def transfer() -> None:
        while True:
            if way == "upload":
                local.to(nodes[0])
            elif way == "download":
                assert far.cpu()[-1] == 1
            elif way == "copy out":
                assert far.to(nodes[1])[-1].item() == 1
            else:
                assert other.to(nodes[0])[-1].item() == 1

    with pytest.raises(NodeDied) as caught:
        transfer()
    killer.join()
    assert (caught.value.node, caught.value.pid) == (0, pid)
    check_others(nodes)
    assert other[-1].item() == 1


# --- copies between nodes ---


def test_receiver_of_a_dead_sender_fails_and_continues(nodes: Any, latch: Latch) -> None:
    kept = ones(nodes[1])
    received = latch.occupy(ones(nodes[0])).to(nodes[1])
    dependent = received + kept
    killer = KillWhenBusy(latch)
    with pytest.raises(NodeDied) as caught:
        dependent.cpu()  # node 1 is waiting for node 0
    killer.join()
    assert caught.value.node == 0
    with pytest.raises(NodeDied):
        received.cpu()
    assert (kept + 1).tolist() == [2, 2, 2]
    check_others(nodes)


def test_sender_to_a_dead_receiver_continues(nodes: Any) -> None:
    source = torch.ones(MEGABYTES_16 // 4).to(nodes[1])
    os.kill(pid_of(nodes[0]), signal.SIGKILL)
    for _ in range(40):  # more than the receiver's inbox accepts
        with contextlib.suppress(NodeDied):
            source.to(nodes[0])
    assert source.sum().item() == MEGABYTES_16 // 4
    check_others(nodes)


def test_in_place_copy_from_a_dead_sender_poisons_the_target(nodes: Any, latch: Latch) -> None:
    target = ones(nodes[1])
    view = target.view(3, 1)
    target.copy_(latch.occupy(ones(nodes[0])))
    killer = KillWhenBusy(latch)
    for broken in (view, target):
        with pytest.raises(NodeDied) as caught:
            broken.cpu()
        assert caught.value.node == 0
    killer.join()
    check_others(nodes)


# --- deaths that no call has reported ---


def test_close_raises_an_unnoticed_death_once() -> None:
    nodes = RemoteNodes(2)
    pid = pid_of(nodes[0])
    torch.ops.failing.fail(ones(nodes[0]), "kill")
    with pytest.raises(NodeDied) as caught:
        nodes.close()
    assert caught.value.pid == pid
    nodes.close()
    assert not psutil.pid_exists(pid)


def test_close_does_not_repeat_a_death_that_was_raised() -> None:
    with RemoteNodes(2) as nodes, pytest.raises(NodeDied):
        torch.ops.failing.fail(ones(nodes[0]), "kill").cpu()


def test_other_nodes_copy_to_each_other_after_a_death() -> None:
    with RemoteNodes(3) as nodes:
        with pytest.raises(NodeDied):
            torch.ops.failing.fail(ones(nodes[1]), "kill").cpu()
        assert (ones(nodes[0]).to(nodes[2]) + ones(nodes[2])).to(nodes[0]).tolist() == [2, 2, 2]


def test_close_ends_a_node_that_is_stuck(tmp_path: Path) -> None:
    latch = Latch(tmp_path / "latch")
    nodes = RemoteNodes(2)
    pids = [pid_of(nodes[1])]

    def leave_block() -> None:
        with nodes:
            latch.occupy(ones(nodes[0]))
            with pytest.raises(TimeoutError):
                nodes.sync(timeout=0.01)
            pids.append(latch.wait())
            raise KeyError  # the block does not wait for the node

    with pytest.raises(KeyError):
        leave_block()
    assert not any(map(psutil.pid_exists, pids))


# --- nodes on hosts ---


def workers_of_agents() -> list[psutil.Process]:
    from support.local_agents import agents_of

    return [worker for agent in agents_of(psutil.Process()) for worker in agent.children()]


@pytest.mark.any_value
@pytest.mark.parametrize("victim", ["worker", "agent"])
def test_killed_node_on_a_host_raises_node_died(victim: str) -> None:
    with contextlib.suppress(NodeDied), RemoteNodes(2, on=hosts.local(2, peer_timeout=2.0)) as nodes:
        tensors = [ones(node) for node in nodes]
        assert [(x + 1).sum().item() for x in tensors] == [6, 6]
        worker = workers_of_agents()[0]
        worker.suspend()
        sums = [x + 1 for x in tensors]
        (worker if victim == "worker" else worker.parent()).kill()
        died: list[NodeDied] = []
        for x in sums:
            try:
                x.cpu()
            except NodeDied as error:
                died.append(error)
        (error,) = died
        assert error.host == f"local-{error.node + 1}"
        if victim == "worker":
            assert (error.pid, error.signal) == (worker.pid, signal.SIGKILL)
        assert error.operation
        assert (tensors[1 - error.node] * 2).tolist() == [2, 2, 2]


def test_failure_on_a_host_has_both_tracebacks() -> None:
    with RemoteNodes(2, on=hosts.local(2)) as nodes:
        y = torch.eye(3).to(nodes[1])[torch.tensor([5])]
        with pytest.raises(RemoteError) as caught:
            y.to(nodes[0]).cpu()
        assert isinstance(caught.value.__cause__, IndexError)
        assert caught.value.node == 1
        assert f"issued at {__file__}" in str(caught.value)
        assert ones(nodes[1]).tolist() == [1, 1, 1]

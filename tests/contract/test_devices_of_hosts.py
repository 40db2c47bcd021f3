"""C13: device tensors reach another host through host memory, on the device with the same number.

The tests use fake devices (``fake_device``).
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from fake_device import FAKE, FakeTensor, kept
from support.peers import HostPeer

from flowchan import Channel, ChannelError, Graph
from flowchan.hosts import local
from flowchan.pipelines import Client, Server
from flowchan.transport.device import transfer

pytestmark = pytest.mark.usefixtures("fake_device")


def through_the_host():
    """Return how often this process copied to and from host memory and allocated device memory."""
    return FAKE.counts["to host"], FAKE.counts["from host"], FAKE.counts["allocate"]


def of_another_host(*devices):
    """Let this program see the devices of a different host."""
    transfer.use(FAKE)
    FAKE.seen = list(devices)


def test_tensor_arrives_on_its_device_if_visible():
    ch = Channel(across="hosts")
    ch.put([FakeTensor(np.arange(100_000), "fake-B"), "beside"])
    tensor, _ = ch.get()
    assert tensor.device == "fake-B"
    assert np.array_equal(tensor.numpy(), np.arange(100_000))
    assert through_the_host() == (1, 1, 0)
    assert kept() == 0


@pytest.mark.parametrize("ports", [False, True])
def test_tensor_arrives_on_the_device_with_the_same_number(ports):
    outward, inward = Channel(across="hosts"), Channel(across="hosts")

    def move():
        of_another_host("other-A", "other-B")
        taking, giving = (outward.reader(), inward.writer()) if ports else (outward, inward)
        for tensor in taking:
            assert tensor.device == "other-B"
            giving.put(FakeTensor(2 * tensor.numpy(), "other-A"))
        giving.close()
        if ports:
            taking.close()

    peer = HostPeer(move)
    for number in (1, 1000, 100_000):
        outward.put(FakeTensor(np.arange(number), "fake-B"))
        tensor = inward.get()
        assert tensor.device == "fake-A"
        assert np.array_equal(tensor.numpy(), 2 * np.arange(number))
    outward.close()
    peer.result()
    assert through_the_host() == (3, 3, 0)


def test_error_of_receiver_with_fewer_devices_names_the_remedy():
    ch = Channel(across="hosts")

    def take():
        of_another_host("other-A")
        with pytest.raises(ChannelError, match=r"on fake:1 of another host.*1 fake dev.*tensor\.cpu\(\)"):
            ch.get()

    peer = HostPeer(take)
    ch.put(FakeTensor(np.arange(3), "fake-B"))
    peer.result()


class Doubled:
    """A worker that uses a device before its first item."""

    def __init__(self):
        of_another_host("other-A", "other-B")

    def __call__(self, tensor):
        assert tensor.device == "other-B"
        return FakeTensor(2 * tensor.numpy(), tensor.device)


def test_stages_on_hosts_forward_device_tensors(monkeypatch):
    """Tensors go to one agent, then to a second agent, and then back to the program."""
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if "/tests" in path))
    graph, pool = Graph("devices"), local(2)
    made = graph.source(range(1, 6)).map(lambda n: FakeTensor(np.arange(n * 10_000), "fake-B"))
    results = made.map(Doubled, on=pool, workers=2).map(Doubled, on=pool, workers=2).collect()
    found = graph.run()[results]
    assert [tensor.device for tensor in found] == ["fake-B"] * 5
    for n, tensor in enumerate(found, 1):
        assert np.array_equal(tensor.numpy(), 4 * np.arange(n * 10_000))
    assert through_the_host() == (5, 5, 0)


# --- Servers and clients, as in torch-ipc with CUDA ---

VIEWS = {
    "whole": lambda: np.arange(12.0).reshape(3, 4),
    "easy": lambda: np.arange(24.0).reshape(4, 6)[:, 1:4],
    "hard": lambda: np.arange(360.0).reshape(3, 4, 5, 6)[1:, ::2, 1:4, 2:5],
    "transposed": lambda: np.arange(12.0).reshape(3, 4).T,
    "no elements": lambda: np.zeros((0, 3)),
    "no dimensions": lambda: np.array(7.0),
}


def remote_channel(server, function):
    """Run a client on a host with two devices."""
    address, secret = server.address, server.secret

    def work():
        of_another_host("other-A", "other-B")
        with Client(address, secret) as client:
            return function(client)

    return HostPeer(work)


def test_device_bytes_are_sent_to_a_server_and_back():
    """Corresponds to torch-ipc's testCUDAStoragePingPong."""

    def echo(client):
        tensor = client.recv()
        client.send(FakeTensor(tensor.numpy() + 1, tensor.device))
        return tensor.device

    with Server() as server:
        peer = remote_channel(server, echo)
        (client,) = server.clients(1)
        client.send(FakeTensor(np.arange(100, dtype="u1"), "fake-B"))
        inward = client.recv()
        assert peer.result() == "other-B"
    assert (inward.device, inward.numpy().dtype) == ("fake-B", "u1")
    assert np.array_equal(inward.numpy(), np.arange(1, 101))
    assert through_the_host() == (1, 1, 0)
    assert kept() == 0


@pytest.mark.parametrize("view", VIEWS)
def test_device_tensors_are_sent_to_a_server_and_its_clients(view):
    """A broadcast copies to host memory only once.

    Corresponds to torch-ipc's testCUDATensor and testNoncontiguousCUDATensor.
    """
    outward = VIEWS[view]()

    def send(client):
        client.send(FakeTensor(outward, "other-A"))
        tensor = client.recv()
        return tensor.device, tensor.numpy()

    with Server() as server:
        peers = [remote_channel(server, send) for _ in range(2)]
        for client in server.clients(2):
            came = client.recv()
            assert came.device == "fake-A"
            assert np.array_equal(came.numpy(), outward)
            assert came.numpy().shape == outward.shape
        server.broadcast(FakeTensor(came.numpy() + 1, "fake-B"))
        for peer in peers:
            device, array = peer.result()
            assert device == "other-B"
            assert np.array_equal(array, outward + 1)
    assert through_the_host() == (1, 2, 0)
    assert kept() == 0

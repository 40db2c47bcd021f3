"""Test the promises of torch-ipc's client and server, and what happens when either side dies.

Each of torch-ipc's tests has a counterpart here. Clients are threads, or separate programs if the test kills
them.
"""

from __future__ import annotations

import secrets
import socket
from functools import partial

import numpy as np
import pytest
from support.optional_packages import optional
from support.peers import HostPeer, ThreadPeer
from support.waiting import wait_until

from flowchan import Broken, Closed, Drained, Empty, HostError
from flowchan.pipelines import Client, Server
from flowchan.remote import joining
from flowchan.remote.channel_server import ChannelServer

torch = optional("torch")

SECRET = secrets.token_bytes(32)


@pytest.fixture
def server():
    with Server() as server:
        yield server


def with_helper(server, function, tag=""):
    """Run ``function`` with a client in another thread; the client is closed when the function returns."""

    def work():
        with Client(server.address, server.secret, tag=tag) as client:
            return function(client)

    return ThreadPeer(work)


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


# --- counterparts of torch-ipc's tests ---


def test_server_sees_and_renames_connected_client(server):
    """testListenAndConnect: the server sees the client's tag and number, and can change the tag."""
    peer = with_helper(server, lambda client: (client.id, client.recv()), tag="first")
    (client,) = server.clients(1)
    assert (client.tag, client.id) == ("first", 1)
    client.tag = "renamed"
    assert server.clients(tag="renamed") == [client]
    assert server.clients(tag="first") == []
    client.send("bye")
    assert peer.result() == (1, "bye")


def test_client_can_start_before_its_server():
    """testSlowStart: the client starts before its server."""
    address = free_address()

    def early():
        with Client(address, SECRET) as client:
            return client.recv()

    peer = ThreadPeer(early)
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as wrong:
        wrong.accept()[0].close()  # the client has connected to the wrong server
    with Server(address, secret=SECRET) as server:
        server.clients(1)[0].send("late")
        assert peer.result() == "late"


def test_client_and_server_exchange_messages(server):
    """testPingPong."""

    def ping(client):
        client.send("ping")
        return client.recv()

    peer = with_helper(server, ping)
    (client,) = server.clients(1)
    assert client.recv() == "ping"
    client.send("pong")
    assert peer.result() == "pong"


def test_recv_nowait_raises_empty_until_a_message_arrives(server):
    """testPingPongAsync: ``recv_nowait`` raises Empty while no message has arrived."""

    def ping(client):
        with pytest.raises(Empty):
            client.recv_nowait()
        client.send("ping")
        found = []

        def came():
            try:
                found.append(client.recv_nowait())
            except Empty:
                return False
            return True

        wait_until(came)
        return found

    peer = with_helper(server, ping)
    (client,) = server.clients(1)
    assert client.recv() == "ping"
    client.send("pong")
    assert peer.result() == ["pong"]


def test_broadcast(server):
    """testBroadcast: send first to the clients with one tag, then to all."""
    peers = [
        with_helper(server, lambda client: [client.recv() for _ in range(1 + (client.tag == "odd"))], tag)
        for tag in ["even", "odd"] * 5
    ]
    server.clients(10)
    assert server.broadcast({"to": "odd"}, tag="odd") == 5
    assert server.broadcast("all") == 10
    found = [peer.result() for peer in peers]
    assert found == [["all"], [{"to": "odd"}, "all"]] * 5


def test_broadcast_encodes_the_message_once(server):
    """Arrays in the message arrive unchanged."""
    counted = []

    class Counts:
        def __reduce__(self):
            counted.append(self)
            return int, (7,)

    peers = [with_helper(server, lambda client: client.recv()) for _ in range(3)]
    server.clients(3)
    server.broadcast((Counts(), np.arange(100_000)))
    assert [(seven, int(array.sum())) for seven, array in (peer.result() for peer in peers)] == [
        (7, sum(range(100_000)))
    ] * 3
    assert len(counted) == 1


def test_recv_any_returns_message_and_its_client(server):
    """testRecvAny: the server receives one message from each client."""
    peers = [with_helper(server, lambda client: client.send(client.id)) for _ in range(10)]
    found = [server.recv_any() for _ in range(10)]
    assert all(message == client.id for message, client in found)
    assert sorted(message for message, _ in found) == list(range(1, 11))
    for peer in peers:
        peer.result()


def test_recv_any_with_tag_ignores_other_clients(server):
    def work(client):
        client.send(client.tag)
        client.recv()

    peers = [with_helper(server, work, tag) for tag in ("a", "b")]
    server.clients(2)
    assert server.recv_any(tag="b")[0] == "b"
    with pytest.raises(Empty):
        server.recv_any(tag="b", timeout=0.01)
    assert server.recv_any()[0] == "a"
    server.broadcast("done")
    for peer in peers:
        peer.result()


def test_byte_tensors_can_be_exchanged(server):
    """testStoragePingPong."""

    def echo(client):
        client.send(client.recv(into=torch.zeros(100, dtype=torch.uint8)) + 1)

    peer = with_helper(server, echo)
    (client,) = server.clients(1)
    client.send(torch.arange(100, dtype=torch.uint8))
    own = torch.zeros(100, dtype=torch.uint8)
    assert client.recv(into=own) is own
    assert torch.equal(own, torch.arange(1, 101, dtype=torch.uint8))
    peer.result()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: torch.zeros(4),
        lambda: torch.zeros(3, 2),
        lambda: torch.zeros(2, 3, 1),
        lambda: torch.ones(2, 3).double(),
        lambda: np.zeros(6),
    ],
    ids=["size", "dimensions", "number of dimensions", "type", "array"],
)
def test_message_that_does_not_fit_can_be_received_again(server, wrong):
    """testStorageSizeMismatch, testTensorNumDimensionsMismatch, testTensorDimensionSizeMismatch."""
    peer = with_helper(server, lambda client: client.send(torch.ones(2, 3)))
    (client,) = server.clients(1)
    with pytest.raises(ValueError, match="into must"):
        client.recv(into=wrong())
    assert torch.equal(client.recv(into=torch.zeros(2, 3)), torch.ones(2, 3))
    peer.result()


VIEWS = {
    "whole": lambda: torch.arange(12.0).reshape(3, 4),
    "easy": lambda: torch.arange(24.0).reshape(4, 6)[:, 1:4],
    "transport": lambda: torch.arange(60.0).reshape(3, 4, 5)[:, 1:3, 1:4],
    "hard": lambda: torch.arange(360.0).reshape(3, 4, 5, 6)[1:, ::2, 1:4, 2:5],
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "no elements": lambda: torch.zeros(0, 3),
    "no dimensions": lambda: torch.tensor(7.0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_tensors(server, view):
    """testTensor, testNoncontiguousTensorEasy, Transport and Hard, testTensorZeroSized.

    The tensors are received into views.
    """
    peer = with_helper(server, lambda client: client.send(VIEWS[view]()))
    (client,) = server.clients(1)
    into = torch.full_like(VIEWS[view](), -1)
    assert torch.equal(client.recv(into=into), VIEWS[view]())
    peer.result()


def test_a_client_can_be_passed_between_threads(server):
    """testSerialize."""
    client = ThreadPeer(lambda: Client(server.address, server.secret)).result()
    with client:
        client.send("hi")
        assert server.recv_any()[0] == "hi"


def test_stats_count_bytes_on_both_sides(server):
    """testNetStats."""

    def work(client):
        client.send(bytes(100_000))
        client.recv()
        # The sending thread updates the count after its system call, possibly after the answer has arrived.
        wait_until(lambda: client.stats().sent > 100_000)

    peer = with_helper(server, work)
    (client,) = server.clients(1)
    client.recv()
    there = client.stats()
    assert there.received > 100_000
    assert server.stats().received >= there.received
    client.send("done")
    peer.join()


# --- tests without a counterpart in torch-ipc ---


def test_client_that_closes_ends_the_connection_cleanly(server):
    peer = with_helper(server, lambda client: client.send("last"))
    (client,) = server.clients(1)
    peer.join()
    assert client.recv() == "last"
    with pytest.raises(Drained):
        client.recv()
    with pytest.raises(Closed):
        client.send("lost")
    assert server.clients() == []


def test_server_that_closes_ends_the_connection_cleanly():
    server = Server()

    def read(client):
        found = client.recv(), client.recv()
        with pytest.raises(Drained):
            client.recv()
        with pytest.raises(Closed):  # noqa: PT012 - messages already on their way are lost
            while True:
                client.send("lost")
        return found

    peer = with_helper(server, read)
    server.clients(1)
    server.broadcast("one")
    server.broadcast("two")
    server.close()
    assert peer.result() == ("one", "two")


def test_closed_server_rejects_clients():
    server = Server()
    server.close()
    with pytest.raises(HostError, match=server.address):
        Client(server.address, server.secret, timeout=0.2)


ImpatientOwner = partial(ChannelServer, peer_timeout=2)


def test_death_of_client_differs_from_its_close(monkeypatch):
    """All messages that the client sent before its death arrive first."""
    monkeypatch.setattr(joining, "ChannelServer", ImpatientOwner)

    def work(address, secret):
        client = Client(address, secret, tag="dies")
        client.send("alive")
        client.recv()

    with Server() as server:
        peer = HostPeer(work, server.address, server.secret)
        message, client = server.recv_any()
        assert (message, client.tag) == ("alive", "dies")
        peer.kill()
        peer.join()
        with pytest.raises(Broken, match="dies"):
            server.recv_any()
        assert server.clients() == []
        with pytest.raises(Empty):
            server.recv_any(timeout=0.01)


def test_death_of_server_differs_from_its_close():
    address = free_address()

    def serve():
        joining.ChannelServer = ImpatientOwner
        server = Server(address, secret=SECRET)
        server.clients(1)[0].send("alive")
        server.recv_any()

    peer = HostPeer(serve)
    with Client(address, SECRET) as client:
        assert client.recv() == "alive"
        peer.kill()
        peer.join()
        with pytest.raises(Broken):
            client.recv()


@pytest.mark.parametrize("end", [Server, partial(Client, "127.0.0.1:1", bytes(32))])
def test_tls_accepts_only_bools(end):
    with pytest.raises(TypeError, match=r"(Server|Client): tls must be True or False, got 'x'"):
        end(tls="x")


def test_client_with_wrong_secret_is_rejected(server):
    with pytest.raises(HostError, match="secret"):
        Client(server.address, SECRET, timeout=0.5)
    assert server.clients() == []


def test_clients_raises_with_counts_when_some_are_missing(server):
    with pytest.raises(Empty, match="0 of 2 clients 'x'"):
        server.clients(2, tag="x", timeout=0.01)

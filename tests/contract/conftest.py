"""Fixtures of the contract suite.

A test that takes ``make`` runs once per transport. A test that also takes ``spawn_peer`` runs once per
transport and kind of peer. These marks limit a test:

- ``@pytest.mark.copying``: to transports that copy items
- ``@pytest.mark.other_process``: to peers in another process
- ``@pytest.mark.one_machine(why)``: to peers on the same machine as the channels
- ``@pytest.mark.not_hosts(why)``: to transports within one machine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.peers import Gate, HostPeer, Peer, ProcessPeer, ThreadPeer
from support.waiting import wait_until
from transports import TRANSPORTS, Transport

from flowchan import Channel
from flowchan.hosts import serve

KINDS = {"thread": ThreadPeer, "process": ProcessPeer, "host": HostPeer}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "copying: only over transports that copy items")
    config.addinivalue_line("markers", "other_process: only with peers in another process")
    config.addinivalue_line("markers", "one_machine(why): do not run the test with peers on another host")
    config.addinivalue_line("markers", "not_hosts(why): do not run the test on channels across hosts")


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    """Shorten the peer timeout. A dead remote process is detected after 1.5 times that time."""
    serve(peer_timeout=5)
    yield
    serve()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    copying = metafunc.definition.get_closest_marker("copying") is not None
    unwanted = set()
    if metafunc.definition.get_closest_marker("other_process") is not None:
        unwanted.add("thread")
    if metafunc.definition.get_closest_marker("one_machine") is not None:
        unwanted.add("host")
    not_hosts = metafunc.definition.get_closest_marker("not_hosts") is not None
    on_device = "fake_device" in metafunc.fixturenames
    transports = [transport for transport in TRANSPORTS if transport.copies or not copying]
    transports = [transport for transport in transports if transport.devices or not on_device]
    transports = [transport for transport in transports if not (not_hosts and "host" in transport.peers)]
    if "peer_kind" in metafunc.fixturenames:
        pairs = [
            (transport, kind) for transport in transports for kind in transport.peers if kind not in unwanted
        ]
        metafunc.parametrize(("transport", "peer_kind"), [parameter(*pair) for pair in pairs])
    elif "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", transports, ids=[transport.name for transport in transports])


def parameter(transport: Transport, kind: str) -> Any:
    """Return the parameter for a pair of transport and peer.

    A test of a remote transport runs either with peers in processes or with peers on hosts. Both kinds of
    peers start slowly.
    """
    remote = "host" in transport.peers and kind != "thread"
    marks = [pytest.mark.alternative(kind)] if remote else []
    return pytest.param(transport, kind, id=f"{transport.name}-{kind}", marks=marks)


class Factory:
    """Creates channels of one transport and keeps track of them."""

    def __init__(self, transport: Transport) -> None:
        self._medium = transport
        self._made: list[Channel] = []

    def __call__(self, capacity: Any = 64, **options: Any) -> Channel:
        channel = self._medium.make(capacity, **options)
        self._made.append(channel)
        return channel

    def abort_all(self) -> None:
        for channel in self._made:
            channel.abort(RuntimeError("the test is over"))

    def forget(self) -> None:
        self._made.clear()


@pytest.fixture
def make(transport: Transport) -> Iterator[Factory]:
    """Yield the factory ``make(capacity=64, **options)`` for one transport."""
    factory = Factory(transport)
    yield factory
    factory.forget()


@pytest.fixture
def spawn_peer(make: Factory, peer_kind: str) -> Iterator[Callable[..., Peer]]:
    """Yield ``spawn_peer(function, *args)``, which starts a peer.

    Peers that a failed test leaves behind are ended.
    """
    peers: list[Peer] = []

    def spawn(function: Callable[..., Any], *args: Any) -> Peer:
        peer = KINDS[peer_kind](function, *args)
        peers.append(peer)
        return peer

    yield spawn
    if any(peer.running() for peer in peers):
        make.abort_all()
    for peer in peers:
        if isinstance(peer, ProcessPeer | HostPeer) and peer.running():
            peer.kill()
        peer.join()


@pytest.fixture
def make_gate() -> Iterator[Callable[[int], Gate]]:
    """Yield ``make_gate(n)``, which makes a barrier for n peers that the test opens."""
    gates: list[Gate] = []

    def make(peers: int) -> Gate:
        gates.append(Gate(peers))
        return gates[-1]

    yield make
    for gate in gates:
        gate.close()


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch, by_fork: None) -> Iterator[None]:
    """Reset the device state of this process and its workers, and give them a device made of files."""
    from fake_device import FAKE

    from flowchan.transport.device import transfer

    monkeypatch.setattr(transfer, "_state", transfer.TransferState())
    monkeypatch.setattr(FAKE, "seen", ["fake-A", "fake-B"])
    monkeypatch.setattr(FAKE, "full", False)
    monkeypatch.delenv(transfer.SWITCH, raising=False)
    FAKE.begin_anew()
    transfer.use(FAKE)
    yield
    wait_until(lambda: not transfer._state.settling)
    for owner in transfer._state.owners.values():
        owner.close()
    FAKE.begin_anew()

"""Fixtures of the contract suite.

A test that takes ``make`` runs once per medium. A test that also takes ``spawn_peer`` runs once per medium
and place of its peers. ``@pytest.mark.copying`` limits a test to media that copy items;
``@pytest.mark.other_process`` limits it to peers in another process; ``@pytest.mark.one_machine(why)`` to
peers on the machine where the channels are; ``@pytest.mark.not_hosts(why)`` to the other media.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from media import MEDIA, Medium
from peers import Gate, HostPeer, Peer, ProcessPeer, ThreadPeer
from waiting import wait_until

from flowchan import Channel
from flowchan.hosts import serve

KINDS = {"thread": ThreadPeer, "process": ProcessPeer, "host": HostPeer}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "copying: only over media that copy items")
    config.addinivalue_line("markers", "other_process: only with peers in another process")
    config.addinivalue_line("markers", "one_machine(why): not with peers on another host")
    config.addinivalue_line("markers", "not_hosts(why): not over channels across hosts")


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    """Who dies elsewhere counts as dead after one and a half times that."""
    serve(patience=5)
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
    media = [medium for medium in MEDIA if medium.copies or not copying]
    media = [medium for medium in media if medium.devices or not on_device]
    media = [medium for medium in media if not (not_hosts and "host" in medium.peers)]
    if "peer_kind" in metafunc.fixturenames:
        pairs = [(medium, kind) for medium in media for kind in medium.peers if kind not in unwanted]
        names = [f"{medium.name}-{kind}" for medium, kind in pairs]
        metafunc.parametrize(("medium", "peer_kind"), pairs, ids=names)
    elif "medium" in metafunc.fixturenames:
        metafunc.parametrize("medium", media, ids=[medium.name for medium in media])


class Factory:
    """Makes channels of one medium and remembers them."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
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
def make(medium: Medium) -> Iterator[Factory]:
    """The factory ``make(capacity=64, **options)`` of one medium."""
    factory = Factory(medium)
    yield factory
    factory.forget()


@pytest.fixture
def spawn_peer(make: Factory, peer_kind: str) -> Iterator[Callable[..., Peer]]:
    """``spawn_peer(function, *args)`` starts the function elsewhere. What a failed test left running is
    ended."""
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
    """``make_gate(n)``: a barrier for n peers that the test opens."""
    gates: list[Gate] = []

    def make(peers: int) -> Gate:
        gates.append(Gate(peers))
        return gates[-1]

    yield make
    for gate in gates:
        gate.close()


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch, by_fork: None) -> Iterator[None]:
    """A process that has never put or got a tensor on a device, and a device made of files, which its workers
    have too."""
    from fake_device import FAKE

    from flowchan.items.device import crossing

    monkeypatch.setattr(crossing, "_state", crossing.State())
    monkeypatch.setattr(FAKE, "seen", ["fake-A", "fake-B"])
    monkeypatch.setattr(FAKE, "full", False)
    monkeypatch.delenv(crossing.SWITCH, raising=False)
    FAKE.begin_anew()
    crossing.use(FAKE)
    yield
    wait_until(lambda: not crossing._state.looking)
    for owner in crossing._state.owners.values():
        owner.close()
    FAKE.begin_anew()

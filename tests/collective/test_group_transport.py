"""Test groups over hosts with a transport that the user has registered."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.group_members import SECRET, OverHosts, die, free_address, over_hosts, raised, shrunk

from flowchan import GroupError, MemberDied, collective
from flowchan.collective.rendezvous.address import meet_at
from flowchan.transport import tcp


class UnixSockets:
    """A transport of abstract Unix sockets that counts the connections that this process opens."""

    name = "Unix sockets"

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.connected: list[str] = []

    def listen(self, host: str) -> tuple[str, socket.socket]:
        self.hosts.append(host)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind("")
        sock.listen(256)
        return sock.getsockname().hex(), sock

    def connect(self, address: str, timeout: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            sock.connect(bytes.fromhex(address))
        except BaseException:
            sock.close()
            raise
        self.connected.append(address)
        return sock


@pytest.fixture
def unix_sockets() -> Iterator[UnixSockets]:
    transport = UnixSockets()
    collective.register_transport(transport)
    try:
        yield transport
    finally:
        collective.register_transport(None)


def everything(g: Any) -> tuple[Any, ...]:
    """Run every operation, with small values and with arrays larger than a socket's buffer."""
    large = np.full(1 << 20, g.rank, dtype=np.int32)
    g.barrier()
    total = g.allreduce(large)
    assert set(total.tolist()) == {sum(range(g.size))}
    block = np.full(1 << 20, g.rank, dtype=np.int32)
    assert set(g.broadcast(block, root=1).tolist()) == {1}
    right, left = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    with g.split(g.rank < 3) as part:
        parts = part.allgather(g.rank)
    return (
        g.allgather(f"rank {g.rank}"),
        g.gather(g.rank, root=1),
        g.scatter(list("abcd"[: g.size]) if g.rank == 0 else None),
        g.alltoall([(g.rank, other) for other in range(g.size)]),
        g.sendreceive(bytes([g.rank]) * 1_000_000, to=right, source=left)[:1],
        parts,
    )


def test_all_operations_work_over_a_registered_transport(
    unix_sockets: UnixSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowchan.collective.connector.dial", None)  # no TCP after the rendezvous
    monkeypatch.setattr("flowchan.collective.connector.listen", None)
    found = raised(over_hosts(4, everything))
    assert [one[0] for one in found] == [["rank 0", "rank 1", "rank 2", "rank 3"]] * 4
    assert [one[1] for one in found] == [None, [0, 1, 2, 3], None, None]
    assert [one[2] for one in found] == list("abcd")
    assert [one[3] for one in found] == [[(other, rank) for other in range(4)] for rank in range(4)]
    assert [one[4] for one in found] == [b"\3", b"\0", b"\1", b"\2"]
    assert [one[5] for one in found] == [[0, 1, 2]] * 3 + [[3]]
    assert set(unix_sockets.hosts) == {"127.0.0.1"}
    # one connection between the leaders, plus the connections for messages
    assert len(unix_sockets.connected) >= 2


def test_survivors_shrink_over_a_registered_transport(unix_sockets: UnixSockets) -> None:
    def body(g: Any) -> Any:
        if g.rank == 1:
            die()
        return shrunk(g)

    found = OverHosts("abab", body).results(3)
    assert {rank: one[1:3] for rank, one in found.items()} == {0: (3, 3), 2: (3, 3), 3: (3, 3)}
    assert found[0][3] == [0, 2, 3]


def test_receive_from_a_killed_member_raises_member_died(unix_sockets: UnixSockets) -> None:
    def body(g: Any) -> str:
        if g.rank == 1:
            g.send("last words", to=0)
            g.receive(0)
            die()
        assert g.receive(1) == "last words"
        g.send("go", to=1)
        with pytest.raises(MemberDied) as caught:
            g.receive(1)
        return str(caught.value)

    assert "rank 1, on another host" in OverHosts("ab", body).results(1)[0]


def test_members_with_different_transports_all_raise_group_error() -> None:
    names = iter(["one", "two"])
    lock = threading.Lock()

    class Changing(UnixSockets):
        @property
        def name(self) -> str:  # type: ignore[override]
            with lock:
                return next(names, "one")

    collective.register_transport(Changing())
    names = iter(["one", "two"])
    at, errors = free_address(), []

    def member(rank: int) -> None:
        with pytest.raises(GroupError, match="all members must use the same transport") as caught:
            meet_at(at, SECRET, rank, 2, 60, host=f"host {rank}")
        errors.append(str(caught.value))

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        collective.register_transport(None)
    assert len(errors) == 2
    assert all("'one'" in error and "'two'" in error for error in errors)


def test_group_keeps_its_transport_when_another_is_registered(unix_sockets: UnixSockets) -> None:
    def body(g: Any) -> list[int]:
        g.barrier()
        collective.register_transport(None)
        before = len(unix_sockets.connected)
        g.send(g.rank, to=1 - g.rank)
        assert g.receive(1 - g.rank) == 1 - g.rank
        with g.split(0) as same:
            assert same.allreduce(1) == 2
        return [before, len(unix_sockets.connected)]

    for before, after in raised(over_hosts(2, body)):
        assert after > before


def test_group_after_none_is_registered_uses_tcp(unix_sockets: UnixSockets) -> None:
    collective.register_transport(None)
    assert raised(over_hosts(2, lambda g: g.allreduce(1))) == [2, 2]
    assert unix_sockets.connected == []


@pytest.mark.parametrize("wrong", [1, object(), type("Half", (), {"name": "half", "listen": id})()])
def test_object_that_is_not_a_transport_is_rejected(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^register_transport: transport must have a name and the methods"):
        collective.register_transport(wrong)


def test_name_of_a_unix_socket_is_shown_as_text() -> None:
    assert tcp.joined("/run/a") == "/run/a"
    assert tcp.joined(b"\0abc") == "abc"
    assert tcp.joined("") == "a local peer"

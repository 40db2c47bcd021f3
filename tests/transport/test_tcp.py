"""Test addresses: a listener uses the given address, and a peer can reach the address that it receives."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ends import connected

from flowchan.transport import tcp


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("gpu1.example:65535", ("gpu1.example", 65535)),
        ("[::1]:4711", ("::1", 4711)),
    ],
)
def test_address_consists_of_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert tcp.split(address) == parts


@pytest.mark.parametrize(
    "address", ["", "4711", ":4711", "host", "host:", "::1:4711", "a:65536", "a:-1", "a:²"]
)
def test_invalid_address_raises(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address: "):
        tcp.split(address)


def listening() -> set[str]:
    """Return the listening addresses of this process, from the kernel's tables."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the descriptor that the listing itself used
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/self/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in mine:
                found.add(local.partition(":")[0])
    return found


def test_listener_on_loopback_uses_no_other_address() -> None:
    before = listening()
    with tcp.listen("127.0.0.1:0") as listener:
        assert listener.address.startswith("127.0.0.1:")
        assert "0100007F" in listening()
        assert listening() - before <= {"0100007F"}
    with tcp.listen("localhost:0"):
        assert listening() - before <= {"0100007F", "00000000000000000000000001000000"}


def test_listener_uses_exactly_the_given_address() -> None:
    """All of 127/8 belongs to this host, so no other address in that range may answer."""
    with tcp.listen("127.0.0.2:0") as listener:
        assert listener.address.startswith("127.0.0.2:")
        assert "0200007F" in listening()
        with tcp.dial(listener.address, 30) as sock:
            assert sock.getpeername()[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            tcp.dial(listener.address.replace("127.0.0.2", "127.0.0.3"), 30)


def test_listener_uses_the_given_port_and_frees_the_port() -> None:
    with tcp.listen("127.0.0.1:0") as first:
        address = first.address
        with tcp.dial(address, 30), first.accept(30):
            pass  # the end that closes a connection first keeps its port busy for a while
        with pytest.raises(OSError, match=f"can't listen on {address}: Address already in use"):
            tcp.listen(address)
    with tcp.listen(address) as second:
        assert second.address == address


def test_listener_and_dial_work_with_an_ipv6_address() -> None:
    try:
        listener = tcp.listen("[::1]:0")
    except OSError as error:
        pytest.skip(f"IPv6 is off on this machine: {error}")
    with listener:
        assert listener.address.startswith("[::1]:")
        with tcp.dial(listener.address, 30), listener.accept(30) as sock:
            assert tcp.joined(sock.getpeername()).startswith("[::1]:")


def test_refused_connection_names_the_address() -> None:
    with tcp.listen("127.0.0.1:0") as listener:
        address = listener.address
    with pytest.raises(ConnectionRefusedError, match=f"can't reach {address}: Connection refused"):
        tcp.dial(address, 30)
    with pytest.raises(OSError, match=r"^\[Errno \d+\] no\.such\.host\.invalid:1: the host"):
        tcp.dial("no.such.host.invalid:1", 30)


def test_dial_without_an_answer_times_out() -> None:
    """The listener's backlog is full, so the kernel does not answer."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = tcp.joined(full.getsockname())
    waiting: list[socket.socket] = []

    def dial_for_ever() -> None:
        while True:
            waiting.append(tcp.dial(address, 0.05))

    try:
        with pytest.raises(TimeoutError, match=f"{address} did not answer within 0.05 s"):
            dial_for_ever()
    finally:
        for sock in (full, *waiting):
            sock.close()


def test_accept_without_a_connection_times_out() -> None:
    with (
        tcp.listen("127.0.0.1:0") as listener,
        pytest.raises(TimeoutError, match=r"no peer connected to 127\.0\.0\.1:"),
    ):
        listener.accept(0.01)


def test_connection_has_the_socket_options_of_a_link() -> None:
    with connected() as ends:
        for sock in ends:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == tcp.UNHEARD
            # the kernel doubles the size
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * tcp.UNREAD
            assert not sock.get_inheritable()


@pytest.mark.parametrize(("peer", "is_here"), [("127.0.0.2", True), ("::1", True), ("192.0.2.7", False)])
def test_send_buffer_may_grow_between_hosts(peer: str, is_here: bool) -> None:
    """A buffer with a set size does not grow, which would limit the bytes per round trip."""
    with socket.socket() as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        tcp.prepare(sock, peer)
        assert (sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) != before) == is_here
        assert (sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == tcp.UNSENT) != is_here


def test_socket_connected_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that dials a free port may get that very port as its own, and connect to itself."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with tcp.listen("127.0.0.1:0") as listener:
        port = int(listener.address.rpartition(":")[2])
    assert low <= port <= high

    class Bound(socket.socket):
        def connect(self, name: object) -> None:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(name)
            super().connect(name)

    monkeypatch.setattr(socket, "socket", Bound)
    with pytest.raises(ConnectionRefusedError):
        tcp.dial(f"127.0.0.1:{port}", 30)


def test_route_to_loopback_is_loopback() -> None:
    assert tcp.route_to("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"the host 'no\.such\.host\.invalid' can't be resolved"):
        tcp.route_to("no.such.host.invalid")


TWO_INTERFACES = f"""
set -e
echo "127.0.1.1 $(hostname)" > hosts
mount --bind hosts /etc/hosts
ip link set lo up
ip link add one type veth peer name far-one
ip link add two type veth peer name far-two
ip addr add 10.11.0.1/24 dev one
ip addr add 10.12.0.1/24 dev two
for link in one far-one two far-two; do ip link set $link up; done
echo ready
{sys.executable} -c '
import socket
from flowchan.transport import tcp
print(socket.gethostbyname(socket.gethostname()), tcp.route_to("10.11.0.7"), tcp.route_to("10.12.0.7"))
with tcp.listen(tcp.route_to("10.12.0.7") + ":0") as listener:
    print(listener.address.rpartition(":")[0])
try:
    tcp.route_to("10.13.0.7")
except OSError as error:
    print(error)
'
"""


def test_address_comes_from_the_route_not_the_hostname(tmp_path: Path) -> None:
    """The test uses a network namespace with two interfaces and a hostname that resolves to 127.0.1.1."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("unshare or ip is not installed: apt-get install util-linux iproute2")
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", TWO_INTERFACES],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "ready" not in done.stdout:
        pytest.skip(f"this system does not allow network namespaces: {done.stderr.strip()}")
    assert done.stdout.splitlines()[1:] == [
        "127.0.1.1 10.11.0.1 10.12.0.1",
        "10.12.0.1",
        "[Errno 101] this host has no route to 10.13.0.7: Network is unreachable",
    ], done.stderr


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_unsupported_address_family_does_not_end_the_other_attempts(
    monkeypatch: pytest.MonkeyPatch, accepts: bool, first: bool
) -> None:
    """A name may have an IPv6 address on a machine without IPv6."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = server.getsockname()
        if not accepts:
            server.close()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", name), (-5, socket.SOCK_STREAM, 0, "", ("x", 1))]
        monkeypatch.setattr(tcp, "resolve", lambda *_: found[::-1] if first else found)
        if accepts:
            tcp.dial("two.addresses:1", 30).close()
        else:
            with pytest.raises(ConnectionRefusedError, match=r"reach two\.addresses:1"):
                tcp.dial("two.addresses:1", 30)
